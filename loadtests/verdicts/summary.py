"""Numbers of a run: percentiles, series by second, errors, degradations, stages. Pure.

Latency counts from the due time. It is told of served requests and of those that never
came back in time, which count at their time-out; refusals are quick and would flatter, so
they are counted as errors alone.
"""

from __future__ import annotations

from collections import Counter

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadtests.driving.samples import FAULTS, Samples
from loadtests.driving.spool import KINDS

FloatArray = NDArray[np.float64]
_NEVER_CAME = [FAULTS.index("timeout"), FAULTS.index("unsent")]


class Percentiles(msgspec.Struct, frozen=True):
    """Of one population, in ms; NaN of an empty one."""

    count: int
    p50_ms: float
    p90_ms: float
    p99_ms: float
    p999_ms: float
    max_ms: float

    @classmethod
    def of_ms(cls, values_ms: FloatArray) -> Percentiles:
        if not len(values_ms):
            return cls(0, *[float("nan")] * 5)
        points = np.percentile(values_ms, [50, 90, 99, 99.9, 100])
        return cls(len(values_ms), *(float(point) for point in points))


class Series(msgspec.Struct, frozen=True):
    """By second of the run, all [seconds]."""

    offered: FloatArray
    served: FloatArray
    p50_ms: FloatArray
    p90_ms: FloatArray
    p99_ms: FloatArray
    p999_ms: FloatArray
    max_ms: FloatArray
    degraded: FloatArray
    errors: FloatArray
    versions: dict[str, FloatArray]


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One run in numbers."""

    offered: int
    served: int
    duration_s: float
    latency: Percentiles
    """Of all kinds of requests together."""
    latency_by_kind: dict[str, Percentiles]
    lateness: Percentiles
    errors: dict[str, int]
    degraded: dict[str, int]
    versions: dict[str, int]
    stages: dict[str, Percentiles]
    signal_age: Percentiles
    after_click: int
    """Rankings that were read and came after an acknowledged click of their user."""
    fresh_share: float
    """Of those, the share that used it."""
    behind: Percentiles
    """Of those that used some signals: how much older than the click the newest was."""

    @property
    def judged(self) -> Percentiles:
        """What an objective is about: rankings, or everything where there are none."""
        return self.latency_by_kind.get("rank", self.latency)

    @property
    def served_share(self) -> float:
        return self.served / self.offered if self.offered else float("nan")

    @property
    def degraded_share(self) -> float:
        return sum(self.degraded.values()) / self.served if self.served else float("nan")

    @property
    def offered_rate(self) -> float:
        return self.offered / self.duration_s

    @property
    def served_rate(self) -> float:
        return self.served / self.duration_s


def timed(samples: Samples) -> NDArray[np.bool_]:
    """Which rows the latency is told of: [n]."""
    return samples.served | np.isin(samples.fault, _NEVER_CAME)


def judged_rows(samples: Samples) -> NDArray[np.bool_]:
    """Rows that an objective is about: rankings, or everything where there are none: [n]."""
    rankings = samples.kind == KINDS.index("rank")
    return timed(samples) & (rankings if bool(rankings.any()) else True)


def error_class(samples: Samples, at: int) -> str:
    """The word for a failed row: its fault, or its status."""
    fault = FAULTS[samples.fault[at]]
    return fault or f"status {samples.status[at]}"


def summarise(samples: Samples) -> Summary:
    """All numbers of a run but the series."""
    served, counted = samples.served, timed(samples)
    latency_ms = samples.latency_s * 1e3
    by_kind: dict[str, Percentiles] = {
        name: Percentiles.of_ms(latency_ms[counted & (samples.kind == place)])
        for place, name in enumerate(KINDS)
        if bool((samples.kind == place).any())
    }
    failed = np.flatnonzero(~served)
    behind = _told(samples.behind_ms)
    return Summary(
        offered=len(samples),
        served=int(served.sum()),
        duration_s=max(float(samples.due_s[-1]), 1.0) if len(samples) else 1.0,
        latency=Percentiles.of_ms(latency_ms[counted]),
        latency_by_kind=by_kind,
        lateness=Percentiles.of_ms(samples.late_s * 1e3),
        errors=dict(Counter(error_class(samples, int(at)) for at in failed).most_common()),
        degraded=_count_words(samples.degraded[served], samples.words),
        versions=_count_words(samples.version[served], samples.words),
        stages={name: Percentiles.of_ms(_told(values)) for name, values in samples.stages.items()},
        signal_age=Percentiles.of_ms(_told(samples.signal_age_ms)),
        after_click=len(behind),
        fresh_share=float((behind == 0).mean()) if len(behind) else float("nan"),
        behind=Percentiles.of_ms(behind[np.isfinite(behind)]),
    )


def _told(values: NDArray[np.float32]) -> FloatArray:
    return values[~np.isnan(values)].astype(np.float64)


def _count_words(places: NDArray[np.uint16], words: list[str]) -> dict[str, int]:
    counts = Counter(places[places != 0].tolist())
    return {words[place]: count for place, count in counts.most_common()}


def by_second(samples: Samples) -> Series:
    """Counts and percentiles of the requests due in each second."""
    second = samples.due_s.astype(np.int64)
    seconds = int(second.max()) + 1 if len(second) else 0
    served, counted = samples.served, timed(samples)

    def count(rows: NDArray[np.bool_]) -> FloatArray:
        return np.bincount(second[rows], minlength=seconds).astype(np.float64)

    points = np.full((seconds, 5), np.nan)
    borders = np.searchsorted(second, np.arange(seconds + 1))
    for at in range(seconds):
        rows = slice(borders[at], borders[at + 1])
        latencies_s = samples.latency_s[rows][counted[rows]]
        if len(latencies_s):
            points[at] = np.percentile(latencies_s, [50, 90, 99, 99.9, 100]) * 1e3
    p50, p90, p99, p999, highest = points.T
    places = [int(place) for place in np.unique(samples.version[served]) if place]
    return Series(
        offered=count(np.ones(len(samples), dtype=np.bool_)),
        served=count(served),
        p50_ms=p50,
        p90_ms=p90,
        p99_ms=p99,
        p999_ms=p999,
        max_ms=highest,
        degraded=count(served & (samples.degraded != 0)),
        errors=count(~served),
        versions={
            samples.words[place]: count(served & (samples.version == place)) for place in places
        },
    )
