"""What the interpreter and the device do to latency: collections, loop lag, GPU memory."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterable
from contextlib import suppress
from importlib import import_module
from typing import Any

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_PAUSE_S = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
_LAG_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)
_LAG_EVERY_S = 0.1


class Pauses:
    """Times the collections of the older generations; the youngest takes microseconds."""

    def __init__(self, registry: CollectorRegistry) -> None:
        histogram = Histogram(
            "ranker_gc_pause_seconds",
            "Pauses for garbage collection",
            ["generation"],
            buckets=_PAUSE_S,
            registry=registry,
        )
        self._children = {1: histogram.labels("1"), 2: histogram.labels("2")}
        self._began_s = 0.0

    def start(self) -> None:
        """Listen to the collector."""
        gc.callbacks.append(self._hear)

    def stop(self) -> None:
        """Listen no more."""
        with suppress(ValueError):
            gc.callbacks.remove(self._hear)

    def _hear(self, phase: str, told: dict[str, int]) -> None:
        child = self._children.get(told["generation"])
        if child is None:
            return
        if phase == "start":
            self._began_s = time.perf_counter()
        else:
            child.observe(time.perf_counter() - self._began_s)


class LoopLag:
    """How late the event loop runs a timer: what every request waits for its turn."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._lag = Histogram(
            "ranker_loop_lag_seconds",
            "Lateness of the event loop's timers",
            buckets=_LAG_S,
            registry=registry,
        )

    async def watch(self) -> None:
        """Measure ten times a second until cancelled."""
        while True:
            due_s = time.monotonic() + _LAG_EVERY_S
            await asyncio.sleep(_LAG_EVERY_S)
            self._lag.observe(max(0.0, time.monotonic() - due_s))


class Gpus(Collector):
    """Memory and utilization of NVIDIA devices, where NVML finds any."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        count = nvml.nvmlDeviceGetCount()
        self._devices = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]

    @classmethod
    def found(cls) -> Gpus | None:
        """The devices of this machine, or None where there is no driver."""
        try:
            pynvml = import_module("pynvml")
        except ImportError:
            return None
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return None
        return cls(pynvml)

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering must not ask the device."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """One sample a device."""
        used = GaugeMetricFamily("ranker_gpu_memory_used_bytes", "GPU memory used", labels=["gpu"])
        total = GaugeMetricFamily("ranker_gpu_memory_bytes", "GPU memory", labels=["gpu"])
        busy = GaugeMetricFamily(
            "ranker_gpu_utilization_ratio", "Share of time with a kernel running", labels=["gpu"]
        )
        for index, device in enumerate(self._devices):
            try:
                memory = self._nvml.nvmlDeviceGetMemoryInfo(device)
                rates = self._nvml.nvmlDeviceGetUtilizationRates(device)
            except self._nvml.NVMLError:  # a lost device has no figures
                continue
            used.add_metric([str(index)], memory.used)
            total.add_metric([str(index)], memory.total)
            busy.add_metric([str(index)], rates.gpu / 100)
        return (used, total, busy)
