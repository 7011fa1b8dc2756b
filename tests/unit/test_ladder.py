"""The ladder: who takes over when a rung fails, hangs, is slow or is lost."""

import asyncio
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from service.bundle import BatchSpec
from service.domain import Float32Array
from service.encoding.batch import Batch
from service.errors import BackendLost, BackendRecoverable, DeadlineExceeded, NotFound
from service.inference.breaker import RatioBreaker
from service.inference.executor import Executor
from tests.unit.engines import ScriptedEngine, echo
from tests.unit.test_batcher import Rig, entered, mark_of


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def failing(error: Exception) -> Callable[[Batch], Float32Array]:
    def answer(_: Batch) -> Float32Array:
        raise error

    return answer


@pytest.fixture
def gpu() -> ScriptedEngine:
    return ScriptedEngine(kind="tensorrt")


@pytest.fixture
def cpu() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def rig(gpu: ScriptedEngine, cpu: ScriptedEngine, limits: BatchSpec) -> Iterator[Rig]:
    executor = Executor([gpu, cpu], name="test")
    yield Rig(executor, limits)
    gpu.release()
    cpu.release()
    executor.close()


async def until(fact: Callable[[], bool]) -> None:
    for _ in range(5_000):
        if fact():
            return
        await asyncio.sleep(0.001)
    pytest.fail("waited five seconds in vain")


def states(rig: Rig) -> dict[str, str]:
    return {report.kind: report.state for report in rig.batcher.ladder.reports()}


def test_a_breaker_opens_at_its_ratio_and_not_before() -> None:
    breaker = RatioBreaker(window=10, least=4, ratio=0.5)
    for _ in range(3):
        breaker.succeeded()
        breaker.failed()
        breaker.succeeded()
    assert breaker.state == "closed"
    breaker.failed()
    breaker.failed()
    assert (breaker.state, breaker.opened) == ("open", 1)


def test_an_old_failure_leaves_the_window() -> None:
    breaker = RatioBreaker(window=4, least=4, ratio=0.5)
    breaker.failed()
    for _ in range(4):
        breaker.succeeded()
    breaker.failed()
    assert breaker.state == "closed"


def test_a_probe_closes_an_open_breaker_and_a_failed_one_doubles_the_pause() -> None:
    clock = Clock()
    breaker = RatioBreaker(least=1, open_s=1.0, max_open_s=3.0, clock=clock)
    breaker.failed()
    assert not breaker.allow()
    for pause_s in (1.0, 2.0, 3.0, 3.0):
        clock.now_s += pause_s - 0.01
        assert not breaker.allow()
        clock.now_s += 0.02
        assert breaker.allow()
        assert not breaker.allow(), "one probe at a time"
        breaker.failed()
    clock.now_s += 3.1
    assert breaker.allow()
    breaker.succeeded()
    assert breaker.state == "closed"
    breaker.failed()
    clock.now_s += 1.01
    assert breaker.allow(), "a success resets the pause"


async def test_a_failing_batch_is_scored_by_the_next_rung(
    rig: Rig, gpu: ScriptedEngine, cpu: ScriptedEngine
) -> None:
    gpu.answer = failing(BackendRecoverable("no memory"))
    scores = await asyncio.gather(*[rig.submit(mark, 2) for mark in (1, 2, 3)])
    assert [mark_of(each) for each in scores] == [1, 2, 3]
    assert {each.rung for each in scores} == {1}
    assert (gpu.tiles, cpu.tiles) == ([6], [6])


async def test_a_batch_that_two_rungs_fail_is_failed(
    rig: Rig, gpu: ScriptedEngine, cpu: ScriptedEngine
) -> None:
    gpu.answer = failing(BackendRecoverable("first"))
    cpu.answer = failing(BackendRecoverable("second"))
    with pytest.raises(BackendRecoverable, match="second"):
        await rig.submit(1)
    assert (gpu.tiles, cpu.tiles) == ([1], [1])


async def test_a_third_rung_is_not_asked_about_the_same_batch(limits: BatchSpec) -> None:
    bad = failing(BackendRecoverable("no"))
    engines = [ScriptedEngine(bad), ScriptedEngine(bad), ScriptedEngine()]
    executor = Executor(engines, name="three")
    with pytest.raises(BackendRecoverable):
        await Rig(executor, limits).submit(1)
    executor.close()
    assert [engine.tiles for engine in engines] == [[1], [1], []]


async def test_a_retry_past_the_deadline_is_not_run(
    rig: Rig, gpu: ScriptedEngine, cpu: ScriptedEngine
) -> None:
    gpu.answer = failing(BackendRecoverable("late"))
    gpu.hold()
    late = rig.submit(1, left_s=0.02)
    await entered(gpu)
    await asyncio.sleep(0.03)
    gpu.release()
    with pytest.raises(DeadlineExceeded):
        await late
    assert cpu.tiles == []


async def test_a_failing_rung_is_left_alone_until_its_probe_succeeds(
    gpu: ScriptedEngine, cpu: ScriptedEngine, limits: BatchSpec
) -> None:
    clock = Clock()
    executor = Executor([gpu, cpu], name="probe")
    rig = Rig(executor, limits, breaker=lambda: RatioBreaker(least=2, clock=clock))
    gpu.answer = failing(BackendRecoverable("no"))
    for mark in range(1, 6):
        assert mark_of(await rig.submit(mark)) == mark
    assert len(gpu.tiles) == 2
    assert states(rig) == {"tensorrt": "open", "onnx-cpu": "closed"}
    gpu.answer = echo
    clock.now_s += 1.1
    assert (await rig.submit(9)).rung == 0
    assert states(rig)["tensorrt"] == "closed"
    executor.close()


async def test_a_hanging_rung_gives_its_jobs_away_and_its_late_answer_is_dropped(
    rig: Rig, gpu: ScriptedEngine
) -> None:
    gpu.answer = lambda batch: np.zeros((*batch.cand_ids.shape[:2], 2), np.float32)
    gpu.hold()
    jobs = [rig.submit(mark) for mark in (1, 2)]
    await entered(gpu)
    waiting = [rig.submit(mark) for mark in (3, 4)]
    scores = await asyncio.gather(*jobs, *waiting)
    assert [mark_of(each) for each in scores] == [1, 2, 3, 4]
    assert states(rig)["tensorrt"] == "stuck"
    assert mark_of(await rig.submit(5)) == 5
    gpu.release()
    await until(lambda: states(rig)["tensorrt"] != "stuck")
    assert states(rig)["tensorrt"] == "open"


async def test_the_last_rung_that_hangs_sets_its_callers_free(
    limits: BatchSpec, cpu: ScriptedEngine
) -> None:
    executor = Executor([cpu], name="alone")
    rig = Rig(executor, limits, stall_s=0.002)
    cpu.hold()
    with pytest.raises(BackendRecoverable, match="does not answer"):
        await rig.submit(1)
    with pytest.raises(BackendRecoverable, match="no rung"):
        rig.submit(2)
    cpu.release()
    executor.close()


async def test_a_lost_rung_is_never_touched_again(rig: Rig, gpu: ScriptedEngine) -> None:
    assert rig.batcher.ladder.lost_s() is None
    gpu.answer = failing(BackendLost("CUDA error 700"))
    gpu.hold()
    jobs = [rig.submit(1)]
    await entered(gpu)
    jobs.append(rig.submit(2))  # handed over behind the first
    gpu.release()
    scores = await asyncio.gather(*jobs)
    assert [mark_of(each) for each in scores] == [1, 2]
    assert gpu.tiles == [1]
    assert states(rig)["tensorrt"] == "lost"
    assert rig.batcher.ladder.lost_s() is not None
    assert mark_of(await rig.submit(3)) == 3
    assert gpu.tiles == [1]


async def test_a_lost_engine_is_not_closed(limits: BatchSpec, gpu: ScriptedEngine) -> None:
    gpu.answer = failing(BackendLost("CUDA error 700"))
    executor = Executor([gpu], name="lost")
    with pytest.raises(BackendRecoverable, match="700"):
        await Rig(executor, limits).submit(1)
    executor.close()
    assert not gpu.closed


async def test_a_job_that_the_first_queue_would_fail_goes_to_the_next_rung(
    rig: Rig, gpu: ScriptedEngine, cpu: ScriptedEngine
) -> None:
    for lane in rig.batcher.ladder.lanes:
        for tiles in (1, 2, 4, 8):
            lane.cost.learn(tiles, 0.5 if lane.kind == "tensorrt" else 0.01)
    gpu.hold()
    first = rig.submit(1)
    await entered(gpu)
    urgent, patient = rig.submit(2, left_s=0.3), rig.submit(3, left_s=5)
    scores = await urgent
    assert (mark_of(scores), scores.rung) == (2, 1)
    assert cpu.tiles == [1]
    gpu.release()
    assert [(await job).rung for job in (first, patient)] == [0, 0]


async def test_a_device_has_the_next_batch_before_it_ends_this_one(
    rig: Rig, gpu: ScriptedEngine
) -> None:
    gpu.hold()
    jobs = [rig.submit(1)]
    await entered(gpu)
    jobs.append(rig.submit(2))
    await asyncio.sleep(0)
    jobs.append(rig.submit(3))
    assert rig.batcher.queued_tiles == 1, "two batches are on the device, one job waits"
    gpu.release()
    assert [mark_of(await job) for job in jobs] == [1, 2, 3]


async def test_the_operator_puts_another_rung_first(rig: Rig, gpu: ScriptedEngine) -> None:
    rig.batcher.ladder.prefer("onnx-cpu")
    scores = await rig.submit(1)
    assert (scores.rung, gpu.tiles) == (0, [])
    rig.batcher.ladder.prefer("tensorrt")
    await rig.submit(2)
    assert gpu.tiles == [1]
    with pytest.raises(NotFound, match="openvino"):
        rig.batcher.ladder.prefer("openvino")
    assert [lane.kind for lane in rig.batcher.ladder.lanes] == ["tensorrt", "onnx-cpu"]


async def test_a_change_of_the_order_is_no_fallback_for_what_is_queued(
    rig: Rig, gpu: ScriptedEngine
) -> None:
    gpu.hold()
    jobs = [rig.submit(1)]
    await entered(gpu)
    jobs.append(rig.submit(2))
    rig.batcher.prefer("onnx-cpu")
    jobs.append(rig.submit(3))
    assert (await jobs[2]).rung == 0
    gpu.release()
    assert [(await job).rung for job in jobs] == [0, 0, 0]
    rig.batcher.prefer(None)
    await rig.submit(4)
    assert gpu.tiles == [1, 1, 1]


async def test_a_rung_that_comes_later_takes_over(
    cpu: ScriptedEngine, gpu: ScriptedEngine, limits: BatchSpec
) -> None:
    executor = Executor([cpu], name="later")
    rig = Rig(executor, limits)
    assert (await rig.submit(1)).rung == 0
    rung = executor.add(gpu)
    assert rung is not None
    rig.batcher.add_rung(rung)
    scores = await rig.submit(2)
    assert (mark_of(scores), scores.rung, gpu.tiles) == (2, 0, [1])
    executor.close()
    assert gpu.closed
    late = ScriptedEngine()
    assert executor.add(late) is None
    assert late.closed


async def test_a_rung_that_comes_later_stays_behind_the_operators_choice(
    cpu: ScriptedEngine, gpu: ScriptedEngine, limits: BatchSpec
) -> None:
    executor = Executor([cpu], name="chosen")
    rig = Rig(executor, limits)
    rig.batcher.ladder.prefer("onnx-cpu")
    rung = executor.add(gpu)
    assert rung is not None
    rig.batcher.add_rung(rung)
    await rig.submit(1)
    assert (cpu.tiles, gpu.tiles) == ([1], [])
    executor.close()
