"""Which engines this host can run with a bundle, best first; opens them and checks each."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from service.bundle import BatchSpec, InputSpec
from service.inference.backends import cuda
from service.inference.backends.base import Backend


def opener(
    kind: str,
    graph: bytes,
    *,
    precision: str,
    spec: InputSpec,
    limits: BatchSpec,
    threads: int = 1,
    graphs: bool = True,
) -> Callable[[], Backend]:
    """What opens one engine on a verified graph.

    The call raises Unavailable if the host cannot run it, ManifestFault if it refuses the graph.
    """

    def onnx_cpu() -> Backend:
        from service.inference.backends.onnx import OnnxCpu  # noqa: PLC0415  a missing library

        return OnnxCpu(graph, precision=precision, threads=threads)

    def onnx_cuda() -> Backend:
        from service.inference.backends.onnx import OnnxCuda  # noqa: PLC0415

        return OnnxCuda(graph, precision=precision, spec=spec, limits=limits, graphs=graphs)

    def missing() -> Backend:
        raise cuda.Unavailable(f"{kind} is not built in")

    assert importlib.util.find_spec("onnxruntime")
    return {"onnx-cpu": onnx_cpu, "onnx-cuda": onnx_cuda}.get(kind, missing)
