"""The instruments of one process, as the composition root sets them up.

Builds telemetry from the settings, and says which live values of the parts a scrape reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import get_args

from service.bundle import Manifest
from service.domain import Change
from service.inference.lane import LaneReport, LaneState
from service.inference.outages import RungChange
from service.ranking.admission import Admission
from service.replica import Watch
from service.settings import Settings
from service.signals.store import SignalStore
from service.telemetry.distributions import Distributions
from service.telemetry.live import LiveValues, Reading, Samples
from service.telemetry.providers import ProviderFault, Tags, provider
from service.telemetry.record import Telemetry
from service.telemetry.runtime import Gpus, LoopLag, Pauses
from service.telemetry.spans import SpanWriter
from service.versions.follow import Decision
from service.versions.loaded import LoadedVersion
from service.versions.roles import Versions
from service.versions.swaps import SwapReport

_CLOSE_S = 3.0
"""The most that the last spans hold up the end of the process."""
_BREAKER_STATES = ("closed", "half_open", "open")
_RUNG_STATES = get_args(LaneState)


class Instruments:
    """Telemetry, its provider of spans, and the watchers of the interpreter."""

    def __init__(self, settings: Settings, *, version: str) -> None:
        """Raises ProviderFault if the chosen provider is not installed."""
        tags = Tags(settings.service, settings.env, version)
        self._provider = provider(
            settings.tracing, tags=tags, otlp_url=settings.otlp_url, agent_url=settings.agent_url
        )
        spans: SpanWriter | None = None
        if self._provider is not None:
            spans = SpanWriter(self._provider.tracer, sample=settings.trace_sample)
        self._distributions = _distributions(settings.dogstatsd_url, tags)
        self.telemetry = Telemetry(
            spans=spans,
            distributions=self._distributions,
            slow_s=settings.slow_ms / 1e3,
            notable_rps=settings.notable_rps,
            access_log=settings.access_log,
            tags={
                "dd.service": tags.service,
                "dd.env": tags.env,
                "dd.version": tags.version,
            },
        )
        self._versions = Versions()
        registry = self.telemetry.metrics.registry
        self._pauses = Pauses(registry)
        self._lag = LoopLag(registry)
        if (gpus := Gpus.found()) is not None:
            registry.register(gpus)

    def of_versions(self) -> Watch:
        """What the replica tells of its versions goes to telemetry; call `watch` before it runs."""
        return Watch(
            batches_of=lambda manifest: self.telemetry.batches_of(
                manifest.version, manifest.metrics
            ),
            rungs_of=self._rungs_of,
            swapped=self._swapped,
            decided=self._decided,
        )

    def _swapped(self, report: SwapReport) -> None:
        loaded = self._versions.find(report.version)
        engine = loaded.executor.rungs[0].backend if loaded is not None else None
        self.telemetry.record_change(
            Change(
                kind="swap" if report.role == "primary" else "rollout",
                role=report.role,
                model_name=report.model,
                model_version=report.version,
                done=report.outcome == "done",
                started_s=report.started_s,
                ended_s=report.started_s + report.total_s,
                reason=report.reason,
                backend=engine.name if engine is not None else None,
                precision=engine.precision if engine is not None else "",
            )
        )

    def _rungs_of(self, manifest: Manifest) -> Callable[[RungChange], None]:
        def changed(change: RungChange) -> None:
            engine = change.first.rung.backend if change.first is not None else None
            self.telemetry.record_change(
                Change(
                    kind=change.kind,
                    role=self._versions.role_of(manifest.version) or "none",
                    model_name=manifest.name,
                    model_version=manifest.version,
                    done=engine is not None,
                    started_s=change.began_s,
                    ended_s=change.ended_s,
                    reason=f"{change.rung}: {change.reason}",
                    rung=change.rung,
                    backend=engine.name if engine is not None else None,
                    precision=engine.precision if engine is not None else "",
                )
            )

        return changed

    def _decided(self, decision: Decision) -> None:
        now_s = time.monotonic()
        primary = self._versions.primary
        self.telemetry.record_change(
            Change(
                kind="rollback" if decision.fate == "rollback" else "rollout",
                role="canary",
                model_name=primary.name if primary is not None else "",
                model_version=decision.version,
                done=True,
                started_s=now_s,
                ended_s=now_s,
                reason=decision.reason,
            )
        )

    def watch(self, *, versions: Versions, signals: SignalStore, admission: Admission) -> None:
        """Let every scrape read the state of the parts."""
        self._versions = versions
        readings = [
            *_of_versions(versions),
            *_of_rungs(versions),
            *_of_signals(signals),
            *_of_admission(admission),
        ]
        self.telemetry.metrics.registry.register(LiveValues(readings))

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Measure the interpreter for the block, then send what spans are left."""
        self._pauses.start()
        tasks = [asyncio.create_task(self._lag.watch())]
        if self._distributions is not None:
            tasks.append(asyncio.create_task(self._distributions.flush_regularly()))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            self._pauses.stop()
            self.telemetry.flush()
            if self._distributions is not None:
                await asyncio.to_thread(self._distributions.close)
            if self._provider is not None:
                await asyncio.to_thread(_within, _CLOSE_S, self._provider.close)


def _within(seconds: float, close: Callable[[], None]) -> None:
    """Wait so long for what is sent to a collector, which may be away, and no longer."""
    thread = threading.Thread(target=close, name="close-provider", daemon=True)
    thread.start()
    thread.join(seconds)


def _distributions(url: str | None, tags: Tags) -> Distributions | None:
    if url is None:
        return None
    try:
        from service.telemetry.dogstatsd import sender  # noqa: PLC0415  an extra
    except ImportError as error:
        raise ProviderFault(f"DogStatsD needs the extra datadog: {error}") from error
    return Distributions(*sender(url, tags))


def _of_versions(versions: Versions) -> list[Reading]:
    def each(read: Callable[[LoadedVersion], float]) -> Callable[[], Samples]:
        def samples() -> Samples:
            return {(version.version,): read(version) for version in versions.held()}

        return samples

    label = ("model_version",)
    return [
        Reading(
            "gauge",
            "ranker_queue_tiles",
            "Tiles that wait for the engine",
            label,
            each(lambda version: version.batcher.queued_tiles),
        ),
        Reading(
            "gauge",
            "ranker_queue_predicted_seconds",
            "Predicted wait of a request that came now",
            label,
            each(lambda version: version.batcher.wait_s()),
        ),
    ]


def _of_rungs(versions: Versions) -> list[Reading]:
    def each(read: Callable[[LaneReport], dict[tuple[str, ...], float]]) -> Callable[[], Samples]:
        def samples() -> Samples:
            return {
                (version.version, report.kind, *more): value
                for version in versions.held()
                for report in version.batcher.ladder.reports()
                for more, value in read(report).items()
            }

        return samples

    label = ("model_version", "rung")
    return [
        Reading(
            "gauge",
            "ranker_rung_state",
            "1 for the state of the rung's breaker now, or for why the rung is out altogether",
            (*label, "state"),
            each(lambda rung: {(word,): float(word == rung.state) for word in _RUNG_STATES}),
        ),
        Reading(
            "gauge",
            "ranker_rung_serves",
            "1 for the rung that takes jobs now",
            label,
            each(lambda rung: {(): float(rung.serves)}),
        ),
        Reading(
            "counter",
            "ranker_rung_opened",
            "How often the rung's breaker opened",
            label,
            each(lambda rung: {(): rung.opened}),
        ),
    ]


def _of_signals(store: SignalStore) -> list[Reading]:
    def state() -> Samples:
        return {("signals", word): float(word == store.breaker.state) for word in _BREAKER_STATES}

    def reads() -> Samples:
        counts = store.counts
        return {
            ("pipelines",): counts.pipelines,
            ("users",): counts.users,
            ("shared",): counts.shared,
            ("late",): counts.late,
            ("failed",): counts.failed,
            ("skipped_records",): counts.skipped_records,
        }

    return [
        Reading(
            "gauge", "ranker_breaker_state", "1 for the state now", ("breaker", "state"), state
        ),
        Reading(
            "counter",
            "ranker_breaker_opened",
            "How often the breaker opened",
            ("breaker",),
            lambda: {("signals",): store.breaker.opened},
        ),
        Reading("counter", "ranker_signal_reads", "Reads of the signal store", ("kind",), reads),
        Reading(
            "gauge",
            "ranker_local_signals_bytes",
            "Memory of last-known signals",
            (),
            lambda: {(): store.local.held_bytes},
        ),
    ]


def _of_admission(admission: Admission) -> list[Reading]:
    return [
        Reading(
            "gauge",
            "ranker_in_flight",
            "Requests in flight",
            (),
            lambda: {(): admission.in_flight},
        ),
        Reading(
            "gauge",
            "ranker_in_flight_limit",
            "Requests that may be in flight; falls while the event loop is behind",
            (),
            lambda: {(): admission.limit},
        ),
    ]
