"""200 concurrent requests while a rung of the ladder fails: every caller gets its own order.

The rungs are real ONNX Runtime sessions on the shipped bundle; the fault is put before one.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import pytest
from pydantic import SecretStr

from service.app import Service
from service.bundle import Bundle
from service.domain import EMPTY_CONTEXT, BackendKind, BackendName, Float32Array
from service.encoding.batch import Batch, encode_batch
from service.encoding.history import Person
from service.encoding.items import ItemTable
from service.encoding.rows import RowSpace
from service.encoding.slate import Slate, blend
from service.errors import BackendRecoverable
from service.inference.backends import cuda
from service.inference.backends.onnx import OnnxCpu
from service.inference.executor import Executor
from service.ranking.admission import Admission, Deadline
from service.ranking.query import Query, Ranking
from service.ranking.ranker import Ranker
from service.settings import Settings
from service.signals.store import SignalStore
from service.versions.loaded import LoadedVersion
from service.versions.roles import Versions

pytestmark = pytest.mark.alone

STORE = Path(__file__).parents[2] / "models" / "store" / "shop"
CALLERS = 200
SLATE = 20
TIMEOUT_S = 2.0
NOW_MS = 1_700_000_000_000


class FaultyOnnx:
    """ONNX Runtime with a fault before it; `fault` is None while it is well."""

    name: BackendName = "tensorrt"
    precision = "fp32"

    def __init__(self, inner: OnnxCpu, kind: BackendKind) -> None:
        self.kind: BackendKind = kind
        self.inner = inner
        self.fault: Callable[[Batch], Float32Array] | None = None
        self.freed = threading.Event()
        self.runs = 0

    def score(self, batch: Batch) -> Float32Array:
        self.runs += 1
        return self.inner.score(batch) if self.fault is None else self.fault(batch)

    def hang(self, batch: Batch) -> Float32Array:
        self.freed.wait(20)
        return np.zeros((*batch.cand_ids.shape[:2], 2), np.float32)

    def close(self) -> None:
        self.inner.close()


class FaultyOverlapping(FaultyOnnx):
    """The same, but it takes the next batch before the last one is done, as a device does."""

    def begin(self, batch: Batch) -> Callable[[], Float32Array]:
        return partial(self.score, batch)


def fails(_: Batch) -> Float32Array:
    raise BackendRecoverable("a kernel failed")


def has_a_bug(_: Batch) -> Float32Array:
    raise KeyError("no such binding")


def out_of_memory(_: Batch) -> Float32Array:
    raise MemoryError("no room for the batch")


def gives_nan(batch: Batch) -> Float32Array:
    return np.full((*batch.cand_ids.shape[:2], 2), np.nan, np.float32)


def lacks_device_memory(_: Batch) -> Float32Array:
    raise cuda.fault_of(2, "device memory")


def is_poisoned(_: Batch) -> Float32Array:
    raise cuda.fault_of(700, "synchronize")


FAULTS = {
    "fails": fails,
    "has a bug": has_a_bug,
    "runs out of memory": out_of_memory,
    "runs out of device memory": lacks_device_memory,
    "gives NaN": gives_nan,
    "is poisoned": is_poisoned,
}


both_kinds = pytest.mark.parametrize(
    "rig", [FaultyOnnx, FaultyOverlapping], indirect=True, ids=["one at a time", "overlapping"]
)


class Rig:
    """Two rungs on the shop bundle, and a ranker before them."""

    def __init__(self, store: SignalStore, first: type[FaultyOnnx]) -> None:
        self.bundle = Bundle.open(next(STORE.iterdir()))
        manifest = self.bundle.manifest
        self.space = RowSpace(manifest.input)
        self.table = ItemTable.from_bytes(self.bundle.read(manifest.item_table), self.space)
        graph = self.bundle.read(manifest.graphs["fp32"])
        self.first = first(OnnxCpu(graph, precision="fp32"), "tensorrt")
        self.second = FaultyOnnx(OnnxCpu(graph, precision="fp32"), "onnx-cpu")
        self.reference = OnnxCpu(graph, precision="fp32")
        self.version = LoadedVersion(
            manifest=manifest,
            space=self.space,
            table=self.table,
            executor=Executor([self.first, self.second], name="chaos"),
            max_queue_s=TIMEOUT_S,
            stall_s=1.0,  # a busy machine is not a hanging engine
            report=lambda _: None,
        )
        versions = Versions()
        versions.primary = self.version
        self.ranker = Ranker(
            versions=versions,
            signals=store,
            admission=Admission(max_in_flight=CALLERS),
            max_items=100,
            signals_budget_s=1.0,
        )

    def slate(self, caller: int) -> list[str]:
        """Items that no other caller asks for in this order."""
        rng = np.random.default_rng(caller)
        return [f"sku-{at:05d}" for at in rng.choice(2_000, SLATE, replace=False)]

    async def ask(self, caller: int) -> tuple[Ranking, float]:
        """One caller's answer, and the seconds that it took."""
        query = Query(items=list(self.slate(caller)), user_id=f"user-{caller}", ts=NOW_MS)
        started = time.monotonic()
        ranking = await self.ranker.rank(query, Deadline(TIMEOUT_S, received_s=started))
        return ranking, time.monotonic() - started

    async def ask_all(self) -> list[Ranking]:
        """Everybody's answer, each in its deadline and given once."""
        faults: list[dict[str, object]] = []
        # a future that is answered twice raises in a callback, which only the loop hears of
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
        answers = await asyncio.gather(*[self.ask(caller) for caller in range(CALLERS)])
        assert faults == []
        assert max(seconds for _, seconds in answers) < TIMEOUT_S
        return [ranking for ranking, _ in answers]

    def scores_alone(self, caller: int) -> dict[str, float]:
        """What the engine says of a caller's slate when nobody shares the batch."""
        ids = self.slate(caller)
        person = Person((), context=EMPTY_CONTEXT, now_ms=NOW_MS)
        batch, _ = encode_batch(
            [person], [Slate(ids, None, "", NOW_MS)], table=self.table, space=self.space
        )
        scores = blend(self.reference.score(batch), self.bundle.manifest.output).ravel()
        return dict(zip(ids, scores[:SLATE].tolist(), strict=True))

    def check_scored(self, answers: list[Ranking], *, backend: BackendName) -> None:
        """Each caller has the scores of its own slate, best first."""
        for caller, ranking in enumerate(answers):
            assert ranking.backend == backend
            given = dict(zip(ranking.ids, ranking.scores, strict=True))
            assert given == pytest.approx(self.scores_alone(caller), abs=1e-5)
            assert ranking.scores == sorted(ranking.scores, reverse=True)

    def check_prior(self, answers: list[Ranking]) -> None:
        """Each caller has its own items in the order given, and the reason."""
        for caller, ranking in enumerate(answers):
            assert ranking.ids == self.slate(caller)
            assert ranking.degraded[-1] == "fallback_backend"

    def state(self, kind: BackendKind) -> str:
        reports = self.version.batcher.ladder.reports()
        return next(report.state for report in reports if report.kind == kind)

    def notice_hanging_soon(self) -> None:
        """Two rungs, of which the last one has 20 times as long, must fit the deadline."""
        self.version.batcher._stall_s = 0.05

    async def becomes_well(self, kind: BackendKind) -> None:
        """Ask now and then until the rung's breaker has closed."""
        for _ in range(100):
            await self.ask(0)
            if self.state(kind) == "closed":
                return
            await asyncio.sleep(0.1)
        pytest.fail(f"{kind} is still {self.state(kind)}")


@pytest.fixture
def rig(store: SignalStore, request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig(store, getattr(request, "param", FaultyOnnx))
    yield rig
    rig.first.freed.set()
    rig.second.freed.set()
    rig.version.executor.close()


async def test_all_is_well_without_a_fault(rig: Rig) -> None:
    answers = await rig.ask_all()
    rig.check_scored(answers, backend="tensorrt")
    assert {reason for ranking in answers for reason in ranking.degraded} == set()


@both_kinds
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_first_rung_that(rig: Rig, fault: str) -> None:
    rig.first.fault = FAULTS[fault]
    rig.second.name = "onnxruntime"
    answers = await rig.ask_all()
    rig.check_scored(answers, backend="onnxruntime")
    assert all(ranking.degraded == ["fallback_backend"] for ranking in answers)
    for caller in range(5):
        await rig.ask(caller)
    rig.first.fault = None
    if fault == "is poisoned":
        assert rig.first.runs == 1
        assert rig.state("tensorrt") == "lost"
        assert rig.version.batcher.ladder.lost_s() is not None
    else:
        assert rig.state("tensorrt") == "open"
        await rig.becomes_well("tensorrt")
        rig.check_scored(await rig.ask_all(), backend="tensorrt")


@both_kinds
async def test_a_first_rung_that_hangs(rig: Rig) -> None:
    rig.notice_hanging_soon()
    rig.first.fault = rig.first.hang
    rig.second.name = "onnxruntime"
    rig.check_scored(await rig.ask_all(), backend="onnxruntime")
    assert rig.state("tensorrt") == "stuck"
    rig.check_scored(await rig.ask_all(), backend="onnxruntime")
    assert rig.first.runs <= 2, "a hanging rung gets no more batches"
    rig.first.fault = None
    rig.first.freed.set()
    await rig.becomes_well("tensorrt")


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_second_rung_is_not_missed_if_it(rig: Rig, fault: str) -> None:
    rig.second.fault = FAULTS[fault]
    rig.check_scored(await rig.ask_all(), backend="tensorrt")


async def test_a_second_rung_is_not_missed_if_it_hangs(rig: Rig) -> None:
    rig.second.fault = rig.second.hang
    rig.check_scored(await rig.ask_all(), backend="tensorrt")


@both_kinds
async def test_each_rung_in_its_turn_while_callers_keep_asking(rig: Rig) -> None:
    rig.second.name = "onnxruntime"
    for fault in (fails, gives_nan, lacks_device_memory):
        rig.first.fault, rig.second.fault = fault, None
        answers = await rig.ask_all()
        rig.check_scored(answers, backend="onnxruntime")
        assert all(ranking.degraded == ["fallback_backend"] for ranking in answers)
        rig.first.fault = None
        await rig.becomes_well("tensorrt")
        rig.second.fault = fault
        answers = await rig.ask_all()
        rig.check_scored(answers, backend="tensorrt")
        assert not any(ranking.degraded for ranking in answers)


@pytest.mark.parametrize("fault", FAULTS)
async def test_two_rungs_of_which_each(rig: Rig, fault: str) -> None:
    rig.first.fault = rig.second.fault = FAULTS[fault]
    rig.check_prior(await rig.ask_all())
    rig.check_prior(await rig.ask_all())
    rig.first.fault = rig.second.fault = None
    if fault == "is poisoned":
        assert {rig.state("tensorrt"), rig.state("onnx-cpu")} == {"lost"}
    else:
        await rig.becomes_well("tensorrt")


@both_kinds
async def test_two_rungs_of_which_each_hangs(rig: Rig) -> None:
    rig.notice_hanging_soon()
    rig.first.fault, rig.second.fault = rig.first.hang, rig.second.hang
    rig.check_prior(await rig.ask_all())
    assert {rig.state("tensorrt"), rig.state("onnx-cpu")} == {"stuck"}


async def test_a_lost_device_fails_liveness_after_its_grace(rig: Rig) -> None:
    given = {"redis_url": SecretStr("redis://127.0.0.1:1/0"), "lost_grace_ms": 3_000}
    service = Service(Settings.model_validate(given))
    service.versions.primary = rig.version
    rig.first.fault = is_poisoned
    transport = httpx.ASGITransport(app=service)
    async with httpx.AsyncClient(transport=transport, base_url="http://ranker") as client:
        assert (await client.get("/livez")).status_code == 200
        await rig.ask(1)
        assert rig.state("tensorrt") == "lost"
        assert (await client.get("/livez")).status_code == 200
        async with asyncio.timeout(30):
            while (answer := await client.get("/livez")).status_code == 200:
                await asyncio.sleep(0.1)
        assert answer.status_code == 503
        assert "lost" in answer.json()["reason"]
        ranking, _ = await rig.ask(2)
        assert ranking.degraded == ["fallback_backend"]
