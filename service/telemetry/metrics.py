"""Prometheus metrics. Children are made once and kept; no user or item is ever a label."""

from __future__ import annotations

from functools import cache
from typing import get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
)
from prometheus_client.exposition import choose_encoder

from service.domain import Change, ChangeKind, DegradedReason, SignalSource
from service.inference.batcher import BatchReport
from service.ranking.query import Report
from service.telemetry.loop_metrics import Child, LoopCounter, LoopHistogram
from service.telemetry.spans import FRAMEWORK

# dense around 10, 20 and 50 ms, the usual objectives of ranking
_SECONDS = (
    *(0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03),
    *(0.05, 0.075, 0.1, 0.2, 0.5, 1.0),
)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_AGE_S = (1, 5, 15, 60, 300, 1_800, 3_600, 21_600, 86_400, 604_800)
_CHANGE_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_STAGES = ("total", "signals", "queue", "inference", "merge")


class Metrics:
    """What one process counts, in its own registry."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # half as many series; nothing here reads them
        self.registry = CollectorRegistry()
        self._requests = LoopCounter(
            "ranker_requests",
            "Finished requests",
            ["route", "outcome", "model_version", "framework"],
        )
        self._degraded = LoopCounter("ranker_degraded", "Degraded answers", ["reason"])
        self._seconds = LoopHistogram(
            "ranker_stage_seconds",
            "Time of each stage of a /rank request",
            ["stage", "framework"],
            bounds=_SECONDS,
        )
        self.registry.register(self._seconds)
        self._signals = LoopCounter(
            "ranker_signals",
            "Users by where their signals came from",
            ["source"],
        )
        for counter in (self._requests, self._degraded, self._signals):
            self.registry.register(counter)
        ages = LoopHistogram(
            "ranker_signal_age_seconds", "Age of a user's newest signal", (), bounds=_AGE_S
        )
        self.registry.register(ages)
        self._signal_age = ages.labels()
        self._batch_requests = Histogram(
            "ranker_batch_requests", "Requests in a batch", buckets=_ROWS, registry=self.registry
        )
        self._batch_tiles = Histogram(
            "ranker_batch_tiles", "Tiles in a batch", buckets=_ROWS, registry=self.registry
        )
        self._batch_seconds = Histogram(
            "ranker_batch_seconds",
            "Engine time of a batch; the rate of its sum is the engine's busy share",
            ["framework", "precision"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._candidates = Counter(
            "ranker_batch_candidates", "Candidates scored", registry=self.registry
        )
        self._slots = Counter(
            "ranker_batch_slots",
            "Places for candidates in scored tiles; those without a candidate are padding",
            registry=self.registry,
        )
        self._batch_failures = Counter(
            "ranker_batch_failures", "Batches that an engine failed", registry=self.registry
        )
        self._change_seconds = Histogram(
            "ranker_change_seconds",
            "Time of a swap, rollout, rollback or fallback",
            ["kind", "result"],
            buckets=_CHANGE_S,
            registry=self.registry,
        )
        self.events = Counter(
            "ranker_events", "Events by what became of them", ["result"], registry=self.registry
        )
        self.ready = Gauge("ranker_ready", "1 if a version is warm", registry=self.registry)
        self._engine = cache(self._batch_seconds.labels)
        self._stages = cache(self._stages_of)
        self._start_at_zero()

    def _start_at_zero(self) -> None:
        """Make the children of closed sets: a rate does not see the step from absent to 1."""
        for result in ("accepted", "duplicate", "clamped", "rejected"):
            self.events.labels(result)
        for source in get_args(SignalSource):
            self._signals.labels(source)
        for reason in get_args(DegradedReason):
            self._degraded.labels(reason)
        for kind in get_args(ChangeKind):
            for result in ("done", "refused"):
                self._change_seconds.labels(kind, result)

    def _stages_of(self, framework: str) -> list[Child]:
        return [self._seconds.labels(stage, framework) for stage in _STAGES]

    def record(self, report: Report, exemplar: dict[str, str] | None = None) -> None:
        """Count one finished request; the exemplar leads from its latency to its trace."""
        framework = FRAMEWORK[report.backend]
        request = self._requests.labels(
            report.route, report.outcome, report.model_version, framework
        )
        request.value += 1
        if report.route != "/rank":
            return
        for reason in report.degraded:
            self._degraded.labels(reason).value += 1
        times = report.times
        total, signals, queue, inference, merge = self._stages(framework)
        total.observe(times.total_s, exemplar)
        if times.signals_at_s:
            signals.observe(times.signals_s, exemplar)
            self._signals.labels(report.signal_source).value += 1
        if times.inference_s:
            queue.observe(times.queue_s, exemplar)
            inference.observe(times.inference_s, exemplar)
            scored_s = times.signals_at_s + times.signals_s + times.queue_s + times.inference_s
            merge.observe(max(0.0, report.started_s + times.total_s - scored_s), exemplar)
        if report.signal_age_ms is not None:
            self._signal_age.observe(report.signal_age_ms / 1e3)

    def record_batch(self, report: BatchReport) -> None:
        """Count one batch."""
        self._batch_requests.observe(report.requests)
        self._batch_tiles.observe(report.tiles)
        if report.backend is None:
            self._batch_failures.inc()
            return
        self._engine(FRAMEWORK[report.backend], report.precision).observe(report.seconds)
        self._candidates.inc(report.candidates)
        self._slots.inc(report.slots)

    def record_change(self, change: Change) -> None:
        """Count one change of what serves."""
        result = "done" if change.done else "refused"
        self._change_seconds.labels(change.kind, result).observe(change.ended_s - change.started_s)

    def expose(self, accept: str = "") -> tuple[bytes, str]:
        """What Prometheus scrapes, with its content type; exemplars only in OpenMetrics."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type
