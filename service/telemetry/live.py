"""Values read at the moment of a scrape, so that nothing is paid for them between scrapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

Samples = Mapping[tuple[str, ...], float]
"""Values by their labels."""


class Reading(msgspec.Struct, frozen=True):
    """One metric family, and the function that reads it."""

    kind: Literal["gauge", "counter"]
    name: str
    help: str
    labels: tuple[str, ...]
    read: Callable[[], Samples]


class LiveValues(Collector):
    """Reads every family anew for each scrape."""

    def __init__(self, readings: Iterable[Reading]) -> None:
        self._readings = tuple(readings)

    def describe(self) -> Iterable[Metric]:
        """The names alone."""
        return [self._family(reading) for reading in self._readings]

    def collect(self) -> Iterable[Metric]:
        """The values now."""
        for reading in self._readings:
            family = self._family(reading)
            for labels, value in reading.read().items():
                family.add_metric(labels, value)
            yield family

    @staticmethod
    def _family(reading: Reading) -> CounterMetricFamily | GaugeMetricFamily:
        family = CounterMetricFamily if reading.kind == "counter" else GaugeMetricFamily
        return family(reading.name, reading.help, labels=reading.labels)
