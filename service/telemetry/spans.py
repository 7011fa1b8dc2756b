"""Spans of requests, batches and changes, against the OpenTelemetry API alone.

Written after the reply, with the times that the report carries. Knows no provider.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping

from opentelemetry.context import Context
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    StatusCode,
    Tracer,
    set_span_in_context,
)

from service.domain import BackendName, Change
from service.inference.batcher import BatchReport
from service.ranking.query import Report
from service.telemetry.context import parent_of
from service.telemetry.notable import Notable

Attributes = dict[str, str | int | float | bool]

FRAMEWORK: Mapping[BackendName | None, str] = {
    "tensorrt": "TensorRT",
    "onnxruntime": "ONNXRuntime",
    "openvino": "OpenVINO",
    "prior": "none",
    None: "none",
}
_FALLBACKS = ("fallback_backend", "deadline", "overload", "warming")
_BATCH_WAIT_S = 0.25
"""From the first traced request of a batch to the batch's span, which links to all of them."""


def fallback_reason(report: Report) -> str:
    """Why the first choice of engine did not answer, or "none"."""
    return next((reason for reason in _FALLBACKS if reason in report.degraded), "none")


class SpanWriter:
    """Decides what is sampled, and writes the spans of finished work."""

    def __init__(self, tracer: Tracer, *, sample: float) -> None:
        self._tracer = tracer
        self._sample = sample
        self._batches: dict[BatchReport, list[tuple[SpanContext, Report]]] = {}

    def record(self, report: Report, why: Notable | None) -> SpanContext | None:
        """Write a request's spans if it is notable or sampled, and say under which ids."""
        parent = parent_of(report.headers)
        sampled = parent.trace_flags.sampled if parent else random.random() < self._sample  # noqa: S311  no secret
        if not (why or sampled):
            return None
        common = _attributes_of(report)
        ends_s = report.started_s + report.times.total_s
        root = self._start(
            f"POST {report.route}",
            report.started_s,
            common
            | {
                "operation.name": "ranker.request",
                "resource.name": f"POST {report.route}",
                "span.type": "web",
                "http.request.method": "POST",
                "http.route": report.route,
                "http.response.status_code": report.status,
                "request.id": report.request_id,
                "outcome": report.outcome,
                "degraded": ",".join(report.degraded),
                "candidates": report.candidates,
                "signals.count": report.signal_count,
                "signals.source": report.signal_source,
                "kept.because": why or "sampled",
                "manual.keep": "true",
            },
            within=set_span_in_context(NonRecordingSpan(parent), Context()) if parent else None,
            kind=SpanKind.SERVER,
        )
        if why == "failed":
            root.set_status(StatusCode.ERROR, report.detail or report.outcome)
        within = set_span_in_context(root, Context())
        for stage, began_s, ended_s in stages(report):
            name: Attributes = {
                "operation.name": f"ranker.{stage}",
                "resource.name": f"POST {report.route}",
            }
            self._start(stage, began_s, common | name, within=within).end(_epoch_ns(ended_s))
        context = root.get_span_context()
        root.end(_epoch_ns(ends_s))
        if report.batch is not None:
            self._link(report.batch, context, report)
        return context

    def record_change(self, change: Change) -> SpanContext:
        """Write a change of what serves as a trace of its own."""
        span = self._start(
            change.kind,
            change.started_s,
            {
                "operation.name": f"ranker.{change.kind}",
                "resource.name": f"{change.kind} {change.model_name}",
                "framework": FRAMEWORK[change.backend],
                "model.name": change.model_name,
                "model.version": change.model_version,
                "model.precision": change.precision,
                "fallback.reason": change.reason if change.kind == "fallback" else "none",
                "batch.size": 0,
                "queue.wait_ms": 0.0,
                "role": change.role,
                "rung": change.rung or "none",
                "reason": change.reason,
                "manual.keep": "true",
            },
        )
        if not change.done:
            span.set_status(StatusCode.ERROR, change.reason)
        context = span.get_span_context()
        span.end(_epoch_ns(change.ended_s))
        return context

    def flush(self) -> None:
        """Write the spans of the batches that still wait for requests."""
        for batch in list(self._batches):
            self._write_batch(batch)

    def _link(self, batch: BatchReport, context: SpanContext, report: Report) -> None:
        waiting = self._batches.get(batch)
        if waiting is not None:
            waiting.append((context, report))
            return
        self._batches[batch] = [(context, report)]
        asyncio.get_running_loop().call_later(_BATCH_WAIT_S, self._write_batch, batch)

    def _write_batch(self, batch: BatchReport) -> None:
        requests = self._batches.pop(batch, None)
        if not requests:
            return
        _, first = requests[0]
        ages = [report.signal_age_ms for _, report in requests if report.signal_age_ms is not None]
        attributes = _attributes_of(first) | {
            "operation.name": "ranker.batch",
            "resource.name": f"batch {first.model_name}",
            "batch.tiles": batch.tiles,
            "batch.padding": round(1 - batch.candidates / batch.slots, 4),
            "queue.wait_ms": max(_ms(report.times.queue_s) for _, report in requests),
            "manual.keep": "true",
        }
        if ages:
            attributes["signals.age_ms"] = max(ages)
        links = [Link(context) for context, _ in requests]
        span = self._start("batch", batch.started_s, attributes, links=links)
        span.end(_epoch_ns(batch.started_s + batch.seconds))

    def _start(
        self,
        name: str,
        began_s: float,
        attributes: Attributes,
        *,
        within: Context | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        links: list[Link] | None = None,
    ) -> Span:
        return self._tracer.start_span(
            name,
            # an empty context: whatever span is current is not the parent
            context=Context() if within is None else within,
            kind=kind,
            attributes=attributes,
            links=links,
            start_time=_epoch_ns(began_s),
        )


def stages(report: Report) -> list[tuple[str, float, float]]:
    """(name, start, end) of the stages that a request reached, on the monotonic clock.

    A request that never came out of the queue has a queue stage up to its end.
    """
    times = report.times
    if not times.signals_at_s:
        return []
    ends_s = report.started_s + times.total_s
    queued_s = times.signals_at_s + times.signals_s
    found = [("signals", times.signals_at_s, queued_s)]
    if not times.inference_s:
        return [*found, ("queue", queued_s, ends_s)]
    began_s = queued_s + times.queue_s
    done_s = began_s + times.inference_s
    return [
        *found,
        ("queue", queued_s, began_s),
        ("inference", began_s, done_s),
        ("merge", done_s, max(done_s, ends_s)),
    ]


def _attributes_of(report: Report) -> Attributes:
    attributes: Attributes = {
        "framework": FRAMEWORK[report.backend],
        "model.name": report.model_name,
        "model.version": report.model_version,
        "model.precision": report.precision,
        "fallback.reason": fallback_reason(report),
        "batch.size": report.batch.requests if report.batch else 0,
        "queue.wait_ms": _ms(report.times.queue_s),
    }
    if report.signal_age_ms is not None:
        attributes["signals.age_ms"] = report.signal_age_ms
    return attributes


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def _epoch_ns(monotonic_s: float) -> int:
    return time.time_ns() - time.monotonic_ns() + int(monotonic_s * 1e9)
