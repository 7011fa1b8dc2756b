"""A lane: the jobs that wait for one rung, the batches on it, and whether it takes more.

Predicts and decides; it submits nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Literal

import msgspec

from service.bundle import BatchSpec
from service.domain import BackendKind, Priority
from service.inference.breaker import RatioBreaker
from service.inference.cost import CostModel
from service.inference.jobs import Job, JobQueues
from service.inference.rung import Rung

LaneState = Literal["closed", "open", "half_open", "stuck", "lost"]
_SLOW_FACTOR = 8
_LAST_FACTOR = 20
_DEPTH: dict[BackendKind, int] = {"tensorrt": 2, "onnx-cuda": 2}
"""Batches on a rung at once: a device must not wait for the next one to be encoded."""


class Flight(msgspec.Struct, eq=False):
    """One batch on a rung."""

    jobs: list[Job]
    tiles: int
    started_s: float
    """When the rung was free for it, as far as the loop knows."""
    predicted_s: float
    timer: asyncio.TimerHandle | None = None
    landed: bool = False
    """True once the rung is done with it; set on the rung's thread."""
    abandoned: bool = False
    """True once its jobs went elsewhere; whatever comes back is dropped."""


class LaneReport(msgspec.Struct, frozen=True):
    """How a rung stands, for whoever watches."""

    kind: BackendKind
    precision: str
    state: LaneState
    """The breaker's state, or why the rung is out altogether."""
    queued_tiles: int
    wait_s: float
    opened: int
    """How often the breaker has opened."""
    serves: bool
    """Whether it is the one that takes jobs now."""


class Lane:
    """One rung as the batcher sees it."""

    def __init__(
        self,
        rung: Rung,
        limits: BatchSpec,
        *,
        breaker: RatioBreaker,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rung = rung
        self.kind = rung.backend.kind
        self.cost = CostModel(limits.tile_buckets)
        self.queues = JobQueues(limits)
        self.flights: deque[Flight] = deque()
        self.breaker = breaker
        self.stuck_s: float | None = None
        """Since when its thread has been inside an abandoned batch."""
        self.lost_s: float | None = None
        """Since when its device has been gone."""
        self.seal_scheduled = False
        self._depth = _DEPTH.get(self.kind, 1)
        self._clock = clock

    @property
    def full(self) -> bool:
        """Whether the rung has all the batches that it may have at once."""
        return len(self.flights) >= self._depth

    def usable(self) -> bool:
        """Whether a job may come here now."""
        return self.stuck_s is None and self.lost_s is None and self.breaker.would_allow()

    def wait_s(self, priority: Priority = "shadow") -> float:
        """Predicted seconds until a job of this priority that came now would start."""
        wait = self.cost.drain_s(self.queues.tiles_before(priority))
        for at, flight in enumerate(self.flights):
            elapsed = 0.0 if at else self._clock() - flight.started_s
            predicted = flight.predicted_s
            # an engine past its time is taken to need as long again
            wait += predicted - elapsed if elapsed < predicted else elapsed
        return wait

    def limit_s(self, flight: Flight, stall_s: float, *, last: bool) -> float:
        """After how long a batch counts as hanging; the last rung has nobody to give it to."""
        limit = max(stall_s, _SLOW_FACTOR * flight.predicted_s)
        return limit * _LAST_FACTOR if last else limit

    def report(self, *, serves: bool) -> LaneReport:
        """How it stands now."""
        state: LaneState = self.breaker.state
        if self.lost_s is not None:
            state = "lost"
        elif self.stuck_s is not None:
            state = "stuck"
        return LaneReport(
            self.kind,
            self.rung.backend.precision,
            state,
            self.queues.tiles,
            self.wait_s(),
            self.breaker.opened,
            serves,
        )
