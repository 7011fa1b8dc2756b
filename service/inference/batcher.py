"""The micro-batcher: batches form while the engine is busy, and an idle engine never waits.

Runs on the event loop and never blocks it. A job's tiles stay together: a slate is
admitted whole, scored whole, or refused whole. A batch that its rung fails is tried once
more on the next rung.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from service.bundle import BatchSpec, OutputSpec
from service.domain import BackendKind, BackendName, Int64Array, Priority
from service.encoding.batch import Batch
from service.encoding.history import Person
from service.encoding.slate import Slate, blend
from service.errors import (
    BackendFault,
    BackendLost,
    BackendRecoverable,
    DeadlineExceeded,
)
from service.inference.breaker import RatioBreaker
from service.inference.cost import CostModel
from service.inference.executor import Executor
from service.inference.jobs import BatchReport, Job, JobScores
from service.inference.ladder import Ladder
from service.inference.lane import Flight, Lane
from service.inference.outages import Outages, RungChange
from service.inference.rung import Rung, Scored

__all__ = ["BatchReport", "JobScores", "MicroBatcher"]

Encode = Callable[[Sequence[Person], Sequence[Slate]], tuple[Batch, Int64Array]]
_log = logging.getLogger("ranker.rungs")


class MicroBatcher:
    """Packs jobs into batches for one version's rungs."""

    def __init__(
        self,
        *,
        executor: Executor,
        encode: Encode,
        output: OutputSpec,
        tile_width: int,
        limits: BatchSpec,
        max_queue_s: float,
        stall_s: float = 0.05,
        report: Callable[[BatchReport], None] = lambda _: None,
        changed: Callable[[RungChange], None] = lambda _: None,
        breaker: Callable[[], RatioBreaker] = RatioBreaker,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lane = partial(Lane, limits=limits, clock=clock)
        self._breaker = breaker
        self.ladder = Ladder(
            [self._lane(rung, breaker=breaker()) for rung in executor.rungs],
            max_queue_s=max_queue_s,
            clock=clock,
        )
        self._outages = Outages(self.ladder, changed, clock)
        self._encode = encode
        self._output = output
        self._tile_width = tile_width
        self._stall_s = stall_s
        self._report = report
        self._clock = clock
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def cost(self) -> CostModel:
        """What batches cost on the first rung."""
        return self.ladder.lanes[0].cost

    @property
    def queued_tiles(self) -> int:
        """Tiles that wait for an engine."""
        return sum(lane.queues.tiles for lane in self.ladder.lanes)

    def wait_s(self) -> float:
        """Predicted seconds until a job that came now would start."""
        return self.ladder.wait_s()

    def add_rung(self, rung: Rung) -> None:
        """Use one more rung; from any thread. It learns its cost from its first batches."""
        self.ladder.add(self._lane(rung, breaker=self._breaker()))
        self._outages.note(rung.backend.kind, "joined")

    def prefer(self, kind: BackendKind | None) -> None:
        """Try this backend first from now on, or the best one again; raises NotFound.

        What is queued or runs stays where it is.
        """
        if kind == self.ladder.preferred:
            return
        self.ladder.prefer(kind)
        reason = "put first by an operator" if kind else "first again, as the best"
        self._outages.note(self.ladder.lanes[0].kind, reason)

    def check(self, tiles: int, deadline_s: float, priority: Priority) -> None:
        """Raise Overloaded where no rung could score a job of so many tiles in time.

        Raises BackendRecoverable where no rung takes jobs at all.
        """
        self.ladder.choose(tiles, deadline_s - self._clock(), priority)

    def submit(
        self, person: Person, slate: Slate, *, deadline_s: float, priority: Priority
    ) -> asyncio.Future[JobScores]:
        """Queue a whole slate; raises what `check` raises.

        The future may raise DeadlineExceeded or BackendFault. A job whose future is done
        makes room at once and never reaches an engine.
        """
        tiles = slate.tiles(self._tile_width)
        lane = self.ladder.choose(tiles, deadline_s - self._clock(), priority)
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        future: asyncio.Future[JobScores] = self._loop.create_future()
        place = self.ladder.place(lane)
        job = Job(person, slate, tiles, deadline_s, priority, future, self._clock(), place)
        lane.breaker.allow()
        lane.queues.put(job)
        if not lane.full and not lane.seal_scheduled:
            # jobs that arrive in this turn of the loop share the batch
            lane.seal_scheduled = True
            self._loop.call_soon(self._seal, lane)
        return future

    def _seal(self, lane: Lane) -> None:
        lane.seal_scheduled = False
        while not lane.full and (jobs := self._take(lane)):
            tiles = sum(job.tiles for job in jobs)
            flight = Flight(jobs, tiles, self._clock(), lane.cost.predict_s(tiles))
            try:
                batch, unknown = self._encode(
                    [job.person for job in jobs], [job.slate for job in jobs]
                )
            except Exception as error:  # noqa: BLE001  the batch loop's boundary: one batch fails
                _fail(jobs, error)
                continue
            lane.flights.append(flight)
            self._watch(lane)
            self._hand_over(lane, flight, batch, unknown)

    def _take(self, lane: Lane) -> list[Job]:
        def still_wanted(job: Job, alone: bool) -> bool:  # noqa: FBT001  a callback's arguments
            if job.future.done():  # the caller left, or its deadline passed
                return False
            cost_s = 0.0 if alone else lane.cost.predict_s(job.tiles)
            if self._clock() + cost_s > job.deadline_s:
                job.future.set_exception(DeadlineExceeded("the deadline came in the queue"))
                return False
            return True

        return lane.queues.take(still_wanted)

    def _hand_over(self, lane: Lane, flight: Flight, batch: Batch, unknown: Int64Array) -> None:
        loop = self._loop
        assert loop is not None

        def done(result: Scored | BackendFault) -> None:
            flight.landed = True
            if not loop.is_closed():  # a hanging engine may outlive the loop
                loop.call_soon_threadsafe(self._finish, lane, flight, unknown, result)

        lane.rung.submit(batch, done)

    def _watch(self, lane: Lane) -> None:
        """Set a timer on the batch that the rung works on now."""
        if not lane.flights or lane.flights[0].timer is not None:
            return
        assert self._loop is not None
        flight = lane.flights[0]
        flight.started_s = self._clock()
        limit_s = lane.limit_s(flight, self._stall_s, last=self.ladder.alone(lane))
        flight.timer = self._loop.call_later(limit_s, self._abandon, lane, flight)

    def _abandon(self, lane: Lane, head: Flight) -> None:
        """Give the jobs of a hanging rung away, and keep it out until its thread comes back."""
        if head.landed:  # it was the loop that hung
            return
        lane.stuck_s = self._clock()
        lane.breaker.trip()
        self._outages.begin(lane, "does not answer", began_s=head.started_s)
        jobs = [job for flight in lane.flights for job in flight.jobs]
        for flight in lane.flights:
            flight.abandoned = True
        lane.flights.clear()
        self._retry(lane, jobs, BackendRecoverable(f"{lane.kind} does not answer"))
        self._evacuate(lane)

    def _finish(
        self, lane: Lane, flight: Flight, unknown: Int64Array, result: Scored | BackendFault
    ) -> None:
        if isinstance(result, BackendLost):
            self._lose(lane, result)
        if flight.abandoned:
            lane.stuck_s = None
            return
        if flight.timer is not None:
            flight.timer.cancel()
        lane.flights.remove(flight)
        self._watch(lane)
        if isinstance(result, BackendFault):
            self._step_down(lane, flight, result)
            return
        lane.breaker.succeeded()
        self._seal(lane)  # first of all, keep the engine busy
        lane.cost.learn(flight.tiles, result.seconds)
        self._answer(flight.jobs, unknown, result)
        self._outages.end(lane)

    def _answer(self, jobs: list[Job], unknown: Int64Array, result: Scored) -> None:
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
                        job.rung,
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

    def _lose(self, lane: Lane, fault: BackendLost) -> None:
        if lane.lost_s is None:
            lane.lost_s = self._clock()
            self._outages.begin(lane, str(fault), began_s=lane.lost_s)

    def _step_down(self, lane: Lane, flight: Flight, fault: BackendFault) -> None:
        lane.breaker.failed()
        seconds = self._clock() - flight.started_s
        self._tell(self._report_of(flight.jobs, flight.started_s, seconds))
        _log.warning("batch failed", extra={"rung": lane.kind, "reason": str(fault)})
        self._retry(lane, flight.jobs, fault)
        if lane.usable():
            self._seal(lane)
        else:
            self._outages.begin(lane, str(fault), began_s=flight.started_s)
            self._evacuate(lane)

    def _retry(self, lane: Lane, jobs: list[Job], fault: BackendFault) -> None:
        """Queue jobs that a rung failed on another one, once; fail the rest as one."""
        fresh = [job for job in jobs if not job.retried]
        _fail([job for job in jobs if job.retried], fault)
        for job in fresh:
            job.retried = True
        self._move(lane, fresh, fault)

    def _evacuate(self, lane: Lane) -> None:
        """Move what waits for a rung that takes no more jobs."""
        fault = BackendRecoverable(f"{lane.kind} takes no jobs now")
        self._move(lane, lane.queues.take_all(), fault)

    def _move(self, lane: Lane, jobs: list[Job], fault: BackendFault) -> None:
        target = self.ladder.after(lane)
        if target is None or not target.breaker.allow():
            _fail(jobs, fault)
            return
        for job in jobs:
            job.rung = self.ladder.place(target)
        target.queues.put_back(jobs)
        self._seal(target)


def _fail(jobs: list[Job], error: Exception) -> None:
    """Fail a batch as one; each caller gets an exception of its own."""
    for job in jobs:
        if not job.future.done():
            fault = BackendRecoverable(f"{type(error).__name__}: {error}")
            fault.__cause__ = error
            job.future.set_exception(fault)
