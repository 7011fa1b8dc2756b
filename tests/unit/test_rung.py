"""A rung's threads: one begins batches, another ends them, in the order given."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from service.domain import BackendKind, BackendName, Float32Array
from service.encoding.batch import Batch
from service.errors import BackendFault, BackendLost, BackendRecoverable
from service.inference.rung import Rung, Scored
from tests.unit.engines import ScriptedEngine

COMPUTE_S = 0.05


class TwoAtOnce:
    """Begins a batch at once; each takes its time after the one before it."""

    name: BackendName = "tensorrt"
    kind: BackendKind = "tensorrt"
    precision = "fp16"

    def __init__(self) -> None:
        self.events: list[str] = []
        self.at_begin: dict[int, Exception] = {}
        self.at_end: dict[int, Exception] = {}
        self.both_begun = threading.Event()

    def begin(self, batch: Batch) -> Callable[[], Float32Array]:
        mark = int(batch.tile_user[0])
        self.events.append(f"begin {mark}")
        if mark in self.at_begin:
            raise self.at_begin[mark]
        if mark == 2:
            self.both_begun.set()

        def end() -> Float32Array:
            self.events.append(f"end {mark}")
            if mark == 1:
                assert self.both_begun.wait(10), "the second is begun before the first has ended"
            time.sleep(COMPUTE_S)
            if mark in self.at_end:
                raise self.at_end[mark]
            return np.full((1, 1, 2), mark, np.float32)

        return end

    def score(self, batch: Batch) -> Float32Array:
        return self.begin(batch)()

    def close(self) -> None:
        self.events.append("close")


def batch_of(mark: int) -> Batch:
    ids = np.zeros((1, 1, 1), np.int32)
    return Batch(ids, ids[0], ids[0].astype(np.float32), ids[0], ids, np.array([mark], np.int32))


@pytest.fixture
def engine() -> TwoAtOnce:
    return TwoAtOnce()


@pytest.fixture
def rung(engine: TwoAtOnce) -> Iterator[Rung]:
    rung = Rung(engine, name="test")
    yield rung
    rung.close()


def run(rung: Rung, *marks: int) -> list[Scored | BackendFault]:
    """What became of batches that were given at once."""
    results: list[Scored | BackendFault] = []
    ended = threading.Semaphore(0)

    def done(result: Scored | BackendFault) -> None:
        results.append(result)
        ended.release()

    for mark in marks:
        rung.submit(batch_of(mark), done)
    for _ in marks:
        assert ended.acquire(timeout=10)
    return results


def marks_of(results: list[Scored | BackendFault]) -> list[int | str]:
    return [
        int(result.logits[0, 0, 0]) if isinstance(result, Scored) else str(result)
        for result in results
    ]


def test_the_next_batch_is_begun_while_this_one_runs(rung: Rung, engine: TwoAtOnce) -> None:
    started_s = time.monotonic()
    results = run(rung, 1, 2)
    passed_s = time.monotonic() - started_s
    assert marks_of(results) == [1, 2]
    assert engine.events[:2] in (["begin 1", "begin 2"], ["begin 1", "end 1"])
    first, second = results
    assert isinstance(first, Scored)
    assert isinstance(second, Scored)
    assert second.started_s == pytest.approx(first.started_s + first.seconds, abs=0.01)
    assert first.seconds + second.seconds <= passed_s, "no time is counted twice"


@pytest.mark.parametrize("where", ["at_begin", "at_end"])
def test_a_batch_that_fails_fails_alone_and_in_its_turn(
    rung: Rung, engine: TwoAtOnce, where: str
) -> None:
    getattr(engine, where)[3] = BackendRecoverable("no memory")
    getattr(engine, where)[4] = KeyError("a bug")
    assert marks_of(run(rung, 1, 2, 3, 4, 5)) == [1, 2, "no memory", "KeyError: 'a bug'", 5]


def test_a_lost_device_is_not_touched_for_what_was_begun_or_waits(engine: TwoAtOnce) -> None:
    engine.at_end[1] = BackendLost("CUDA error 700")
    rung = Rung(engine, name="lost")
    results = run(rung, 1, 2, 3)
    assert [type(result) for result in results] == [BackendLost] * 3
    assert "end 2" not in engine.events
    assert marks_of(run(rung, 4)) == ["CUDA error 700"]
    rung.close()
    assert "begin 4" not in engine.events
    assert "close" not in engine.events


def test_all_that_was_begun_is_ended_before_the_engine_is_freed(engine: TwoAtOnce) -> None:
    rung = Rung(engine, name="closing")
    results: list[Scored | BackendFault] = []
    for mark in (1, 2, 3):
        rung.submit(batch_of(mark), results.append)
    rung.close()
    assert marks_of(results) == [1, 2, 3]
    assert engine.events[-1] == "close"


def test_an_engine_that_cannot_overlap_scores_on_the_rungs_own_thread() -> None:
    threads: list[str] = []

    def answer(batch: Batch) -> Float32Array:
        threads.append(threading.current_thread().name)
        return np.zeros((*batch.cand_ids.shape[:2], 2), np.float32)

    rung = Rung(ScriptedEngine(answer), name="plain")
    run(rung, 1, 2)
    rung.close()
    assert threads == ["onnx-cpu-plain"] * 2
