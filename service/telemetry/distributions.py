"""Latencies for DogStatsD: kept in memory, and handed over many values at a time.

Under the names that the agent's OpenMetrics check gives to the same histograms.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cache

from service.inference.batcher import BatchReport
from service.ranking.query import Report
from service.telemetry.spans import FRAMEWORK, stages

_AT_ONCE = 100
"""Values in a line: with their tags they fit one datagram of 1,432 bytes."""
_EVERY_S = 1.0

Send = Callable[[str, list[float], list[str]], None]
"""Takes a metric's name, its values and its tags; never waits."""


class _Series:
    """The values of one metric under one set of tags since they were last sent."""

    def __init__(self, send: Send, name: str, tags: list[str]) -> None:
        self._send = send
        self._name = name
        self._tags = tags
        self._values: list[float] = []

    def add(self, value: float) -> None:
        self._values.append(value)
        if len(self._values) == _AT_ONCE:
            self.flush()

    def flush(self) -> None:
        if self._values:
            values, self._values = self._values, []
            self._send(self._name, values, self._tags)


class Distributions:
    """Every request's and batch's times; used on the event loop, after the reply."""

    def __init__(self, send: Send, close: Callable[[], object] = lambda: None) -> None:
        self._send = send
        self.close = close
        """Ends the sending; may wait a second for what is on its way."""
        self._series: list[_Series] = []
        self._stage = cache(self._stage_series)
        self._engine = cache(self._engine_series)
        self._age = self._add("signal_age_seconds")

    def _add(self, name: str, **tags: str) -> _Series:
        words = [f"{key}:{value}" for key, value in tags.items()]
        series = _Series(self._send, f"ranker.{name}", words)
        self._series.append(series)
        return series

    def _stage_series(self, stage: str, framework: str) -> _Series:
        return self._add("stage_seconds", stage=stage, framework=framework)

    def _engine_series(self, framework: str, precision: str) -> _Series:
        return self._add("batch_seconds", framework=framework, precision=precision)

    def record(self, report: Report) -> None:
        """Keep the times of one finished /rank request."""
        if report.route != "/rank":
            return
        framework = FRAMEWORK[report.backend]
        self._stage("total", framework).add(report.times.total_s)
        for stage, began_s, ended_s in stages(report):
            self._stage(stage, framework).add(ended_s - began_s)
        if report.signal_age_ms is not None:
            self._age.add(report.signal_age_ms / 1e3)

    def record_batch(self, report: BatchReport) -> None:
        """Keep the engine's time for one batch that it scored."""
        if report.backend is not None:
            self._engine(FRAMEWORK[report.backend], report.precision).add(report.seconds)

    def flush(self) -> None:
        """Send what is kept."""
        for series in self._series:
            series.flush()

    async def flush_regularly(self) -> None:
        """Send what is kept once a second until cancelled."""
        while True:
            await asyncio.sleep(_EVERY_S)
            self.flush()
