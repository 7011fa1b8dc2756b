"""With which graphs and threads an engine runs: by settings, then as tuned for this CPU."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Self

import msgspec

from service.bundle import Manifest, Timing
from service.domain import BackendChoice, BackendKind, PrecisionChoice

_log = logging.getLogger("ranker.rungs")
_CPUINFO = Path("/proc/cpuinfo")
_CPU_KEYS = ("cpu family", "model", "CPU implementer", "CPU part")
_BEST: dict[BackendKind, tuple[str, ...]] = {
    "tensorrt": ("int8", "fp8", "fp16", "fp32"),
    "onnx-cuda": ("fp16", "fp32"),
    "openvino": ("fp32",),
    "onnx-cpu": ("fp32",),
}
"""The kinds in the order in which they are tried, each with its graphs, best first."""
_FURTHER: dict[BackendKind, tuple[str, ...]] = {
    "openvino": ("int8-cpu",),
    "onnx-cpu": ("int8-cpu",),
}
"""Graphs that only a setting or a measurement chooses: not every CPU gains from them."""
ON_CPU: tuple[BackendKind, ...] = ("openvino", "onnx-cpu")


class Ways(msgspec.Struct, frozen=True, kw_only=True):
    """How the engines of one bundle are run on this host."""

    backend: BackendChoice = "auto"
    precision: PrecisionChoice = "auto"
    threads: int | None = None
    tuned: Timing | None = None
    """The best measured way that the settings permit."""

    @classmethod
    def of(
        cls,
        manifest: Manifest,
        *,
        backend: BackendChoice = "auto",
        precision: PrecisionChoice = "auto",
        threads: int | None = None,
    ) -> Self:
        """Settings, and from the manifest what was measured on a CPU like this one."""
        tuning = manifest.tuning
        timings = () if tuning is None else tuning.timings
        if tuning is not None and tuning.cpu != (here := cpu_model()):
            timings = ()
            told = {"model_version": manifest.version, "tuned_for": tuning.cpu, "cpu": here}
            _log.info("tuned for another CPU, which is ignored", extra=told)
        permitted = (
            timing
            for timing in timings
            if backend in {"auto", timing.backend}
            and precision in {"auto", precision_of(timing.graph)}
            and threads in {None, timing.threads}
        )
        tuned = next(permitted, None)
        return cls(backend=backend, precision=precision, threads=threads, tuned=tuned)

    def kinds(self, *, bf16: bool) -> tuple[BackendKind, ...]:
        """What to open, in this order; `bf16`: whether the cores multiply it."""
        if self.backend != "auto":
            return (self.backend,) if self.backend == "onnx-cpu" else (self.backend, "onnx-cpu")
        openvino = bf16 if self.tuned is None else self.tuned.backend == "openvino"
        return tuple(kind for kind in _BEST if kind != "openvino" or openvino)

    def threads_of(self, kind: BackendKind) -> int:
        """Threads inside one run of an engine."""
        tuned = self._tuned(kind)
        return self.threads or (1 if tuned is None else tuned.threads)

    def graphs_of(self, kind: BackendKind) -> list[str]:
        """The graphs of a manifest that an engine may serve, best first."""
        tuned = self._tuned(kind)
        if self.precision == "auto":
            return list(dict.fromkeys([*([tuned.graph] if tuned else []), *_BEST[kind]]))
        return [name for name in graph_names(kind) if precision_of(name) == self.precision]

    def _tuned(self, kind: BackendKind) -> Timing | None:
        return self.tuned if self.tuned is not None and self.tuned.backend == kind else None


def graph_names(kind: BackendKind) -> tuple[str, ...]:
    """Every graph of a manifest that an engine can run."""
    return (*_FURTHER.get(kind, ()), *_BEST[kind])


def precision_of(graph: str) -> str:
    """The precision that a graph's name tells."""
    return graph.removesuffix("-cpu")


def cpu_model(cpuinfo: Path = _CPUINFO) -> str:
    """What /proc/cpuinfo tells of this host's CPU; empty where it tells nothing.

    Name, family and model, as hypervisors give many the same name.
    """
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return ""
    told = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    name = [told[key] for key in ("model name",) if key in told]
    return ", ".join(name + [f"{key} {told[key]}" for key in _CPU_KEYS if key in told])
