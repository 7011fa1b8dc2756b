"""The micro-batcher: batches form while the engine is busy, and an idle engine never waits.

Runs on the event loop and never blocks it. A job's tiles stay together: a slate is
admitted whole, scored whole, or refused whole.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from service.bundle import BatchSpec, OutputSpec
from service.domain import BackendName, Int64Array, Priority
from service.encoding.batch import Batch
from service.encoding.history import Person
from service.encoding.slate import Slate, blend
from service.errors import BackendFault, BackendRecoverable, DeadlineExceeded, Overloaded
from service.inference.cost import CostModel
from service.inference.executor import Executor, Scored

Encode = Callable[[Sequence[Person], Sequence[Slate]], tuple[Batch, Int64Array]]
_PRIORITIES: tuple[Priority, ...] = ("interactive", "batch", "shadow")


class BatchReport(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What one batch was, for telemetry; told apart by identity."""

    requests: int
    tiles: int
    candidates: int
    slots: int
    """Places for candidates in the tiles; those that no candidate takes are padding."""
    started_s: float
    """When the engine began, on the monotonic clock."""
    seconds: float
    backend: BackendName | None = None
    """None where no engine could score it."""
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
    queue_s: float
    inference_s: float
    batch: BatchReport


class Job(msgspec.Struct, eq=False):
    """One request, waiting for the engine."""

    person: Person
    slate: Slate
    tiles: int
    deadline_s: float
    """On the monotonic clock."""
    future: asyncio.Future[JobScores]
    queued_s: float


class MicroBatcher:
    """Packs jobs into batches for one version's executor."""

    def __init__(
        self,
        *,
        executor: Executor,
        encode: Encode,
        output: OutputSpec,
        tile_width: int,
        limits: BatchSpec,
        max_queue_s: float,
        report: Callable[[BatchReport], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cost = CostModel(limits.tile_buckets)
        self._executor = executor
        self._encode = encode
        self._output = output
        self._tile_width = tile_width
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
        self, person: Person, slate: Slate, *, deadline_s: float, priority: Priority
    ) -> asyncio.Future[JobScores]:
        """Queue a whole slate; raises Overloaded.

        The future may raise DeadlineExceeded or BackendFault. Cancelling it takes the job
        out of the queue.
        """
        tiles = slate.tiles(self._tile_width)
        self.check(tiles, deadline_s)
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        future: asyncio.Future[JobScores] = self._loop.create_future()
        job = Job(person, slate, tiles, deadline_s, future, self._clock())
        self._queues[priority].append(job)
        self._queued_tiles += tiles
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
        tiles = sum(job.tiles for job in jobs)
        sealed_s = self._clock()
        try:
            batch, unknown = self._encode([job.person for job in jobs], [job.slate for job in jobs])
        except Exception as error:  # noqa: BLE001  the batch loop's boundary: one batch fails
            self._fail(jobs, error)
            self._seal()
            return
        self._running = sealed_s, self.cost.predict_s(tiles)
        loop = self._loop
        assert loop is not None

        def done(result: Scored | BackendFault) -> None:
            loop.call_soon_threadsafe(self._finish, jobs, unknown, sealed_s, result)

        self._executor.submit(batch, done)

    def _take(self) -> list[Job]:
        """The jobs of the next batch: the highest waiting priority, oldest first."""
        jobs: list[Job] = []
        for priority in _PRIORITIES:
            queue = self._queues[priority]
            room = self._max_tiles if priority == "interactive" else self._max_low_tiles
            while queue and len(jobs) < self._max_users:
                job = queue[0]
                if jobs and job.tiles > room:
                    break
                queue.popleft()
                self._queued_tiles -= job.tiles
                if self._still_wanted(job, alone=not jobs):
                    jobs.append(job)
                    room -= job.tiles
            if jobs:
                break
        return jobs

    def _still_wanted(self, job: Job, *, alone: bool) -> bool:
        if job.future.done():  # the caller left, or its deadline passed
            return False
        # the first job of a batch runs whatever is predicted, so that a prediction
        # which a stall has spoilt is corrected by the next measurement
        cost_s = 0.0 if alone else self.cost.predict_s(job.tiles)
        if self._clock() + cost_s > job.deadline_s:
            job.future.set_exception(DeadlineExceeded("the deadline came in the queue"))
            return False
        return True

    def _finish(
        self, jobs: list[Job], unknown: Int64Array, sealed_s: float, result: Scored | BackendFault
    ) -> None:
        self._running = None
        self._seal()  # first of all, keep the engine busy
        tiles = sum(job.tiles for job in jobs)
        if isinstance(result, BackendFault):
            self._fail(jobs, result)
            self._tell(self._report_of(jobs, sealed_s, self._clock() - sealed_s))
            return
        self.cost.learn(tiles, result.seconds)
        scores = blend(result.logits, self._output)  # [tiles, T]
        first = scores[: jobs[0].tiles].ravel()[: len(jobs[0].slate.ids)]
        report = self._report_of(
            jobs,
            result.started_s,
            result.seconds,
            backend=result.backend,
            precision=result.precision,
            scores=first,
        )
        at = 0
        for job, missing in zip(jobs, unknown.tolist(), strict=True):
            end = at + job.tiles
            if not job.future.done():
                job.future.set_result(
                    JobScores(
                        scores[at:end].ravel()[: len(job.slate.ids)],
                        missing,
                        result.backend,
                        result.precision,
                        result.rung,
                        result.started_s - job.queued_s,
                        result.seconds,
                        report,
                    )
                )
            at = end
        self._tell(report)

    def _report_of(
        self,
        jobs: list[Job],
        started_s: float,
        seconds: float,
        *,
        backend: BackendName | None = None,
        precision: str = "",
        scores: NDArray[np.float64] | None = None,
    ) -> BatchReport:
        tiles = sum(job.tiles for job in jobs)
        return BatchReport(
            requests=len(jobs),
            tiles=tiles,
            candidates=sum(len(job.slate.ids) for job in jobs),
            slots=tiles * self._tile_width,
            started_s=started_s,
            seconds=seconds,
            backend=backend,
            precision=precision,
            scores=scores,
        )

    def _tell(self, report: BatchReport) -> None:
        """Report once the callers, who are next in the loop, have their answers."""
        assert self._loop is not None
        self._loop.call_soon(self._report, report)

    @staticmethod
    def _fail(jobs: list[Job], error: Exception) -> None:
        """Fail a batch as one; each caller gets an exception of its own."""
        for job in jobs:
            if not job.future.done():
                fault = BackendRecoverable(f"{type(error).__name__}: {error}")
                fault.__cause__ = error
                job.future.set_exception(fault)
