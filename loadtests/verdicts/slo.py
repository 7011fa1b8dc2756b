"""The objective and the verdict: pass, fail, or a run that proves nothing."""

from __future__ import annotations

from enum import IntEnum

import msgspec

from loadtests.verdicts.summary import Summary

LATE_SHARE = 0.1
"""A generator whose own lateness at p99 is over this share of the objective proves nothing."""


class Verdict(IntEnum):
    """Also the exit code; 2 is left to wrong arguments."""

    PASS = 0
    FAIL = 1
    INVALID = 3
    UNDECIDED = 4


class Objective(msgspec.Struct, frozen=True, kw_only=True):
    """What must hold of a run; latencies are of rankings (of all requests if there are none)."""

    p99_ms: float
    p50_ms: float | None = None
    p999_ms: float | None = None
    served: float = 0.99
    """Least share of requests answered with 200 to 299 in time."""
    degraded: float | None = None
    """Largest share of answers that were degraded."""

    def judge(self, summary: Summary, *, undone: int = 0) -> Judgement:
        """Every check with its measured value.

        A late generator makes the run invalid, and so do faults on schedule that did not happen.
        """
        latency = summary.judged
        checks = [
            Check("p99 ms", latency.p99_ms, "at most", self.p99_ms),
            Check("served share", summary.served_share, "at least", self.served),
        ]
        if self.p50_ms is not None:
            checks.append(Check("p50 ms", latency.p50_ms, "at most", self.p50_ms))
        if self.p999_ms is not None:
            checks.append(Check("p99.9 ms", latency.p999_ms, "at most", self.p999_ms))
        if self.degraded is not None:
            checks.append(Check("degraded share", summary.degraded_share, "at most", self.degraded))
        lateness = Check(
            "generator's lateness p99 ms",
            summary.lateness.p99_ms,
            "at most",
            self.p99_ms * LATE_SHARE,
        )
        valid = [lateness]
        if undone:
            valid.append(Check("faults that did not happen", undone, "at most", 0))
        if not all(check.holds for check in valid):
            return Judgement(Verdict.INVALID, [*checks, *valid])
        passed = all(check.holds for check in checks)
        return Judgement(Verdict.PASS if passed else Verdict.FAIL, [*checks, *valid])


class Check(msgspec.Struct, frozen=True):
    """One measured value against its bound."""

    what: str
    measured: float
    relation: str
    bound: float

    @property
    def holds(self) -> bool:
        """False also where nothing was measured (NaN)."""
        if self.relation == "at most":
            return self.measured <= self.bound
        return self.measured >= self.bound


class Judgement(msgspec.Struct, frozen=True):
    """A verdict and why."""

    verdict: Verdict
    checks: list[Check]
