"""Admission: how many requests are in flight, whether we drain, and what a deadline is."""

from __future__ import annotations

import time

REPLY_RESERVE_S = 0.002
"""Kept of every deadline for writing the answer."""


class Admission:
    """Permits. Draining changes readiness alone: whoever still comes is served.

    As a context, counts one request in flight; enters with False where there are too many.
    """

    def __init__(self, *, max_in_flight: int) -> None:
        self.in_flight = 0
        self.draining = False
        self._max_in_flight = max_in_flight

    def __enter__(self) -> bool:
        self.in_flight += 1
        return self.in_flight <= self._max_in_flight

    def __exit__(self, *_: object) -> None:
        self.in_flight -= 1


class Deadline:
    """A monotonic instant, counted from the request's arrival."""

    __slots__ = ("at_s",)

    def __init__(self, timeout_s: float, *, received_s: float) -> None:
        self.at_s = received_s + max(0.0, timeout_s - REPLY_RESERVE_S)

    def left_s(self) -> float:
        """The budget: seconds until the deadline, negative past it."""
        return self.at_s - time.monotonic()
