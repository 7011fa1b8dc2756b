"""Made traces: arrivals from a file or a model, users by Zipf, slates by a histogram."""

from __future__ import annotations

import csv
import heapq
import io
import tarfile
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadtests.traces.arrivals import FloatArray
from loadtests.traces.trace import Record, TraceFault, open_bytes

T = TypeVar("T")
_TAR_SUFFIXES = (".tbz2", ".tar.bz2", ".tar.gz", ".tgz", ".tar")


class Population(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks for what: everything of a trace but its times."""

    users: int = 10_000
    zipf: float = 1.0
    """Exponent of the users' activity: 0 makes them equal."""
    slates: dict[int, float] = msgspec.field(default_factory=lambda: {100: 1.0})
    """Slate size to weight."""
    surfaces: dict[str, float] = msgspec.field(default_factory=lambda: {"home": 1.0})
    deadline_ms: float | None = None
    priority: str = ""
    clicks: float = 0.0
    """Share of requests that a click follows."""
    dwell_s: float = 20.0
    """Mean dwell after a click, reported when it ends."""


def records(times_s: FloatArray, people: Population, *, seed: int) -> Iterator[Record]:
    """A trace of one request at each time, with its clicks and dwells among them."""
    chance = np.random.default_rng(seed)
    count = len(times_s)
    weights = 1 / np.arange(1, people.users + 1) ** people.zipf
    users = np.searchsorted(np.cumsum(weights) / weights.sum(), chance.random(count))
    slates = _draw(people.slates, count, chance)
    surfaces = _draw(people.surfaces, count, chance)
    seeds = chance.integers(0, 2**31, count)
    clicked = chance.random(count) < people.clicks
    think_s = 0.5 + chance.exponential(2.0, count)
    dwell_s = chance.exponential(people.dwell_s, count)
    later: list[tuple[float, int, Record]] = []
    for i, time_s in enumerate(times_s.tolist()):
        now_ms = time_s * 1e3
        while later and later[0][0] <= now_ms:
            yield heapq.heappop(later)[2]
        user = f"u{users[i]}"
        yield Record(
            timestamp=round(now_ms, 3),
            user=user,
            items_seed=int(seeds[i]),
            items_count=int(slates[i]),
            surface=str(surfaces[i]),
            priority=people.priority,
            deadline_ms=people.deadline_ms,
        )
        if clicked[i]:
            click_ms = round(now_ms + float(think_s[i]) * 1e3, 3)
            done_ms = round(click_ms + float(dwell_s[i]) * 1e3, 3)
            stay_ms = int(dwell_s[i] * 1e3)
            click = Record(timestamp=click_ms, user=user, event="click")
            dwell = Record(timestamp=done_ms, user=user, event="dwell", dwell_ms=stay_ms)
            heapq.heappush(later, (click_ms, 2 * i, click))
            heapq.heappush(later, (done_ms, 2 * i + 1, dwell))
    end_ms = float(times_s[-1]) * 1e3 if count else 0.0
    while later and later[0][0] <= end_ms:  # the trace ends with its last request
        yield heapq.heappop(later)[2]


def _draw(weights: dict[T, float], count: int, chance: np.random.Generator) -> list[T]:
    values = list(weights)
    share = np.array(list(weights.values()), dtype=np.float64)
    drawn = chance.choice(len(values), size=count, p=share / share.sum())
    return [values[at] for at in drawn]


def read_counts(path: Path) -> NDArray[np.int64]:
    """Requests of each second: numbers parted by white space, plain, compressed or in a tar."""
    try:
        text = _read_text(path)
        counts = np.array(text.split(), dtype=np.int64)
    except (OSError, tarfile.TarError) as error:
        raise TraceFault(f"{path}: {error}") from error
    except ValueError as error:
        raise TraceFault(f"{path}: per-second counts are whole numbers: {error}") from error
    if not len(counts) or counts.min() < 0:
        raise TraceFault(f"{path}: per-second counts are missing or negative")
    return counts


def read_stamps(path: Path, column: str) -> FloatArray:
    """Arrivals in seconds from the first one: a CSV column of ISO times or of seconds."""
    try:
        rows = csv.DictReader(io.StringIO(_read_text(path)))
        if column not in (rows.fieldnames or ()):
            raise TraceFault(
                f"{path}: no column {column!r}; there are {', '.join(rows.fieldnames or ())}"
            )
        times = np.array([_seconds(row[column]) for row in rows])
    except (OSError, tarfile.TarError) as error:
        raise TraceFault(f"{path}: {error}") from error
    except ValueError as error:
        raise TraceFault(f"{path}, column {column}: {error}") from error
    if not len(times):
        raise TraceFault(f"{path}: no rows below the header")
    return np.sort(times - times.min())


def _seconds(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        whole, _, fraction = word.partition(".")
        return datetime.fromisoformat(f"{whole}+00:00").timestamp() + float(f"0.{fraction or 0}")


def _read_text(path: Path) -> str:
    if path.name.endswith(_TAR_SUFFIXES):
        with tarfile.open(path) as tar:
            for member in tar:
                if (file := tar.extractfile(member)) is not None:
                    return file.read().decode()
        raise TraceFault(f"{path}: the archive holds no file")
    with open_bytes(path, "rb") as file:
        return file.read().decode()
