"""For each kind of fault, the span and the metric by which an engineer sees it."""

from __future__ import annotations

import asyncio
import gc
import shutil
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pydantic import SecretStr

from service.app import Service
from service.domain import BackendKind, BackendName, Float32Array
from service.encoding.batch import Batch
from service.errors import BackendLost, BackendRecoverable
from service.inference.backends.base import Backend
from service.settings import Settings
from service.telemetry.spans import SpanWriter
from tests.chaos.fault_proxy import FaultProxy
from tests.live import ROOT

STORE = ROOT / "models" / "store"
ITEMS = [f"sku-{at:05d}" for at in range(20)]


class Broken:
    """The real engine, but for what `before` does first."""

    def __init__(self, engine: Backend, before: Callable[[], None], *, kind: BackendKind) -> None:
        self._engine = engine
        self.kind: BackendKind = kind
        self._before = before
        self.name: BackendName = engine.name
        self.precision = engine.precision

    def score(self, batch: Batch) -> Float32Array:
        self._before()
        return self._engine.score(batch)

    def close(self) -> None:
        self._engine.close()


class Observed:
    """A service in this process whose spans stay in memory."""

    def __init__(self, redis_url: str, **settings: Any) -> None:
        wide: dict[str, Any] = {"timeout_ms": 10_000, "signals_budget_ms": 2_000, "slow_ms": 60}
        wide["backend"] = "onnx-cpu"  # whatever the host would take
        self.service = Service(Settings(redis_url=SecretStr(redis_url), **{**wide, **settings}))
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.service.telemetry._spans = SpanWriter(provider.get_tracer("test"), sample=0.0)
        transport = httpx.ASGITransport(self.service)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://x")

    async def load(self) -> None:
        self.service.replica.start()
        await self.service.loaded.wait()

    def break_engine(self, before: Callable[[], None], *, keep_behind: bool = False) -> None:
        primary = self.service.versions.primary
        assert primary is not None
        rung = primary.executor.rungs[-1]
        if keep_behind:
            primary.add_rung(Broken(rung.backend, before, kind="onnx-cuda"))
        else:
            rung.backend = Broken(rung.backend, before, kind=rung.backend.kind)

    async def rank(self) -> dict[str, Any]:
        answer = await self.client.post("/rank", json={"user_id": "u1", "items": ITEMS})
        assert answer.status_code == 200, answer.text
        ranking: dict[str, Any] = answer.json()
        return ranking

    def spans(self, name: str) -> list[ReadableSpan]:
        self.service.telemetry.flush()
        return [span for span in self._exporter.get_finished_spans() if span.name == name]

    def attributes(self, name: str) -> dict[str, Any]:
        span = self.spans(name)[-1]
        return dict(span.attributes or {})

    def value(self, name: str, **labels: str) -> float:
        return self.service.metrics.registry.get_sample_value(name, labels) or 0.0

    def rungs(self, what: str, **labels: str) -> dict[str, float]:
        """By rung, a metric of the version that serves."""
        primary = self.service.versions.primary
        assert primary is not None
        return {
            report.kind: self.value(
                f"ranker_rung_{what}", model_version=primary.version, rung=report.kind, **labels
            )
            for report in primary.batcher.ladder.reports()
        }

    async def close(self) -> None:
        await self.client.aclose()
        await self.service.replica.close()
        await self.service.signals.close()


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


@pytest.fixture
async def proxy(valkey_url: str) -> AsyncIterator[FaultProxy]:
    async with FaultProxy(valkey_url) as proxy:
        yield proxy


@pytest.fixture
async def observed(valkey_url: str) -> AsyncIterator[Observed]:
    observed = Observed(valkey_url)
    await observed.load()
    await observed.rank()
    yield observed
    await observed.close()


async def test_slow_redis_is_a_long_signals_span_and_late_reads(proxy: FaultProxy) -> None:
    observed = Observed(f"redis://127.0.0.1:{proxy.port}/0", signals_budget_ms=30)
    await observed.load()
    proxy.delay_s = 0.3
    ranking = await observed.rank()
    assert ranking["degraded"] == ["signals_unavailable"]
    assert seconds(observed.spans("signals")[-1]) >= 0.03
    assert observed.attributes("POST /rank")["signals.source"] == "none"
    assert observed.value("ranker_signal_reads_total", kind="late") == 1
    assert observed.value("ranker_degraded_total", reason="signals_unavailable") == 1
    assert observed.value("ranker_signals_total", source="none") == 1
    await observed.close()


async def test_redis_away_opens_the_breaker(proxy: FaultProxy) -> None:
    observed = Observed(f"redis://127.0.0.1:{proxy.port}/0")
    await observed.load()
    proxy.refuse()
    for _ in range(6):
        await observed.rank()
    assert observed.value("ranker_breaker_state", breaker="signals", state="open") == 1
    assert observed.value("ranker_breaker_opened_total", breaker="signals") == 1
    await observed.close()


async def test_a_slow_engine_is_a_long_inference_span(observed: Observed) -> None:
    observed.break_engine(lambda: time.sleep(0.08))
    ranking = await observed.rank()
    assert ranking["degraded"] == []
    assert observed.attributes("POST /rank")["kept.because"] == "slow"
    stages = {name: observed.spans(name)[-1] for name in ("signals", "queue", "inference", "merge")}
    assert max(stages, key=lambda name: seconds(stages[name])) == "inference"
    assert seconds(stages["inference"]) >= 0.08
    labels = {"stage": "inference", "framework": "ONNXRuntime"}
    assert observed.value("ranker_stage_seconds_sum", **labels) >= 0.08


async def test_a_fallback_is_a_reason_on_every_span(observed: Observed) -> None:
    def fail() -> None:
        raise BackendRecoverable("the device is out of memory")

    observed.break_engine(fail, keep_behind=True)
    ranking = await observed.rank()
    assert "fallback_backend" in ranking["degraded"]
    for name in ("POST /rank", "signals", "queue", "inference", "merge", "batch"):
        assert observed.attributes(name)["fallback.reason"] == "fallback_backend"
    assert observed.value("ranker_degraded_total", reason="fallback_backend") == 1


async def test_a_rung_that_goes_out_and_comes_back_is_two_changes(
    observed: Observed, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "ranker.changes")
    well = threading.Event()

    def fail() -> None:
        if not well.is_set():
            raise BackendRecoverable("the device is out of memory")

    observed.break_engine(fail, keep_behind=True)
    for _ in range(4):
        await observed.rank()
    (out,) = observed.spans("fallback")
    assert out.status.is_ok or out.status.is_unset
    told = dict(out.attributes or {})
    assert told["rung"] == "onnx-cuda"
    assert told["fallback.reason"] == "onnx-cuda: the device is out of memory"
    assert told["framework"] == "ONNXRuntime"
    assert observed.rungs("state", state="open") == {"onnx-cuda": 1, "onnx-cpu": 0}
    assert observed.rungs("serves") == {"onnx-cuda": 0, "onnx-cpu": 1}
    assert observed.rungs("opened_total") == {"onnx-cuda": 1, "onnx-cpu": 0}
    fallback = {"kind": "fallback", "result": "done"}
    assert observed.value("ranker_change_seconds_count", **fallback) == 1

    well.set()
    until_s = time.monotonic() + 10
    while observed.rungs("state", state="closed")["onnx-cuda"] != 1:
        assert time.monotonic() < until_s
        await asyncio.sleep(0.05)
        await observed.rank()
    joined, back = observed.spans("backend")
    assert (joined.attributes or {})["reason"] == "onnx-cuda: joined"
    assert (back.attributes or {})["reason"] == "onnx-cuda: is back"
    assert seconds(back) >= 1, "it tells how long the rung was out"
    assert observed.rungs("serves") == {"onnx-cuda": 1, "onnx-cpu": 0}
    lines = [vars(record) for record in caplog.records if record.name == "ranker.changes"]
    assert [(line["msg"], line["levelname"]) for line in lines[-2:]] == [
        ("fallback", "WARNING"),
        ("backend", "INFO"),
    ]
    assert out.context is not None
    assert lines[-2]["trace_id"] == f"{out.context.trace_id:032x}"
    assert lines[-2]["backend"] == "onnxruntime"


async def test_a_lost_device_with_nothing_behind_it_is_a_failed_change(observed: Observed) -> None:
    def fail() -> None:
        raise BackendLost("CUDA error 700")

    observed.break_engine(fail)
    await observed.rank()
    (span,) = observed.spans("fallback")
    assert not span.status.is_ok
    assert (span.attributes or {})["framework"] == "none"
    assert observed.rungs("state", state="lost") == {"onnx-cpu": 1}
    assert observed.rungs("serves") == {"onnx-cpu": 0}
    refused = {"kind": "fallback", "result": "refused"}
    assert observed.value("ranker_change_seconds_count", **refused) == 1


async def test_no_engine_at_all_is_a_failed_batch(observed: Observed) -> None:
    def fail() -> None:
        raise BackendRecoverable("broken")

    observed.break_engine(fail)
    ranking = await observed.rank()
    assert ranking["model"]["backend"] == "prior"
    await asyncio.sleep(0)
    assert observed.value("ranker_batch_failures_total") == 1
    assert observed.attributes("POST /rank")["framework"] == "none"


async def test_overload_shows_in_the_queue_and_in_the_reason(observed: Observed) -> None:
    entered, release = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        assert release.wait(10)

    observed.break_engine(hold)
    version = (await observed.client.get("/readyz")).json()["version"]
    running = asyncio.create_task(observed.rank())
    assert await asyncio.to_thread(entered.wait, 10)
    queued = asyncio.create_task(observed.rank())
    until_s = time.monotonic() + 5
    while not observed.value("ranker_queue_tiles", model_version=version):
        assert time.monotonic() < until_s
        await asyncio.sleep(0.002)
    await asyncio.sleep(0.1)  # past what the batch was predicted to take
    assert observed.value("ranker_queue_predicted_seconds", model_version=version) > 0.05
    refused = await observed.rank()
    release.set()
    await asyncio.gather(running, queued)
    assert refused["degraded"] == ["overload"]
    assert observed.value("ranker_degraded_total", reason="overload") == 1
    (root,) = [
        span
        for span in observed.spans("POST /rank")
        if (span.attributes or {}).get("fallback.reason") == "overload"
    ]
    assert (root.attributes or {})["request.id"] == refused["request_id"]


async def test_a_bad_swap_is_a_failed_span_that_says_why(valkey_url: str, tmp_path: Path) -> None:
    shutil.copytree(STORE, tmp_path / "store")
    (graph,) = (tmp_path / "store").glob("shop/*/rank.onnx")
    graph.write_bytes(graph.read_bytes()[:-1] + b"!")
    observed = Observed(valkey_url, store=str(tmp_path / "store"))
    await observed.load()
    (span,) = observed.spans("swap")
    assert not span.status.is_ok
    assert "rank.onnx does not have the digest" in observed.attributes("swap")["reason"]
    labels = {"kind": "swap", "result": "refused"}
    assert observed.value("ranker_change_seconds_count", **labels) == 1
    assert observed.value("ranker_ready") == 0
    await observed.close()


async def test_a_stalled_loop_and_a_collection_are_measured(observed: Observed) -> None:
    async with observed.service.instruments.running():
        await asyncio.sleep(0.01)
        gc.collect()
        time.sleep(0.3)  # the fault: a blocked loop
        await asyncio.sleep(0.01)
    lag_s = observed.value("ranker_loop_lag_seconds_sum")
    assert lag_s > 0.15
    assert observed.value("ranker_gc_pause_seconds_count", generation="2") >= 1
