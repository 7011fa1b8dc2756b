"""The one place that is told of finished requests, batches and changes.

One decision a request serves its spans, its exemplar and its log line, so all three tell
the same story under the same ids. Called after the reply, never before.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

from service.domain import Change, ChangeKind
from service.inference.batcher import BatchReport
from service.ranking.query import Report
from service.telemetry.context import log_ids, parent_of
from service.telemetry.distributions import Distributions
from service.telemetry.drift import Drift, references
from service.telemetry.live import LiveValues, Reading, Samples
from service.telemetry.log import request_line
from service.telemetry.metrics import Metrics
from service.telemetry.notable import Allowance, notable
from service.telemetry.spans import SpanWriter

_log = logging.getLogger("ranker.requests")
_changes = logging.getLogger("ranker.changes")
_UNWANTED: frozenset[ChangeKind] = frozenset({"fallback", "rollback"})
_VERSIONS = 4
"""Versions whose drift is kept."""


class Telemetry:
    """Metrics always; spans and distributions if given; one log line a notable request."""

    def __init__(
        self,
        *,
        spans: SpanWriter | None,
        distributions: Distributions | None = None,
        slow_s: float,
        notable_rps: float,
        access_log: bool,
        tags: Mapping[str, str],
    ) -> None:
        """`tags`: what every line of a request carries beside its own fields."""
        self.metrics = Metrics()
        self._spans = spans
        self._distributions = distributions
        self._slow_s = slow_s
        self._allowance = Allowance(notable_rps)
        self._access_log = access_log
        self._tags = dict(tags)
        self._drifts: dict[str, dict[str, Drift]] = {}
        gauge = "Population stability index of live values against the training reference"
        self.metrics.registry.register(
            LiveValues(
                [Reading("gauge", "ranker_psi", gauge, ("value", "model_version"), self._read_psi)]
            )
        )

    def record(self, report: Report) -> None:
        """Take one finished request."""
        why = notable(report, slow_s=self._slow_s)
        if why is not None and not self._allowance.take():
            why = None
        context = self._spans.record(report, why) if self._spans is not None else None
        ids = log_ids(context) if context is not None else {}
        self.metrics.record(report, {"trace_id": ids["trace_id"]} if ids else None)
        if self._distributions is not None:
            self._distributions.record(report)
        drifts = self._drifts.get(report.model_version)
        if drifts and report.times.signals_at_s:
            _observe(drifts, report)
        if why is not None or self._access_log:
            self._write_line(report, why or "access", ids)

    def batches_of(self, version: str, metrics: dict[str, Any]) -> Callable[[BatchReport], None]:
        """What takes the batches of one version; `metrics` is its manifest's."""
        drifts = {name: Drift(reference) for name, reference in references(metrics).items()}
        self._drifts[version] = drifts
        while len(self._drifts) > _VERSIONS:
            del self._drifts[next(iter(self._drifts))]
        scores = drifts.get("score")

        def record_batch(report: BatchReport) -> None:
            self.metrics.record_batch(report)
            if self._distributions is not None:
                self._distributions.record_batch(report)
            if scores is not None and report.scores is not None:
                scores.observe(report.scores)

        return record_batch

    def record_change(self, change: Change) -> None:
        """Take one change of what serves; always traced, counted and logged."""
        self.metrics.record_change(change)
        context = self._spans.record_change(change) if self._spans is not None else None
        fields: dict[str, Any] = {
            "model.name": change.model_name,
            "model.version": change.model_version,
            "role": change.role,
            "rung": change.rung,
            "backend": change.backend,
            "done": change.done,
            "reason": change.reason,
            "took_ms": round((change.ended_s - change.started_s) * 1e3, 1),
        }
        ids = log_ids(context) if context is not None else {}
        level = logging.WARNING if change.kind in _UNWANTED else logging.INFO
        if not change.done:
            level = logging.ERROR
        _changes.log(level, change.kind, extra=fields | self._tags | ids)

    def flush(self) -> None:
        """Write what still waits; the last call."""
        if self._spans is not None:
            self._spans.flush()
        if self._distributions is not None:
            self._distributions.flush()

    def _write_line(self, report: Report, why: str, ids: dict[str, str]) -> None:
        if not ids and (parent := parent_of(report.headers)) is not None:
            ids = log_ids(parent)
        fields = request_line(report)
        if why != "access" and (unlogged := self._allowance.refused()):
            fields["unlogged"] = unlogged
        level = logging.WARNING if why in {"failed", "degraded"} else logging.INFO
        _log.log(level, why, extra=fields | self._tags | ids)

    def _read_psi(self) -> Samples:
        found = {
            (name, version): drift.psi()
            for version, drifts in list(self._drifts.items())  # a load adds one from its thread
            for name, drift in drifts.items()
        }
        return {labels: psi for labels, psi in found.items() if not math.isnan(psi)}


def _observe(drifts: dict[str, Drift], report: Report) -> None:
    for name, value in (("history", report.signal_count), ("slate", report.candidates)):
        if (drift := drifts.get(name)) is not None:
            drift.observe_one(value)
