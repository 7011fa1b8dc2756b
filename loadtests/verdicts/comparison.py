"""Two servers under the same trace: the ratio of their p99, with its confidence interval.

Seconds of the trace are resampled, not requests: latencies within a second go together, and
treating them as independent would give an interval that is far too narrow.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from loadtests.driving.samples import Samples
from loadtests.verdicts.slo import Verdict
from loadtests.verdicts.summary import FloatArray, judged_rows

_RESAMPLES = 2000
LEAST_BLOCKS = 20
"""Fewer paired seconds give an interval that is too narrow to decide by."""


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """p99 of B over p99 of A: estimate and 95% interval."""

    p99_a_ms: float
    p99_b_ms: float
    estimate: float
    low: float
    high: float
    blocks: int
    """Pairs of seconds that were resampled."""

    def judge(self, at_most: float) -> Verdict:
        """Pass or fail only where the whole interval agrees, over seconds enough."""
        if self.blocks < LEAST_BLOCKS:
            return Verdict.UNDECIDED
        if self.high <= at_most:
            return Verdict.PASS
        return Verdict.FAIL if self.low > at_most else Verdict.UNDECIDED


def p99_ratio(legs: Sequence[tuple[Samples, Samples]], *, seed: int = 0) -> Ratio:
    """Paired block bootstrap over the seconds of legs of A and B that sent the same trace."""
    pairs: list[tuple[FloatArray, FloatArray]] = []
    for leg_a, leg_b in legs:
        blocks_a, blocks_b = _by_second(leg_a), _by_second(leg_b)
        pairs += [(blocks_a[second], blocks_b[second]) for second in blocks_a.keys() & blocks_b]
    if not pairs:
        raise ValueError("the two have no second in common in which both have a latency")
    a, b = zip(*pairs, strict=True)
    chance = np.random.default_rng(seed)
    ratios = np.empty(_RESAMPLES)
    for turn in range(_RESAMPLES):
        drawn = chance.integers(0, len(pairs), len(pairs)).tolist()
        ratios[turn] = _p99([b[at] for at in drawn]) / _p99([a[at] for at in drawn])
    low, high = np.percentile(ratios, [2.5, 97.5])
    p99_a, p99_b = _p99(a), _p99(b)
    return Ratio(
        p99_a_ms=p99_a,
        p99_b_ms=p99_b,
        estimate=p99_b / p99_a,
        low=float(low),
        high=float(high),
        blocks=len(pairs),
    )


def _by_second(samples: Samples) -> dict[int, FloatArray]:
    rows = judged_rows(samples)
    if not rows.any():
        return {}
    seconds, latency_ms = samples.due_s[rows].astype(np.int64), samples.latency_s[rows] * 1e3
    found, starts = np.unique(seconds, return_index=True)
    parts = np.split(latency_ms, starts[1:])
    return dict(zip(found.tolist(), parts, strict=True))


def _p99(blocks: Sequence[FloatArray]) -> float:
    return float(np.percentile(np.concatenate(blocks), 99))
