"""When to stop asking a server that keeps failing. It never asks; it only counts and decides."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

BreakerState = Literal["closed", "open", "half_open"]


class Breaker:
    """Opens after `failures` in a row; after `open_s` lets one attempt through at a time.

    An attempt that reports nothing within `open_s` gives its place to the next one.
    """

    def __init__(
        self,
        *,
        failures: int = 5,
        open_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert failures > 0
        self._limit = failures
        self._open_s = open_s
        self._clock = clock
        self._in_a_row = 0
        self._next_probe_at = 0.0
        self.state: BreakerState = "closed"
        self.opened = 0
        """How often it has opened since the start."""

    def allow(self) -> bool:
        """Whether to ask now; true in half-open state means that the caller is the probe."""
        if self.state == "closed":
            return True
        now = self._clock()
        if now < self._next_probe_at:
            return False
        self.state = "half_open"
        self._next_probe_at = now + self._open_s
        return True

    def succeeded(self) -> None:
        """The server answered."""
        self._in_a_row = 0
        self.state = "closed"

    def failed(self) -> None:
        """The server refused, timed out or broke the protocol."""
        self._in_a_row += 1
        if self.state == "half_open" or (self.state == "closed" and self._in_a_row >= self._limit):
            self.state = "open"
            self.opened += 1
            self._next_probe_at = self._clock() + self._open_s
