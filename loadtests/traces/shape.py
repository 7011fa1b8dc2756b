"""Reshaping a trace: window, time, rate and loops. Pure; the same seed gives the same trace."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from loadtests.traces.arrivals import FloatArray
from loadtests.traces.trace import Record, TraceFault, at, in_order


def times_s(records: Sequence[Record]) -> FloatArray:
    """Arrival times in seconds."""
    return np.fromiter((record.timestamp for record in records), np.float64, len(records)) / 1e3


def window(records: Sequence[Record], start_s: float, end_s: float) -> list[Record]:
    """The records of a stretch of time, moved to start at 0."""
    inside = [record for record in records if start_s * 1e3 <= record.timestamp < end_s * 1e3]
    return [at(record, record.timestamp - start_s * 1e3) for record in inside]


def peak(records: Sequence[Record], length_s: float) -> list[Record]:
    """The busiest stretch of a given length, found to a second."""
    times = times_s(records)
    starts = np.arange(0, max(times[-1] - length_s, 0) + 1)
    counts = np.searchsorted(times, starts + length_s) - np.searchsorted(times, starts)
    busiest = float(starts[int(np.argmax(counts))])
    return window(records, busiest, busiest + length_s)


def faster(records: Sequence[Record], factor: float) -> list[Record]:
    """The same records in 1/factor of the time: rate and bursts grow alike."""
    return [at(record, record.timestamp / factor) for record in records]


def superpose(records: Sequence[Record], factor: float, *, seed: int) -> list[Record]:
    """`factor` times the traffic in the same time: whole shifted copies, and a thinned one.

    Each copy is turned around the trace by a random amount and has users of its own, so
    independent crowds add up: relative bursts shrink, as they do when a service grows.
    A thinned copy keeps a share of the users with all that they do.
    """
    chance = np.random.default_rng(seed)
    length_ms = records[-1].timestamp if records else 0.0
    whole = int(factor)
    result = list(records) if whole else []
    for copy in range(1, whole):
        result += _turned(records, f"~{copy}", float(chance.random()) * length_ms, length_ms)
    if share := factor - whole:
        users = sorted({record.user for record in records})
        kept = {user for user, draw in zip(users, chance.random(len(users)), strict=True)
                if draw < share}  # fmt: skip
        some = [record for record in records if record.user in kept]
        if whole:
            some = _turned(some, f"~{whole}", float(chance.random()) * length_ms, length_ms)
        result += some
    return sorted(result, key=lambda record: record.timestamp)


def _turned(records: Sequence[Record], suffix: str, by_ms: float, length_ms: float) -> list[Record]:
    return [
        msgspec.structs.replace(
            record,
            timestamp=round((record.timestamp + by_ms) % max(length_ms, 1e-3), 3),
            user=record.user and record.user + suffix,
        )
        for record in records
    ]


def loop(records: Sequence[Record], times: int, *, seed: int) -> list[Record]:
    """The trace again and again; after the first time slates are drawn anew from the seed."""
    if not records:
        return []
    chance = np.random.default_rng(seed)
    # one mean gap parts the last record of a round from the first of the next
    length_ms = records[-1].timestamp * (1 + 1 / max(len(records) - 1, 1))
    result = list(records)
    for again in range(1, times):
        shift = int(chance.integers(1, 2**31))
        for record in records:
            moved = at(record, record.timestamp + again * length_ms)
            if record.items_seed is not None:
                moved = msgspec.structs.replace(moved, items_seed=record.items_seed ^ shift)
            result.append(moved)
    return result


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Steps in the order in which they are applied."""

    start_s: float = 0.0
    end_s: float = float("inf")
    peak_s: float | None = None
    rate: float = 1.0
    speed: float = 1.0
    loops: int = 1
    seed: int = 0

    def apply(self, records: Sequence[Record]) -> list[Record]:
        """Raises TraceFault where nothing is left."""
        shaped = window(records, self.start_s, self.end_s)
        if shaped and self.peak_s is not None:
            shaped = peak(shaped, self.peak_s)
        if self.rate != 1.0:
            shaped = superpose(shaped, self.rate, seed=self.seed)
        shaped = loop(faster(in_order(shaped), self.speed), self.loops, seed=self.seed)
        if not shaped:
            raise TraceFault("nothing of the trace is left in this window at this rate")
        return shaped
