"""The micro-batcher: batches form while the engine is busy, and an idle engine never waits.

Runs on the event loop and never blocks it. A job's tiles stay together: a slate is
admitted whole, scored whole, or refused whole.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

import msgspec
import numpy as np

from service.bundle import BatchSpec, InputSpec
from service.domain import BackendName, Float32Array, Int32Array, Priority
from service.encoding.history import CONTEXT_WIDTH, HISTORY_WIDTH, History
from service.encoding.items import CANDIDATE_WIDTH
from service.errors import BackendFault, DeadlineExceeded, Overloaded
from service.inference.backends.base import Batch
from service.inference.cost import CostModel
from service.inference.executor import Executor, Scored

_PRIORITIES: tuple[Priority, ...] = ("interactive", "batch", "shadow")


class JobScores(msgspec.Struct, frozen=True):
    """One job's share of a scored batch."""

    logits: Float32Array  # [tiles, T, 2]
    backend: BackendName
    precision: str
    rung: int
    queue_s: float
    inference_s: float


class Job(msgspec.Struct, eq=False):
    """One request's tensors, waiting for the engine."""

    history: History
    tiles: Int32Array  # [tiles, T, 9]
    deadline_s: float
    """On the monotonic clock."""
    future: asyncio.Future[JobScores]
    queued_s: float


class BatchReport(msgspec.Struct, frozen=True):
    """What one batch was, for telemetry."""

    users: int
    tiles: int
    seconds: float
    failed: bool


class MicroBatcher:
    """Packs jobs into batches for one version's executor."""

    def __init__(
        self,
        *,
        executor: Executor,
        inputs: InputSpec,
        limits: BatchSpec,
        max_queue_s: float,
        report: Callable[[BatchReport], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cost = CostModel(limits.tile_buckets)
        self._executor = executor
        self._max_tiles = limits.tile_buckets[-1]
        self._max_users = limits.max_users
        # a batch of lower priority stays small: an interactive job may have to wait for it
        self._max_low_tiles = max(1, self._max_tiles // 4)
        self._max_queue_s = max_queue_s
        self._report = report
        self._clock = clock
        self._queues: dict[Priority, deque[Job]] = {word: deque() for word in _PRIORITIES}
        self._queued_tiles = 0
        self._running: tuple[float, float] | None = None  # started, predicted seconds
        self._seal_scheduled = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._staging = _Staging(inputs, limits)

    @property
    def queued_tiles(self) -> int:
        """Tiles that wait for the engine."""
        return self._queued_tiles

    def wait_s(self) -> float:
        """Predicted seconds until a job that came now would start."""
        wait = self.cost.drain_s(self._queued_tiles)
        if self._running is not None:
            started, predicted = self._running
            elapsed = self._clock() - started
            # an engine past its time is taken to need as long again
            wait += predicted - elapsed if elapsed < predicted else elapsed
        return wait

    def check(self, tiles: int, deadline_s: float) -> None:
        """Raise Overloaded where a job of so many tiles could not be scored in time."""
        wait = self.wait_s()
        left = deadline_s - self._clock()
        if wait > self._max_queue_s or (wait > 0 and wait + self.cost.predict_s(tiles) > left):
            raise Overloaded(f"the queue needs {wait * 1e3:.0f} ms", retry_after_s=max(1.0, wait))

    def submit(
        self, history: History, tiles: Int32Array, *, deadline_s: float, priority: Priority
    ) -> asyncio.Future[JobScores]:
        """Queue a whole slate; raises Overloaded.

        The future may raise DeadlineExceeded or BackendFault. Cancelling it takes the job
        out of the queue.
        """
        self.check(len(tiles), deadline_s)
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        future: asyncio.Future[JobScores] = self._loop.create_future()
        job = Job(history, tiles, deadline_s, future, self._clock())
        self._queues[priority].append(job)
        self._queued_tiles += len(tiles)
        if self._running is None and not self._seal_scheduled:
            # jobs that arrive in this turn of the loop share the batch
            self._seal_scheduled = True
            self._loop.call_soon(self._seal)
        return future

    def _seal(self) -> None:
        self._seal_scheduled = False
        if self._running is not None:
            return
        jobs = self._take()
        if not jobs:
            return
        tiles = sum(len(job.tiles) for job in jobs)
        sealed_s = self._clock()
        self._running = sealed_s, self.cost.predict_s(tiles)
        batch = self._staging.fill(jobs)
        loop = self._loop
        assert loop is not None

        def done(result: Scored | BackendFault) -> None:
            loop.call_soon_threadsafe(self._finish, jobs, tiles, sealed_s, result)

        self._executor.submit(batch, done)

    def _take(self) -> list[Job]:
        """The jobs of the next batch: the highest waiting priority, oldest first."""
        jobs: list[Job] = []
        for priority in _PRIORITIES:
            queue = self._queues[priority]
            room = self._max_tiles if priority == "interactive" else self._max_low_tiles
            while queue and len(jobs) < self._max_users:
                job = queue[0]
                if jobs and len(job.tiles) > room:
                    break
                queue.popleft()
                self._queued_tiles -= len(job.tiles)
                if self._still_wanted(job, alone=not jobs):
                    jobs.append(job)
                    room -= len(job.tiles)
            if jobs:
                break
        return jobs

    def _still_wanted(self, job: Job, *, alone: bool) -> bool:
        if job.future.done():  # the caller left, or its deadline passed
            return False
        # the first job of a batch runs whatever is predicted, so that a prediction
        # which a stall has spoilt is corrected by the next measurement
        cost_s = 0.0 if alone else self.cost.predict_s(len(job.tiles))
        if self._clock() + cost_s > job.deadline_s:
            job.future.set_exception(DeadlineExceeded("the deadline came in the queue"))
            return False
        return True

    def _finish(
        self, jobs: list[Job], tiles: int, sealed_s: float, result: Scored | BackendFault
    ) -> None:
        self._running = None
        self._seal()
        failed = not isinstance(result, Scored)
        seconds = self._clock() - sealed_s if isinstance(result, BackendFault) else result.seconds
        if not failed:
            self.cost.learn(tiles, seconds)
        at = 0
        for job in jobs:
            end = at + len(job.tiles)
            if not job.future.done():
                if isinstance(result, Scored):
                    job.future.set_result(
                        JobScores(
                            result.logits[at:end],
                            result.backend,
                            result.precision,
                            result.rung,
                            result.started_s - job.queued_s,
                            result.seconds,
                        )
                    )
                else:
                    job.future.set_exception(type(result)(*result.args))
            at = end
        self._report(BatchReport(len(jobs), tiles, seconds, failed))


class _Staging:
    """The arrays in which batches are formed, used again for every batch."""

    def __init__(self, inputs: InputSpec, limits: BatchSpec) -> None:
        users, tiles, length = limits.max_users, limits.tile_buckets[-1], inputs.history_len
        self._hist_ids = np.zeros((users, length, HISTORY_WIDTH), np.int32)
        self._hist_age = np.zeros((users, length), np.int32)
        self._hist_mask = np.zeros((users, length), np.float32)
        self._ctx_ids = np.zeros((users, CONTEXT_WIDTH), np.int32)
        self._cand_ids = np.zeros((tiles, inputs.tile_width, CANDIDATE_WIDTH), np.int32)
        self._tile_user = np.zeros(tiles, np.int32)

    def fill(self, jobs: list[Job]) -> Batch:
        """Views of exactly the jobs' size; valid until the next call."""
        end = 0
        for user, job in enumerate(jobs):
            history = job.history
            self._hist_ids[user] = history.ids
            self._hist_age[user] = history.age
            self._hist_mask[user] = history.mask
            self._ctx_ids[user] = history.context
            start, end = end, end + len(job.tiles)
            self._cand_ids[start:end] = job.tiles
            self._tile_user[start:end] = user
        users = len(jobs)
        return Batch(
            self._hist_ids[:users],
            self._hist_age[:users],
            self._hist_mask[:users],
            self._ctx_ids[:users],
            self._cand_ids[:end],
            self._tile_user[:end],
        )
