"""Which requests deserve a trace and a log line of their own, and how many a second may have one.

Pure but for the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

from service.ranking.query import Report

Notable = Literal["failed", "degraded", "slow"]


def notable(report: Report, *, slow_s: float) -> Notable | None:
    """Why a request stands out, the worst reason first; None if it does not."""
    if report.outcome in {"failed", "overloaded", "expired"}:
        return "failed"
    if report.outcome == "degraded" and report.degraded != ("unknown_items",):
        return "degraded"
    return "slow" if report.times.total_s >= slow_s else None


class Allowance:
    """So many a second, with a burst of one second's; counts those that had to go without."""

    def __init__(self, rps: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rps = rps
        self._clock = clock
        self._left = max(1.0, rps)
        self._at_s = clock()
        self._refused = 0

    def take(self) -> bool:
        """Whether this one may."""
        now = self._clock()
        self._left = min(max(1.0, self._rps), self._left + (now - self._at_s) * self._rps)
        self._at_s = now
        if self._left < 1:
            self._refused += 1
            return False
        self._left -= 1
        return True

    def refused(self) -> int:
        """How many were refused since the last call."""
        refused, self._refused = self._refused, 0
        return refused
