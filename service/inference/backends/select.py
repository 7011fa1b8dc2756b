"""Which engines this host can run with a bundle, best first; opens them and checks each."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from service.bundle import BatchSpec, Bundle, InputSpec
from service.domain import BackendChoice, BackendKind, PrecisionChoice
from service.errors import BackendFault, BundleFault, ManifestFault, PlanFault
from service.inference.backends import openvino, side_process, tensorrt
from service.inference.backends.base import Backend
from service.inference.backends.buckets import Buckets, resized
from service.inference.backends.cuda import Unavailable
from service.inference.backends.openvino import OpenVino
from service.inference.backends.pipeline import PLACES
from service.inference.backends.plans import PlanCache
from service.inference.backends.ways import Ways, precision_of
from service.inference.parity import Golden, check_parity

_log = logging.getLogger("ranker.rungs")
_RUNS: dict[BackendKind, int] = {
    "tensorrt": PLACES,
    # which runs a bucket plainly twice before it captures it
    "onnx-cuda": 3 * PLACES,
    "openvino": 1,
    "onnx-cpu": 0,
}
"""How often to run a size until everything is prepared for it."""

_WINDOW_BYTES = 1 << 20
_EXTERNAL = b"\x0a\x08location"
"""The key of an ONNX tensor's external file, as protobuf writes it."""


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A verified graph and what an engine must know of it."""

    name: str
    """For the name of a plan's file."""
    graph: bytes
    precision: str
    spec: InputSpec
    limits: BatchSpec
    threads: int = 1
    graphs: bool = True
    """Whether a device captures its launches."""
    build: bool = False
    """Whether to build a plan that is not in the cache, which takes long."""


def open_backend(kind: BackendKind, source: Source, plans: PlanCache | None = None) -> Backend:
    """Open one engine; raises Unavailable if this host cannot run it, or a BundleFault."""
    return _OPENERS[kind](source, plans)


def _onnx_cpu(source: Source, _: PlanCache | None) -> Backend:
    from service.inference.backends.onnx import OnnxCpu  # noqa: PLC0415  may be missing

    return OnnxCpu(source.graph, precision=source.precision, threads=source.threads)


def _onnx_cuda(source: Source, _: PlanCache | None) -> Backend:
    from service.inference.backends.onnx import OnnxCuda, check_device  # noqa: PLC0415

    check_device()
    graphs = source.graphs
    if graphs:
        try:
            side_process.capture(source.graph, spec=source.spec, limits=source.limits)
        except PlanFault as error:
            graphs = False
            _log.warning("launches are not captured", extra={"reason": str(error)})
    return OnnxCuda(
        source.graph,
        precision=source.precision,
        spec=source.spec,
        limits=source.limits,
        graphs=graphs,
    )


def _openvino(source: Source, _: PlanCache | None) -> Backend:
    return OpenVino(
        source.graph,
        precision=source.precision,
        spec=source.spec,
        limits=source.limits,
        threads=source.threads,
    )


def _tensorrt(source: Source, plans: PlanCache | None) -> Backend:
    if plans is None:
        raise Unavailable("no folder for plans is set")
    return tensorrt.open_plan(
        source.graph,
        name=source.name,
        precision=source.precision,
        spec=source.spec,
        limits=source.limits,
        plans=plans,
        build=source.build,
    )


_OPENERS: dict[BackendKind, Callable[[Source, PlanCache | None], Backend]] = {
    "tensorrt": _tensorrt,
    "onnx-cuda": _onnx_cuda,
    "openvino": _openvino,
    "onnx-cpu": _onnx_cpu,
}


def open_rungs(
    bundle: Bundle,
    golden: Golden,
    *,
    choice: BackendChoice = "auto",
    precision: PrecisionChoice = "auto",
    threads: int | None = None,
    plans: Path | None = None,
) -> list[Backend]:
    """The engines of a bundle on this host, best first, each within its golden tolerance.

    `auto` takes what there is, of TensorRT only a plan that is built, and on a CPU that the
    bundle was tuned on what was best there. A named engine must open, and keeps ONNX Runtime
    on the CPU behind it; of a named precision, what must open has a graph. Raises a
    BundleFault if what must open does not.
    """
    ways = Ways.of(bundle.manifest, backend=choice, precision=precision, threads=threads)
    kinds = ways.kinds(bf16=openvino.has_bf16())
    cache = None if plans is None else PlanCache(plans)
    rungs: list[Backend] = []
    reasons: dict[BackendKind, Unavailable | BundleFault] = {}
    for kind in kinds:
        try:
            rungs.append(_open_checked(bundle, golden, kind, ways, cache, build=kind == choice))
        except (Unavailable, BundleFault) as error:
            reasons[kind] = error
            level = logging.INFO if isinstance(error, Unavailable) else logging.WARNING
            _log.log(level, "no rung", extra={"rung": kind, "reason": str(error)})
        except BaseException:
            for backend in rungs:
                backend.close()
            raise
    must = kinds[-1] if choice == "auto" else choice
    if (choice == "auto" and rungs) or must not in reasons:
        return rungs
    for backend in rungs:
        backend.close()
    reason = reasons[must]
    if isinstance(reason, BundleFault):
        raise reason
    raise ManifestFault(f"backend {must} is not at hand: {reason}") from reason


def build_later(
    bundle: Bundle,
    golden: Golden,
    plans: Path,
    ready: Callable[[Backend], None],
    *,
    precision: PrecisionChoice = "auto",
) -> threading.Thread | None:
    """Build the plan that `open_rungs` missed, while other rungs serve; then hand it over.

    `ready` is called in the thread that is given back. None if this host runs no TensorRT.
    """
    try:
        tensorrt.find_host()
    except Unavailable:
        return None

    def build() -> None:
        try:
            cache = PlanCache(plans)
            ways = Ways(precision=precision)
            ready(_open_checked(bundle, golden, "tensorrt", ways, cache, build=True))
        except (Unavailable, BundleFault) as error:
            _log.warning("no plan was built", extra={"reason": str(error)})

    thread = threading.Thread(target=build, name="plan-builder", daemon=True)
    thread.start()
    return thread


def _open_checked(
    bundle: Bundle,
    golden: Golden,
    kind: BackendKind,
    ways: Ways,
    plans: PlanCache | None,
    *,
    build: bool = False,
) -> Backend:
    """The first precision of the bundle that this engine scores well enough."""
    fault: Unavailable | BundleFault = ManifestFault(
        f"no graph for {kind} among {sorted(bundle.manifest.graphs)}, precision {ways.precision}"
    )
    for source in _sources(bundle, kind, ways, build=build):
        try:
            backend = open_backend(kind, source, plans)
        except (Unavailable, BundleFault) as error:
            fault = error
            continue
        except BackendFault as error:  # a device that is full or broken
            fault = Unavailable(f"{kind} does not open: {error}")
            continue
        try:
            error_found = check_parity(backend, golden)
            _capture(backend, golden, source.limits)
        except (BundleFault, BackendFault) as error:
            backend.close()
            fault = error if isinstance(error, BundleFault) else ManifestFault(f"{kind}: {error}")
            _log.warning("graph refused", extra={"rung": kind, "reason": str(fault)})
            continue
        _log.info(
            "rung ready",
            extra={"rung": kind, "precision": backend.precision, "golden_error": error_found},
        )
        return backend
    raise fault


def _sources(bundle: Bundle, kind: BackendKind, ways: Ways, *, build: bool) -> Iterator[Source]:
    manifest = bundle.manifest
    for name in ways.graphs_of(kind):
        if name in manifest.graphs:
            yield Source(
                name=f"{manifest.name}-{manifest.version}",
                graph=read_graph(bundle, manifest.graphs[name]),
                precision=precision_of(name),
                spec=manifest.input,
                limits=manifest.batch,
                threads=ways.threads_of(kind),
                build=build,
            )


def read_graph(bundle: Bundle, file: str) -> bytes:
    """A graph's verified bytes; raises ManifestFault if it would read further files."""
    graph = bundle.read(file)
    # in windows, as one search holds the interpreter lock to its end
    for start in range(0, len(graph), _WINDOW_BYTES):
        if graph.find(_EXTERNAL, start, start + _WINDOW_BYTES + len(_EXTERNAL)) >= 0:
            raise ManifestFault(f"{file} keeps tensors in external files")
    return graph


def _capture(backend: Backend, golden: Golden, limits: BatchSpec) -> None:
    """Run every size that a device or a compiler prepares apart, until it is prepared."""
    for bucket in Buckets(limits).pairs:
        for _ in range(_RUNS[backend.kind]):
            backend.score(resized(golden.batch, bucket))
