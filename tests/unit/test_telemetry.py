"""Decisions and arithmetic of telemetry: what is kept, under which ids, and how far from normal."""

import asyncio
import json
import logging
import math
import re
import time

import numpy as np
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from service.domain import Change, DegradedReason, Outcome, StageTimes
from service.errors import ManifestFault
from service.inference.batcher import BatchReport
from service.ranking.query import Report
from service.telemetry.context import log_ids, parent_of
from service.telemetry.drift import Drift, Reference, references
from service.telemetry.log import JsonLines
from service.telemetry.loop_metrics import LoopHistogram
from service.telemetry.notable import Allowance, notable
from service.telemetry.record import Telemetry
from service.telemetry.spans import SpanWriter

TRACEPARENT = (b"traceparent", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")


def batch_report(requests: int = 1) -> BatchReport:
    return BatchReport(
        requests=requests,
        tiles=2,
        candidates=30,
        slots=40,
        started_s=time.monotonic() - 0.004,
        seconds=0.003,
        backend="onnxruntime",
        precision="fp32",
        scores=np.linspace(0, 1, 30),
    )


def report(
    *,
    outcome: Outcome = "ok",
    degraded: tuple[DegradedReason, ...] = (),
    total_s: float = 0.008,
    headers: tuple[tuple[bytes, bytes], ...] = (),
    batch: BatchReport | None = None,
    inference_s: float = 0.003,
) -> Report:
    started_s = time.monotonic() - total_s
    return Report(
        route="/rank",
        outcome=outcome,
        status=503 if outcome == "overloaded" else 200,
        request_id="r1",
        started_s=started_s,
        headers=headers,
        model_name="shop",
        model_version="v1",
        backend="onnxruntime" if inference_s else "prior",
        precision="fp32",
        degraded=degraded,
        candidates=30,
        signal_source="redis",
        signal_count=12,
        signal_age_ms=820,
        times=StageTimes(
            total_s=total_s,
            signals_s=0.001,
            queue_s=0.002 if inference_s else 0.0,
            inference_s=inference_s,
            signals_at_s=started_s + 0.0005,
        ),
        batch=batch,
    )


class Rig:
    """Telemetry whose spans stay in memory."""

    def __init__(self, *, sample: float = 0.0, notable_rps: float = 100.0) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.telemetry = Telemetry(
            spans=SpanWriter(provider.get_tracer("test"), sample=sample),
            slow_s=0.05,
            notable_rps=notable_rps,
            access_log=False,
            tags={"dd.service": "ranker"},
        )

    def spans(self) -> dict[str, ReadableSpan]:
        self.telemetry.flush()
        return {span.name: span for span in self._exporter.get_finished_spans()}

    def value(self, name: str, **labels: str) -> float:
        return self.telemetry.metrics.registry.get_sample_value(name, labels) or 0.0


@pytest.mark.parametrize(
    ("headers", "ids"),
    [
        ([TRACEPARENT], (0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331, True)),
        ([(b"traceparent", TRACEPARENT[1][:-1] + b"0")], (TRACEPARENT[1][3:35], None, False)),
        (
            [
                (b"x-datadog-trace-id", b"9532127138774266268"),
                (b"x-datadog-parent-id", b"13235353014750950193"),
                (b"x-datadog-sampling-priority", b"2"),
                (b"x-datadog-tags", b"_dd.p.dm=-4,_dd.p.tid=0af7651916cd43dd"),
            ],
            (0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331, True),
        ),
        ([(b"x-datadog-trace-id", b"5"), (b"x-datadog-parent-id", b"6")], (5, 6, True)),
        (
            [
                (b"x-datadog-trace-id", b"5"),
                (b"x-datadog-parent-id", b"6"),
                (b"x-datadog-sampling-priority", b"-1"),
            ],
            (5, 6, False),
        ),
    ],
)
def test_the_callers_span_is_read_from_either_kind_of_header(
    headers: list[tuple[bytes, bytes]], ids: tuple[int | bytes, int | None, bool]
) -> None:
    parent = parent_of([(b"host", b"x"), *headers])
    assert parent is not None
    trace_id = int(ids[0], 16) if isinstance(ids[0], bytes) else ids[0]
    assert parent.trace_id == trace_id
    assert ids[1] is None or parent.span_id == ids[1]
    assert parent.trace_flags.sampled is ids[2]


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"traceparent", b"junk")],
        [(b"traceparent", b"00-" + b"0" * 32 + b"-b7ad6b7169203331-01")],
        [(b"x-datadog-trace-id", b"5")],
        [(b"x-datadog-trace-id", b"x"), (b"x-datadog-parent-id", b"6")],
    ],
)
def test_headers_that_name_no_span_are_ignored(headers: list[tuple[bytes, bytes]]) -> None:
    assert parent_of(headers) is None


def test_logs_carry_the_ids_in_both_forms() -> None:
    parent = parent_of([TRACEPARENT])
    assert parent is not None
    assert log_ids(parent) == {
        "trace_id": "0af7651916cd43dd8448eb211c80319c",
        "span_id": "b7ad6b7169203331",
        "dd.trace_id": "9532127138774266268",
        "dd.span_id": "13235353014750950193",
    }


def test_the_worst_reason_makes_a_request_notable() -> None:
    assert notable(report(), slow_s=0.05) is None
    assert notable(report(total_s=0.06), slow_s=0.05) == "slow"
    assert notable(report(degraded=("deadline",), outcome="degraded"), slow_s=0.05) == "degraded"
    assert notable(report(outcome="overloaded", total_s=0.06), slow_s=0.05) == "failed"
    # new items are every shop's day-to-day business
    unknown = report(degraded=("unknown_items",), outcome="degraded")
    assert notable(unknown, slow_s=0.05) is None


def test_an_allowance_refills_and_counts_whom_it_refused() -> None:
    now_s = 0.0
    allowance = Allowance(2, clock=lambda: now_s)
    assert [allowance.take() for _ in range(4)] == [True, True, False, False]
    assert (allowance.refused(), allowance.refused()) == (2, 0)
    now_s = 0.5
    assert [allowance.take() for _ in range(2)] == [True, False]


async def test_a_traced_request_is_a_tree_with_the_reports_own_times() -> None:
    rig = Rig(sample=1.0)
    made = report(batch=batch_report())
    rig.telemetry.record(made)
    spans = rig.spans()
    assert set(spans) == {"POST /rank", "signals", "queue", "inference", "merge", "batch"}
    root = spans["POST /rank"]
    assert root.start_time is not None
    assert root.end_time is not None
    assert root.context is not None
    assert (root.end_time - root.start_time) / 1e9 == pytest.approx(0.008, abs=2e-4)
    ends_ns = None
    for stage in ("signals", "queue", "inference", "merge"):
        span = spans[stage]
        assert span.parent is not None
        assert span.parent.span_id == root.context.span_id
        assert span.start_time is not None
        if ends_ns is not None:
            assert abs(span.start_time - ends_ns) < 200_000
        ends_ns = span.end_time
    assert ends_ns is not None
    assert abs(ends_ns - root.end_time) < 200_000
    assert [link.context.span_id for link in spans["batch"].links] == [root.context.span_id]
    for span in spans.values():
        assert span.attributes is not None
        assert span.attributes["framework"] == "ONNXRuntime"
        assert span.attributes["queue.wait_ms"] == 2.0
        assert span.attributes["signals.age_ms"] == 820


async def test_the_requests_of_a_batch_share_its_span() -> None:
    rig = Rig(sample=1.0)
    shared = batch_report(requests=3)
    for _ in range(3):
        rig.telemetry.record(report(batch=shared))
    await asyncio.sleep(0)
    assert len(rig.spans()["batch"].links) == 3


async def test_the_caller_decides_what_is_sampled() -> None:
    kept = Rig(sample=0.0)
    kept.telemetry.record(report(headers=(TRACEPARENT,), batch=batch_report()))
    root = kept.spans()["POST /rank"]
    assert root.parent is not None
    assert root.parent.span_id == 0xB7AD6B7169203331
    left = Rig(sample=1.0)
    left.telemetry.record(report(headers=((TRACEPARENT[0], TRACEPARENT[1][:-1] + b"0"),)))
    assert not left.spans()


async def test_a_request_that_stays_in_the_queue_shows_it_to_its_end() -> None:
    rig = Rig()
    rig.telemetry.record(report(outcome="degraded", degraded=("deadline",), inference_s=0.0))
    spans = rig.spans()
    assert set(spans) == {"POST /rank", "signals", "queue"}
    attributes = spans["queue"].attributes
    assert attributes is not None
    assert attributes["fallback.reason"] == "deadline"
    assert attributes["framework"] == "none"
    assert spans["queue"].end_time == pytest.approx(spans["POST /rank"].end_time, abs=200_000)


def test_span_line_and_exemplar_of_a_request_share_their_ids(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = Rig()
    with caplog.at_level(logging.INFO, "ranker"):
        rig.telemetry.record(report(outcome="overloaded"))
        rig.telemetry.record(report())
    (record,) = caplog.records
    line = json.loads(JsonLines().format(record))
    context = rig.spans()["POST /rank"].context
    assert context is not None
    assert line["trace_id"] == f"{context.trace_id:032x}"
    assert line["dd.span_id"] == str(context.span_id)
    assert line["dd.service"] == "ranker"
    text, _ = rig.telemetry.metrics.expose("application/openmetrics-text; version=1.0.0")
    assert f'# {{trace_id="{line["trace_id"]}"}}' in text.decode()


def test_a_storm_of_failures_is_logged_and_traced_at_the_given_rate(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = Rig(notable_rps=1)
    with caplog.at_level(logging.INFO, "ranker"):
        for _ in range(50):
            rig.telemetry.record(report(outcome="failed"))
        time.sleep(1.05)
        rig.telemetry.record(report(outcome="failed"))
    assert len(caplog.records) == 2
    assert caplog.records[1].__dict__["unlogged"] == 49
    labels = {"route": "/rank", "model_version": "v1", "framework": "ONNXRuntime"}
    assert rig.value("ranker_requests_total", outcome="failed", **labels) == 51


def test_a_refused_swap_is_a_span_a_count_and_a_line(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    now_s = time.monotonic()
    with caplog.at_level(logging.INFO, "ranker"):
        rig.telemetry.record_change(
            Change(
                kind="swap",
                model_name="shop",
                model_version="v2",
                done=False,
                started_s=now_s - 2,
                ended_s=now_s,
                reason="golden logits are off by 3",
            )
        )
    span = rig.spans()["swap"]
    assert not span.status.is_ok
    assert span.status.description == "golden logits are off by 3"
    assert caplog.records[0].levelname == "ERROR"
    assert rig.value("ranker_change_seconds_count", kind="swap", result="refused") == 1
    assert rig.value("ranker_change_seconds_sum", kind="swap", result="refused") == pytest.approx(2)


REFERENCE = Reference(edges=(0.25, 0.5, 0.75), shares=(0.25, 0.25, 0.25, 0.25))


def test_psi_is_small_for_the_training_population_and_large_for_another() -> None:
    chance = np.random.default_rng(0)
    same, other = Drift(REFERENCE), Drift(REFERENCE)
    assert math.isnan(same.psi())
    same.observe(chance.random(5_000))
    other.observe(chance.random(5_000) ** 3)
    assert same.psi() < 0.01
    assert other.psi() > 0.25


def test_psi_by_hand() -> None:
    drift = Drift(Reference(edges=(1.0,), shares=(0.5, 0.5)))
    for _ in range(600):
        drift.observe_one(0)
    for _ in range(200):
        drift.observe_one(1)  # an edge belongs to the bin above it
    assert drift.psi() == pytest.approx(0.25 * math.log(1.5) - 0.25 * math.log(0.5))


def test_old_values_leave_the_window() -> None:
    now_s = 0.0
    drift = Drift(REFERENCE, clock=lambda: now_s)
    drift.observe(np.zeros(1_000))
    assert drift.psi() > 1
    now_s = 301.0
    assert drift.psi() > 1
    now_s = 1_000.0
    assert math.isnan(drift.psi())


def test_the_manifest_gives_the_references_and_psi_becomes_a_metric() -> None:
    metrics = {"reference": {"score": {"edges": [0.25, 0.5, 0.75], "shares": [0.25] * 4}}}
    assert references(metrics) == {"score": REFERENCE}
    assert references({}) == {}
    rig = Rig()
    take = rig.telemetry.batches_of("v1", metrics)
    for _ in range(20):
        take(batch_report())
    assert rig.value("ranker_psi", value="score", model_version="v1") < 0.05
    assert rig.value("ranker_batch_candidates_total") == 600
    assert rig.value("ranker_batch_slots_total") == 800


@pytest.mark.parametrize("edges", [(2.0, 1.0), (1.0,)])
def test_a_reference_that_is_no_distribution_is_refused(edges: tuple[float, ...]) -> None:
    bad = {"reference": {"score": {"edges": edges, "shares": [0.5, 0.5, 0.0, 0.0]}}}
    with pytest.raises(ManifestFault, match="ascending edges"):
        references(bad)


def test_the_loops_histogram_reads_as_the_librarys() -> None:
    bounds = (0.001, 0.01, 0.1)
    ours = LoopHistogram("ours_seconds", "Same values", ["stage"], bounds=bounds)
    registry = CollectorRegistry()
    registry.register(ours)
    theirs = Histogram(
        "theirs_seconds", "Same values", ["stage"], buckets=bounds, registry=registry
    )
    for value in (0.0005, 0.001, 0.05, 0.05, 7.0):
        ours.labels("queue").observe(value, {"trace_id": "abc"})
        theirs.labels("queue").observe(value, {"trace_id": "abc"})
    for encode in (generate_latest, openmetrics.generate_latest):
        page = re.sub(r"(# \{.*?\} \S+) \S+", r"\1", encode(registry).decode())
        lines = [line for line in page.splitlines() if "_created" not in line]
        mine = [line.replace("ours", "theirs") for line in lines if "ours_" in line]
        assert len(mine) == 8
        assert mine == [line for line in lines if "theirs_" in line]
