"""When to stop giving batches to a rung that keeps failing. It never runs one; it only counts."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Literal

BreakerState = Literal["closed", "open", "half_open"]


class RatioBreaker:
    """Opens when too large a share of the last batches failed, then lets probes through.

    A failed probe doubles the pause, up to `max_open_s`. A probe that reports nothing
    gives its place to the next one after the same pause.
    """

    def __init__(
        self,
        *,
        window: int = 20,
        least: int = 4,
        ratio: float = 0.5,
        open_s: float = 1.0,
        max_open_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert 0 < least <= window
        self._outcomes: deque[bool] = deque(maxlen=window)  # True where a batch failed
        self._least = least
        self._ratio = ratio
        self._open_s = self._pause_s = open_s
        self._max_open_s = max_open_s
        self._clock = clock
        self._next_probe_s = 0.0
        self.state: BreakerState = "closed"
        self.opened = 0
        """How often it has opened since the start."""

    def would_allow(self) -> bool:
        """Whether `allow` would say yes now; takes nothing."""
        return self.state == "closed" or self._clock() >= self._next_probe_s

    def allow(self) -> bool:
        """Whether to use the rung now; true in half-open state makes the caller the probe."""
        if self.state == "closed":
            return True
        if not self.would_allow():
            return False
        self.state = "half_open"
        self._next_probe_s = self._clock() + self._pause_s
        return True

    def succeeded(self) -> None:
        """A batch was scored."""
        if self.state != "closed":
            self.state = "closed"
            self._outcomes.clear()
            self._pause_s = self._open_s
        self._outcomes.append(False)

    def failed(self) -> None:
        """A batch failed."""
        self._outcomes.append(True)
        if self.state == "half_open":
            self._pause_s = min(2 * self._pause_s, self._max_open_s)
            self.trip()
        elif self.state == "closed" and self._failing():
            self.trip()

    def _failing(self) -> bool:
        count = len(self._outcomes)
        return count >= self._least and sum(self._outcomes) >= self._ratio * count

    def trip(self) -> None:
        """Open now, whatever the ratio is."""
        if self.state != "open":
            self.state = "open"
            self.opened += 1
        self._next_probe_s = self._clock() + self._pause_s
