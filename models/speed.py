"""How long graphs take on this CPU, side by side: one process, one batch of each in turn."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from models.dataset import Examples
from models.session import Feeds, open_session

CANDIDATES = 100
USERS = (1, 8)
_WARM = 5
_ROUNDS = 200


def batch_of(examples: Examples, users: int) -> Feeds:
    """Slates of `CANDIDATES` for so many users, made of the examples' own rows."""
    tiles = -(-CANDIDATES // examples.cand_ids.shape[1])
    people = np.arange(users) % len(examples.at_ms)
    return {
        "hist_ids": examples.hist_ids[people],
        "hist_age": examples.hist_age[people],
        "hist_mask": examples.hist_mask[people],
        "ctx_ids": examples.ctx_ids[people],
        "cand_ids": examples.cand_ids[np.arange(users * tiles) % len(examples.cand_ids)],
        "tile_user": np.repeat(np.arange(users, dtype=np.int32), tiles),
    }


def compare(
    graphs: Mapping[str, bytes],
    examples: Examples,
    *,
    users: Sequence[int] = USERS,
    threads: int = 1,
    rounds: int = _ROUNDS,
) -> dict[str, dict[int, float]]:
    """Median milliseconds of a run, by graph and number of users."""
    sessions = {name: open_session(graph, threads=threads) for name, graph in graphs.items()}
    found: dict[str, dict[int, float]] = {name: {} for name in graphs}
    for count in users:
        feeds = batch_of(examples, count)
        taken: dict[str, list[float]] = {name: [] for name in graphs}
        for _ in tqdm(range(rounds), desc=f"time {count} users", leave=False, mininterval=1):
            for name, session in sessions.items():
                taken[name].append(_time_ms(session, feeds))
        for name, values in taken.items():
            found[name][count] = float(np.median(values[_WARM:]))
    return found


def _time_ms(session: Any, feeds: Feeds) -> float:
    started_s = time.perf_counter()
    session.run(None, feeds)
    return (time.perf_counter() - started_s) * 1e3
