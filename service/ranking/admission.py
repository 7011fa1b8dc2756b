"""Admission: how many requests are in flight, whether we drain, and what a deadline is."""

from __future__ import annotations

import math
import time

REPLY_RESERVE_S = 0.002
"""Kept of every deadline for writing the answer."""
_LEAST = 32
"""In flight whatever the lateness: about what one batch takes."""
_LOWER_TO = 0.7
_LOWER_EVERY_S = 0.1


class Admission:
    """Permits. Draining changes readiness alone: whoever still comes is served.

    As a context, counts one request in flight; enters with False where there are too many.
    How many are too many follows from how late requests get their turn on the event loop
    (additive increase, multiplicative decrease): a loop that is behind spends its time on
    requests that it can still rank, and gives the others the prior order, which is cheap.
    """

    def __init__(self, *, max_in_flight: int, late_s: float = math.inf) -> None:
        """`late_s`: from arrival to turn; more means that the loop is behind."""
        self.in_flight = 0
        self.draining = False
        self.limit = float(max_in_flight)
        """How many may be in flight now."""
        self._most = max_in_flight
        self._least = min(max_in_flight, _LEAST)
        self._late_s = late_s
        self._lowered_s = 0.0

    def note_turn(self, received_s: float) -> None:
        """Learn from a request that gets its turn now and came then, on the monotonic clock."""
        now_s = time.monotonic()
        if now_s - received_s > self._late_s:
            if now_s - self._lowered_s > _LOWER_EVERY_S:
                self._lowered_s = now_s
                self.limit = max(self._least, _LOWER_TO * min(self.limit, self.in_flight))
        elif self.limit < self._most and 2 * self.in_flight >= self.limit:
            self.limit = min(self._most, self.limit + 1 / self.limit)

    def __enter__(self) -> bool:
        self.in_flight += 1
        return self.in_flight <= self.limit

    def __exit__(self, *_: object) -> None:
        self.in_flight -= 1


class Deadline:
    """A monotonic instant, counted from the request's arrival."""

    __slots__ = ("at_s", "received_s")

    def __init__(self, timeout_s: float, *, received_s: float) -> None:
        self.received_s = received_s
        self.at_s = received_s + max(0.0, timeout_s - REPLY_RESERVE_S)

    def left_s(self) -> float:
        """The budget: seconds until the deadline, negative past it."""
        return self.at_s - time.monotonic()
