import asyncio
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from service.bundle import BatchSpec, OutputSpec
from service.domain import Float32Array, Int64Array, Priority
from service.encoding.batch import Batch
from service.encoding.history import Person
from service.encoding.items import CANDIDATE_WIDTH, ITEM1
from service.encoding.slate import Slate
from service.errors import BackendRecoverable, DeadlineExceeded, Overloaded
from service.inference.batcher import BatchReport, JobScores, MicroBatcher
from service.inference.breaker import RatioBreaker
from service.inference.executor import Executor
from tests.unit.engines import ScriptedEngine, echo


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def executor(engine: ScriptedEngine) -> Iterator[Executor]:
    executor = Executor([engine], name="test")
    yield executor
    engine.release()
    executor.close()


T = 4


def encode(people: Sequence[Person], slates: Sequence[Slate]) -> tuple[Batch, Int64Array]:
    """Marks instead of features: a slate's first id is its mark, in every candidate."""
    users = len(people)
    marks = np.array([int(slate.ids[0]) for slate in slates], np.int32)
    tile_slate = np.arange(users).repeat([slate.tiles(T) for slate in slates])
    cand_ids = np.zeros((len(tile_slate), T, CANDIDATE_WIDTH), np.int32)
    cand_ids[..., ITEM1] = marks[tile_slate][:, None]
    batch = Batch(
        np.zeros((users, 1, 6), np.int32),
        np.zeros((users, 1), np.int32),
        np.zeros((users, 1), np.float32),
        np.zeros((users, 16), np.int32),
        cand_ids,
        tile_slate.astype(np.int32),
    )
    return batch, np.zeros(users, np.int64)


class Rig:
    def __init__(
        self,
        executor: Executor,
        limits: BatchSpec,
        *,
        stall_s: float = 0.1,
        breaker: Callable[[], RatioBreaker] = RatioBreaker,
    ) -> None:
        self.reports: list[BatchReport] = []
        self.batcher = MicroBatcher(
            executor=executor,
            encode=encode,
            output=OutputSpec(),
            tile_width=T,
            limits=limits,
            max_queue_s=5.0,
            stall_s=stall_s,
            breaker=breaker,
            report=self.reports.append,
        )

    def submit(
        self, mark: int, tiles: int = 1, *, left_s: float = 5.0, priority: Priority = "interactive"
    ) -> asyncio.Future[JobScores]:
        """A job whose candidates all carry `mark`."""
        return self.batcher.submit(
            Person([]),
            Slate([str(mark)] * (tiles * T)),
            deadline_s=time.monotonic() + left_s,
            priority=priority,
        )


def mark_of(scores: JobScores) -> int:
    """The one mark that all scores of a job tell of."""
    (score,) = set(scores.scores.tolist())
    return round(float(score) * 1e6)


@pytest.fixture
def rig(executor: Executor, limits: BatchSpec) -> Rig:
    return Rig(executor, limits)


async def entered(engine: ScriptedEngine) -> None:
    assert await asyncio.to_thread(engine.entered.wait, 5)


async def test_a_lone_job_runs_at_once(rig: Rig, engine: ScriptedEngine) -> None:
    scores = await rig.submit(7)
    assert mark_of(scores) == 7
    assert engine.tiles == [1]


async def test_jobs_that_arrive_together_share_a_batch(rig: Rig, engine: ScriptedEngine) -> None:
    results = await asyncio.gather(*[rig.submit(mark, 2) for mark in (1, 2, 3)])
    assert engine.tiles == [6]
    for mark, scores in zip((1, 2, 3), results, strict=True):
        assert scores.scores.shape == (2 * T,)
        assert mark_of(scores) == mark


async def test_batches_form_while_the_engine_is_busy(rig: Rig, engine: ScriptedEngine) -> None:
    engine.hold()
    first = rig.submit(1)
    await entered(engine)
    waiting = [rig.submit(mark) for mark in (2, 3)]
    engine.release()
    await asyncio.gather(first, *waiting)
    assert engine.tiles == [1, 2]


async def test_a_batch_holds_no_more_tiles_or_users_than_permitted(
    rig: Rig, engine: ScriptedEngine
) -> None:
    engine.hold()
    jobs = [rig.submit(1)]
    await entered(engine)
    jobs += [rig.submit(mark, 3) for mark in (2, 3, 4)]  # 9 tiles, 8 are permitted
    jobs += [rig.submit(mark) for mark in range(5, 11)]  # 4 users are permitted
    engine.release()
    results = await asyncio.gather(*jobs)
    assert max(engine.tiles) <= 8
    assert max(report.requests for report in rig.reports) <= 4
    assert [mark_of(scores) for scores in results] == list(range(1, 11))


async def test_a_slate_larger_than_a_batch_still_runs_whole_and_alone(
    executor: Executor, engine: ScriptedEngine
) -> None:
    rig = Rig(executor, BatchSpec(max_users=4, tile_buckets=(8,)))
    engine.hold()
    jobs = [rig.submit(1)]
    await entered(engine)
    jobs += [rig.submit(2, 8), rig.submit(3)]
    engine.release()
    await asyncio.gather(*jobs)
    assert engine.tiles == [1, 8, 1]


async def test_a_job_whose_caller_left_never_reaches_the_engine(
    rig: Rig, engine: ScriptedEngine
) -> None:
    engine.hold()
    first = rig.submit(1)
    await entered(engine)
    gone, stays = rig.submit(2), rig.submit(3)
    gone.cancel()
    engine.release()
    await asyncio.gather(first, stays)
    assert engine.tiles == [1, 1]
    assert rig.batcher.queued_tiles == 0


async def test_a_job_whose_deadline_passed_never_reaches_the_engine(
    rig: Rig, engine: ScriptedEngine
) -> None:
    engine.hold()
    first = rig.submit(1)
    await entered(engine)
    late = rig.submit(2, left_s=0.01)
    await asyncio.sleep(0.03)
    engine.release()
    await first
    with pytest.raises(DeadlineExceeded):
        await late
    assert engine.tiles == [1]


async def test_a_request_that_cannot_be_encoded_fails_its_batch_alone(rig: Rig) -> None:
    bad = rig.batcher.submit(
        Person([]),
        Slate(["no number"]),
        deadline_s=time.monotonic() + 5,
        priority="interactive",
    )
    with pytest.raises(BackendRecoverable, match="ValueError"):
        await bad
    assert mark_of(await rig.submit(3)) == 3


async def test_a_failing_batch_fails_its_own_callers_alone(
    rig: Rig, engine: ScriptedEngine
) -> None:
    def answer(batch: Batch) -> Float32Array:
        if (batch.cand_ids[..., ITEM1] == 2).any():
            raise BackendRecoverable("this batch cannot be scored")
        return echo(batch)

    engine.answer = answer
    engine.hold()
    good = rig.submit(1)
    await entered(engine)
    bad, company = rig.submit(2), rig.submit(3)
    engine.release()
    assert mark_of(await good) == 1
    for future in (bad, company):
        with pytest.raises(BackendRecoverable):
            await future
    assert mark_of(await rig.submit(4)) == 4
    await asyncio.sleep(0)  # reports come after the answers
    assert [report.backend is None for report in rig.reports] == [False, True, False]


async def test_scores_that_are_no_numbers_fail_the_batch(rig: Rig, engine: ScriptedEngine) -> None:
    engine.answer = lambda batch: np.full((len(batch.cand_ids), 4, 2), np.nan, np.float32)
    with pytest.raises(BackendRecoverable, match="no numbers"):
        await rig.submit(1)


async def test_an_engine_with_a_bug_does_not_stop_the_loop(
    rig: Rig, engine: ScriptedEngine
) -> None:
    def answer(batch: Batch) -> Float32Array:
        raise KeyError(len(batch.cand_ids))

    engine.answer = answer
    with pytest.raises(BackendRecoverable, match="KeyError"):
        await rig.submit(1)
    engine.answer = echo
    assert mark_of(await rig.submit(2)) == 2


async def test_the_second_rung_answers_where_the_first_fails(
    limits: BatchSpec,
) -> None:
    def refuse(batch: Batch) -> Float32Array:
        raise BackendRecoverable(f"no room for {len(batch.cand_ids)} tiles")

    executor = Executor([ScriptedEngine(refuse), ScriptedEngine()], name="ladder")
    scores = await Rig(executor, limits).submit(5)
    assert (scores.rung, mark_of(scores)) == (1, 5)
    executor.close()


async def test_a_queue_that_misses_the_deadline_refuses_the_whole_slate(
    rig: Rig, engine: ScriptedEngine
) -> None:
    for tiles in (1, 2, 4, 8):
        rig.batcher.cost.learn(tiles, 0.5)
    engine.hold()
    first = rig.submit(1)
    await entered(engine)
    with pytest.raises(Overloaded):
        rig.submit(2, left_s=0.4)
    assert rig.batcher.queued_tiles == 0
    patient = rig.submit(3, left_s=4.0)
    engine.release()
    await asyncio.gather(first, patient)


async def test_a_prediction_spoilt_by_a_stall_is_corrected_by_the_next_batch(
    rig: Rig, engine: ScriptedEngine
) -> None:
    rig.batcher.cost.learn(1, 3.0)
    for mark in range(80):
        scores = await rig.submit(mark, left_s=1.0)
        assert mark_of(scores) == mark
    assert rig.batcher.cost.predict_s(1) < 0.1
    assert len(engine.tiles) == 80


async def test_interactive_jobs_go_before_all_others(rig: Rig, engine: ScriptedEngine) -> None:
    engine.hold()
    first = rig.submit(1)
    await entered(engine)
    done: list[str] = []
    jobs = {
        "shadow": rig.submit(2, 2, priority="shadow"),
        "batch": rig.submit(3, 2, priority="batch"),
        "interactive": rig.submit(4, 2),
    }
    for name, future in jobs.items():
        future.add_done_callback(lambda _, name=name: done.append(name))  # type: ignore[misc]
    engine.release()
    await asyncio.gather(first, *jobs.values())
    await asyncio.sleep(0)
    assert done == ["interactive", "batch", "shadow"]


async def test_low_priorities_do_not_stand_in_an_interactive_jobs_way(
    rig: Rig, engine: ScriptedEngine
) -> None:
    for tiles in (1, 2, 4, 8):
        rig.batcher.cost.learn(tiles, 0.5)
    engine.hold()
    first = rig.submit(1)
    await entered(engine)
    flood = [rig.submit(2, 8, left_s=60, priority="batch") for _ in range(4)]
    urgent = rig.submit(3, left_s=2.0)
    with pytest.raises(Overloaded):
        rig.submit(4, left_s=2.0, priority="batch")
    engine.release()
    assert mark_of(await urgent) == 3
    await asyncio.gather(first, *flood)
    assert engine.tiles[:3] == [1, 1, 8]


async def test_a_caller_that_leaves_makes_room_at_once(rig: Rig, engine: ScriptedEngine) -> None:
    engine.hold()
    first = rig.submit(1)
    await entered(engine)
    gone = rig.submit(2, 8)
    assert rig.batcher.queued_tiles == 8
    gone.cancel()
    await asyncio.sleep(0)
    assert rig.batcher.queued_tiles == 0
    engine.release()
    await first


async def test_no_answer_is_lost_or_swapped_in_a_crowd(rig: Rig) -> None:
    rng = np.random.default_rng(3)

    async def ask(mark: int) -> None:
        await asyncio.sleep(float(rng.random()) * 0.05)
        tiles = 1 + mark % 3
        future = rig.submit(mark, tiles)
        if mark % 7 == 0:
            future.cancel()
            return
        scores = await future
        assert scores.scores.shape == (tiles * T,)
        assert mark_of(scores) == mark

    await asyncio.gather(*[ask(mark) for mark in range(300)])
    assert rig.batcher.queued_tiles == 0
