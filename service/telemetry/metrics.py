"""Prometheus metrics. Children are made once and kept; no user or item is ever a label."""

from __future__ import annotations

from functools import cache

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from service.inference.batcher import BatchReport
from service.ranking.query import Report

_SECONDS = (
    *(0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03),
    *(0.05, 0.075, 0.1, 0.2, 0.5, 1.0),
)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """What one process counts, in its own registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "ranker_requests",
            "Finished requests",
            ["route", "outcome", "model_version"],
            registry=self.registry,
        )
        self._degraded = Counter(
            "ranker_degraded", "Degraded answers", ["reason"], registry=self.registry
        )
        self._seconds = Histogram(
            "ranker_stage_seconds",
            "Time of each stage of a request",
            ["stage"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._batch_users = Histogram(
            "ranker_batch_users", "Requests in a batch", buckets=_ROWS, registry=self.registry
        )
        self._batch_tiles = Histogram(
            "ranker_batch_tiles", "Tiles in a batch", buckets=_ROWS, registry=self.registry
        )
        self._batch_seconds = Histogram(
            "ranker_batch_seconds", "Engine time", buckets=_SECONDS, registry=self.registry
        )
        self._batch_failures = Counter(
            "ranker_batch_failures", "Batches that no engine scored", registry=self.registry
        )
        self.events = Counter(
            "ranker_events", "Events by what became of them", ["result"], registry=self.registry
        )
        self.ready = Gauge("ranker_ready", "1 if a version is warm", registry=self.registry)
        stages = ("total", "signals", "queue", "inference")
        self._stage = {stage: self._seconds.labels(stage) for stage in stages}
        self._request = cache(self._requests.labels)
        self._reason = cache(self._degraded.labels)

    def record(self, report: Report) -> None:
        """Count one finished request."""
        self._request(report.route, report.outcome, report.model_version).inc()
        for reason in report.degraded:
            self._reason(reason).inc()
        times, stage = report.times, self._stage
        stage["total"].observe(times.total_s)
        if times.inference_s:
            stage["signals"].observe(times.signals_s)
            stage["queue"].observe(times.queue_s)
            stage["inference"].observe(times.inference_s)

    def record_batch(self, report: BatchReport) -> None:
        """Count one batch."""
        self._batch_users.observe(report.users)
        self._batch_tiles.observe(report.tiles)
        self._batch_seconds.observe(report.seconds)
        if report.failed:
            self._batch_failures.inc()

    def expose(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)
