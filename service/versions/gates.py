"""Gates: whether a canary may go on, from what it and the primary did meanwhile. Pure.

Rates are compared by one-sided bounds of Wilson's interval, so that chance among few
requests neither fails a good canary nor passes a bad one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

LATENCY_EDGES_S = tuple(0.00025 * 1.15**at for at in range(64))  # 0.25 ms to 1.7 s
SCORE_BINS = 24
_FIRST_SCORE_LOG2 = -12.0
_Z = 3.0
"""Standard errors: one false alarm in about 700 looks."""
_LEAST_SHARE = 1e-4
_SCORES_A_REQUEST = 32


class Counts(msgspec.Struct):
    """What one version did since the canary's step began."""

    requests: int = 0
    failed: int = 0
    """No engine could score."""
    degraded: int = 0
    """Late, overloaded or warming: not for want of signals."""
    clicked: int = 0
    """Rankings with at least one click."""
    latencies: list[int] = msgspec.field(default_factory=lambda: [0] * (len(LATENCY_EDGES_S) + 1))
    scores: list[int] = msgspec.field(default_factory=lambda: [0] * SCORE_BINS)

    def add(self, *, seconds: float, failed: bool, degraded: bool, scores: Sequence[float]) -> None:
        """Count one answer; `scores` empty where no engine gave any."""
        self.requests += 1
        self.failed += failed
        self.degraded += degraded
        self.latencies[int(np.searchsorted(LATENCY_EDGES_S, seconds))] += 1
        for score in scores[:_SCORES_A_REQUEST]:
            self.scores[_score_bin(score)] += 1

    def merge(self, other: Counts) -> None:
        """Add another replica's counts."""
        self.requests += other.requests
        self.failed += other.failed
        self.degraded += other.degraded
        self.clicked += other.clicked
        self.latencies = [a + b for a, b in zip(self.latencies, other.latencies, strict=True)]
        self.scores = [a + b for a, b in zip(self.scores, other.scores, strict=True)]

    def latency_s(self, quantile: float) -> float:
        """A latency's upper edge; 0 with no requests."""
        wanted = quantile * self.requests
        seen = 0
        for count, edge in zip(self.latencies, (*LATENCY_EDGES_S, math.inf), strict=True):
            seen += count
            if seen and seen >= wanted:
                return edge
        return 0.0

    def slower_than(self, seconds: float) -> int:
        """Requests above a latency, by whole buckets."""
        return sum(self.latencies[int(np.searchsorted(LATENCY_EDGES_S, seconds)) + 1 :])


def _score_bin(score: float) -> int:
    """Half octaves from 2^-12 up to 1, clipped."""
    if score <= 0:
        return 0
    return min(SCORE_BINS - 1, max(0, int(2 * (math.log2(score) - _FIRST_SCORE_LOG2))))


class Gates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The limits; null switches a gate off."""

    min_requests: int = 200
    """Below this number of answers by the canary nothing is decided."""
    max_error_excess: float | None = 0.005
    """How far the share of failures may lie above the primary's."""
    max_degraded_excess: float | None = 0.01
    max_p99_ratio: float | None = 1.5
    min_click_ratio: float | None = 0.9
    """The least click-through, as a part of the primary's."""
    max_psi: float | None = 0.25
    """The most drift of scores: population stability index against the primary's."""


Fate = Literal["wait", "pass", "fail"]


class Verdict(msgspec.Struct, frozen=True):
    """What the gates say, by which gate, and the numbers behind it."""

    fate: Fate
    reason: str
    numbers: dict[str, float]


def judge(
    canary: Counts, primary: Counts, gates: Gates, *, watched_s: float, step_s: float
) -> Verdict:
    """Fail at the first gate that the canary breaks; pass once the step's time is over."""
    numbers = compare(canary, primary)
    if canary.requests < gates.min_requests:
        return Verdict("wait", f"{canary.requests} of {gates.min_requests} requests", numbers)
    broken = _broken(canary, primary, gates, numbers)
    if broken:
        return Verdict("fail", broken, numbers)
    if watched_s < step_s:
        return Verdict("wait", f"{watched_s:.0f} of {step_s:.0f} s", numbers)
    return Verdict("pass", "every gate holds", numbers)


def compare(canary: Counts, primary: Counts) -> dict[str, float]:
    """The numbers that gates look at."""

    def share(part: int, whole: int) -> float:
        return round(part / whole, 5) if whole else 0.0

    return {
        "requests": canary.requests,
        "primary_requests": primary.requests,
        "errors": share(canary.failed, canary.requests),
        "primary_errors": share(primary.failed, primary.requests),
        "degraded": share(canary.degraded, canary.requests),
        "primary_degraded": share(primary.degraded, primary.requests),
        "p99_ms": round(canary.latency_s(0.99) * 1e3, 3),
        "primary_p99_ms": round(primary.latency_s(0.99) * 1e3, 3),
        "click_through": share(canary.clicked, canary.requests),
        "primary_click_through": share(primary.clicked, primary.requests),
        "psi": round(psi(canary.scores, primary.scores), 4),
    }


def _broken(canary: Counts, primary: Counts, gates: Gates, numbers: dict[str, float]) -> str:
    n = canary.requests
    for name, limit, part, other in (
        ("errors", gates.max_error_excess, canary.failed, primary.failed),
        ("degraded", gates.max_degraded_excess, canary.degraded, primary.degraded),
    ):
        if limit is not None and wilson(part, n)[0] > wilson(other, primary.requests)[1] + limit:
            return f"{name}: {numbers[name]} against {numbers[f'primary_{name}']}"
    if gates.max_p99_ratio is not None and primary.requests >= gates.min_requests:
        limit_s = primary.latency_s(0.99) * gates.max_p99_ratio
        if wilson(canary.slower_than(limit_s), n)[0] > 0.01:
            return (
                f"p99: {numbers['p99_ms']} ms against {numbers['primary_p99_ms']} ms, "
                f"at most {gates.max_p99_ratio} times as much"
            )
    if gates.min_click_ratio is not None and primary.clicked:
        least = wilson(primary.clicked, primary.requests)[0] * gates.min_click_ratio
        if wilson(canary.clicked, n)[1] < least:
            return (
                f"click-through: {numbers['click_through']} against "
                f"{numbers['primary_click_through']}"
            )
    if gates.max_psi is not None and primary.requests >= gates.min_requests:
        drift = numbers["psi"]
        if drift > gates.max_psi:
            return f"score drift: PSI {drift}, at most {gates.max_psi}"
    return ""


def wilson(part: int, whole: int) -> tuple[float, float]:
    """Lower and upper bound of a share (E. B. Wilson, 1927); (0, 1) where nothing is known."""
    if not whole:
        return 0.0, 1.0
    share, square = part / whole, _Z * _Z
    middle = share + square / (2 * whole)
    reach = _Z * math.sqrt(share * (1 - share) / whole + square / (4 * whole * whole))
    scale = 1 + square / whole
    return max(0.0, (middle - reach) / scale), min(1.0, (middle + reach) / scale)


def psi(found: Sequence[int], expected: Sequence[int]) -> float:
    """Population stability index of two histograms with the same bins; 0 where one is empty."""
    if not sum(found) or not sum(expected):
        return 0.0
    p = np.maximum(np.array(found) / sum(found), _LEAST_SHARE)
    q = np.maximum(np.array(expected) / sum(expected), _LEAST_SHARE)
    return float(((p - q) * np.log(p / q)).sum())
