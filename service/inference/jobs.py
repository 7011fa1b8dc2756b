"""Jobs: requests that wait for an engine, and the queues in which they wait. Runs nothing."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

import msgspec
import numpy as np
from numpy.typing import NDArray

from service.bundle import BatchSpec
from service.domain import BackendName, Priority
from service.encoding.history import Person
from service.encoding.slate import Slate

_PRIORITIES: tuple[Priority, ...] = ("interactive", "batch", "shadow")


class BatchReport(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What one batch was on one rung, for telemetry; told apart by identity."""

    requests: int
    tiles: int
    candidates: int
    slots: int
    """Places for candidates in the tiles; those that no candidate takes are padding."""
    started_s: float
    """When the engine began, on the monotonic clock."""
    seconds: float
    backend: BackendName | None = None
    """None where the rung failed it."""
    precision: str = ""
    scores: NDArray[np.float64] | None = None  # [candidates] of the first request alone


class JobScores(msgspec.Struct, frozen=True):
    """One job's share of a scored batch."""

    scores: NDArray[np.float64]  # [candidates]
    unknown: int
    """Candidates that the item table does not hold."""
    backend: BackendName
    precision: str
    rung: int
    """0 for the first choice; more means that a fallback answered."""
    queue_s: float
    inference_s: float
    batch: BatchReport


class Job(msgspec.Struct, eq=False):
    """One request, waiting for an engine."""

    person: Person
    slate: Slate
    tiles: int
    deadline_s: float
    """On the monotonic clock."""
    priority: Priority
    future: asyncio.Future[JobScores]
    queued_s: float
    rung: int
    """The place on the ladder of the rung that it waits for, when it was queued there."""
    retried: bool = False
    """True once a rung has failed it."""
    waits_in: JobQueues | None = None


class JobQueues:
    """One queue a priority. A job whose future is done no longer counts, and is never taken."""

    def __init__(self, limits: BatchSpec) -> None:
        self._queues: dict[Priority, deque[Job]] = {word: deque() for word in _PRIORITIES}
        self._tiles: dict[Priority, int] = dict.fromkeys(_PRIORITIES, 0)
        self._max_users = limits.max_users
        self._max_tiles = limits.tile_buckets[-1]
        # a batch of lower priority stays small: an interactive job may have to wait for it
        self._max_low_tiles = max(1, self._max_tiles // 4)

    @property
    def tiles(self) -> int:
        """Tiles that wait."""
        return sum(self._tiles.values())

    def tiles_before(self, priority: Priority) -> int:
        """Tiles that go before a job of this priority which came now."""
        if priority == "interactive":
            return self._tiles["interactive"]
        return sum(self._tiles[word] for word in _PRIORITIES[: _PRIORITIES.index(priority) + 1])

    def put(self, job: Job) -> None:
        """Queue a job behind the others of its priority."""
        self._queues[job.priority].append(job)
        self._enter(job)
        job.future.add_done_callback(partial(_forget, job))

    def put_back(self, jobs: Iterable[Job]) -> None:
        """Queue jobs before all others of their priority, in the order given."""
        for job in reversed(list(jobs)):
            self._queues[job.priority].appendleft(job)
            self._enter(job)

    def _enter(self, job: Job) -> None:
        self._tiles[job.priority] += job.tiles
        job.waits_in = self

    def leave(self, job: Job) -> None:
        """Count a job no longer; it may still stand in its queue."""
        if job.waits_in is self:
            self._tiles[job.priority] -= job.tiles
            job.waits_in = None

    def take_all(self) -> list[Job]:
        """Empty the queues."""
        jobs = [job for queue in self._queues.values() for job in queue]
        for queue in self._queues.values():
            queue.clear()
        for job in jobs:
            self.leave(job)
        return jobs

    def take(self, still_wanted: Callable[[Job, bool], bool]) -> list[Job]:
        """The jobs of the next batch: the highest waiting priority, oldest first.

        `still_wanted` is asked about each job, and whether it would be the first.
        """
        jobs: list[Job] = []
        for priority in _PRIORITIES:
            queue = self._queues[priority]
            room = self._max_tiles if priority == "interactive" else self._max_low_tiles
            while queue and len(jobs) < self._max_users:
                job = queue[0]
                if jobs and job.tiles > room:
                    break
                queue.popleft()
                self.leave(job)
                if still_wanted(job, not jobs):
                    jobs.append(job)
                    room -= job.tiles
            if jobs:
                break
        return jobs


def _forget(job: Job, _: asyncio.Future[JobScores]) -> None:
    """A caller that left, or a deadline that passed, makes room at once."""
    if job.waits_in is not None:
        job.waits_in.leave(job)
