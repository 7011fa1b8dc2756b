"""TensorRT 10, 11 and TensorRT for RTX; the only importer of their bindings.

No call of the library is made before CUDA was found: without a driver its runtime may crash.
Its functions answer None or False for an error, and tell the reason to the logger.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import platform
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import msgspec

from service.bundle import BatchSpec, InputSpec
from service.domain import BackendKind, BackendName, Float32Array
from service.encoding.batch import Batch
from service.errors import BackendRecoverable, PlanFault
from service.inference.backends import buckets, cuda, side_process
from service.inference.backends.buckets import Bucket
from service.inference.backends.capturing import captures
from service.inference.backends.pipeline import Launch, Pipeline, Place
from service.inference.backends.plans import PlanCache, PlanKey, Profile

_log = logging.getLogger("ranker.tensorrt")
RTX = "tensorrt_rtx"
_MODULES = {"tensorrt": "tensorrt", RTX: RTX, "tensorrt_rtx_bindings": RTX}
"""Where the bindings are found, and the product that they belong to; best first."""
_RTX_SMS = frozenset({"7.5", "8.0", "8.6", "8.9", "12.0", "12.1"})


class Library(msgspec.Struct, frozen=True):
    """The bindings at hand."""

    module: Any
    product: str
    version: str
    logger: Any
    """One for the whole process: the library ignores a second."""
    complaints: list[str]
    """The last errors that the library logged."""

    def why(self) -> str:
        """What the library last complained of."""
        return self.complaints[-1] if self.complaints else "no reason was logged"


@cache
def library() -> Library:
    """The best bindings that can be imported; raises Unavailable."""
    for name, product in _MODULES.items():
        try:
            module = importlib.import_module(name)
        except (ImportError, OSError):  # OSError: bindings without their shared library
            continue
        if hasattr(module, "ICudaEngine"):
            complaints: list[str] = []
            logger = _logger(module, complaints)
            return Library(module, product, str(module.__version__), logger, complaints)
    raise cuda.Unavailable(f"none of {', '.join(_MODULES)} is installed")


def _logger(module: Any, complaints: list[str]) -> Any:
    levels = {"INTERNAL_ERROR": logging.ERROR, "ERROR": logging.ERROR, "WARNING": logging.WARNING}

    class Logger(module.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            module.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            level = levels.get(severity.name, logging.DEBUG)
            if level == logging.ERROR:
                complaints.append(message)
                del complaints[:-20]
            _log.log(level, message)

    return Logger()


def plan_key(
    lib: Library, device: cuda.Device, graph: bytes, *, precision: str, limits: BatchSpec
) -> PlanKey:
    """What a plan of this graph for this host must have been built from."""
    return PlanKey(
        product=lib.product,
        version=lib.version,
        sm=device.sm,
        device="" if lib.product == RTX else device.name,
        platform=f"{platform.system()}-{platform.machine()}",
        graph_sha256=hashlib.sha256(graph).hexdigest(),
        precision=precision,
        profiles=profiles(limits),
    )


def profiles(limits: BatchSpec) -> tuple[Profile, ...]:
    """One for each tile bucket."""
    return tuple(Profile(min(tiles, limits.max_users), tiles) for tiles in limits.tile_buckets)


def find_host() -> tuple[cuda.Device, Library]:
    """The device and the bindings, CUDA first; raises Unavailable."""
    device = cuda.probe()
    lib = library()
    if lib.product == RTX and device.sm not in _RTX_SMS:
        raise cuda.Unavailable(f"{RTX} does not run on compute capability {device.sm}")
    return device, lib


def open_plan(
    graph: bytes,
    *,
    name: str,
    precision: str,
    spec: InputSpec,
    limits: BatchSpec,
    plans: PlanCache,
    build: bool = False,
) -> TensorRt:
    """The engine of a cached plan, or with `build` of one that a side process makes first.

    Raises Unavailable if the host has no device or bindings, and PlanFault, which says which
    part of the cached plan's key differs.
    """
    device, lib = find_host()
    key = plan_key(lib, device, graph, precision=precision, limits=limits)
    try:
        plan = plans.read(name, key)
    except PlanFault:
        if not build:
            raise
        plan = _build(graph, key, name=name, spec=spec, plans=plans)
    side_process.check(plans.path(name, precision))
    return TensorRt(lib, plan, precision=precision, spec=spec, limits=limits)


def _build(graph: bytes, key: PlanKey, *, name: str, spec: InputSpec, plans: PlanCache) -> bytes:
    """A plan, built unless another process has built it meanwhile."""
    with plans.only_writer(name, key.precision):
        try:
            return plans.read(name, key)
        except PlanFault as reason:
            _log.warning("building a plan", extra={"reason": str(reason)})
        plan = side_process.build(graph, spec=spec, profiles=key.profiles, sm=key.sm)
        plans.write(name, key, plan)
        return plan


def try_plan(plan: bytes) -> None:
    """Load a plan and let it go; raises Unavailable or PlanFault, or takes the process down."""
    _, lib = find_host()
    runtime = lib.module.Runtime(lib.logger)
    if hasattr(runtime, "get_engine_validity"):
        validity, reasons = runtime.get_engine_validity(plan)
        if validity == lib.module.EngineValidity.INVALID:
            raise PlanFault(f"the plan is not valid on this host: {reasons}")
    if runtime.deserialize_cuda_engine(plan) is None:
        raise PlanFault(f"the plan cannot be loaded: {lib.why()}")


class TensorRt:
    """One engine with a context for each profile; used by one thread at a time."""

    name: BackendName = "tensorrt"
    kind: BackendKind = "tensorrt"

    def __init__(
        self, lib: Library, plan: bytes, *, precision: str, spec: InputSpec, limits: BatchSpec
    ) -> None:
        """Load a plan that a subprocess has loaded before; raises PlanFault."""
        self.precision = precision
        self._lib = lib
        self._spec = spec
        self._pipeline = Pipeline(spec, limits, self._prepare, lambda _: captures.call())
        self._stream = self._pipeline.computing
        self._graphs: list[cuda.Graph] = []
        self._shaped: dict[int, Bucket] = {}
        self._bound: dict[int, int] = {}
        self._contexts: dict[int, Any] = {}
        with captures.call():
            self._load(plan, limits)

    def _load(self, plan: bytes, limits: BatchSpec) -> None:
        self._runtime: Any = self._lib.module.Runtime(self._lib.logger)
        self._engine: Any = self._runtime.deserialize_cuda_engine(plan)
        if self._engine is None:
            raise PlanFault(f"the plan cannot be loaded: {self._lib.why()}")
        self._check_tensors(limits)
        for at, tiles in enumerate(limits.tile_buckets):
            context = self._engine.create_execution_context()
            if context is None or not context.set_optimization_profile_async(
                at, int(self._stream.handle)
            ):
                raise PlanFault(f"no context for profile {at}: {self._lib.why()}")
            self._stream.wait()  # the context is undefined before
            self._contexts[tiles] = context

    def _check_tensors(self, limits: BatchSpec) -> None:
        engine = self._engine
        found = {engine.get_tensor_name(at) for at in range(engine.num_io_tensors)}
        wanted = {*Batch.__struct_fields__, buckets.OUTPUT}
        if found != wanted:
            raise PlanFault(f"the plan's tensors are {sorted(found)}, not {sorted(wanted)}")
        if engine.num_optimization_profiles != len(limits.tile_buckets):
            raise PlanFault(f"the plan has {engine.num_optimization_profiles} profiles")

    def score(self, batch: Batch) -> Float32Array:
        """Logits [N, T, 2]; a fatal CUDA error raises BackendLost."""
        return self.begin(batch)()

    def begin(self, batch: Batch) -> Callable[[], Float32Array]:
        """See Overlapping; a batch is copied to the device while the one before is computed."""
        return self._pipeline.begin(batch)

    def _prepare(self, place: Place) -> Launch:
        """Capture a place's launches; its first one compiles what is left to compile."""
        enqueue = partial(self._enqueue, place)
        place.inputs.upload(self._stream)
        enqueue()
        self._stream.wait()
        context = self._contexts[place.bucket.tiles]
        capturable = getattr(context, "is_stream_capturable", lambda _: True)
        if not capturable(int(self._stream.handle)):
            return enqueue
        graph = cuda.capture(self._stream, enqueue)
        if graph is None:
            return enqueue
        self._graphs.append(graph)
        return partial(graph.launch, self._stream)

    def _enqueue(self, place: Place) -> None:
        tiles = place.bucket.tiles
        context = self._contexts[tiles]
        if self._shaped.get(tiles) != place.bucket:
            self._shaped.pop(tiles, None)  # a refusal leaves it half changed
            self._shape(context, place.bucket)
            self._shaped[tiles] = place.bucket
        if self._bound.get(tiles) != place.serial:
            self._bound.pop(tiles, None)
            self._bind(context, place)
            self._bound[tiles] = place.serial
        if not context.execute_async_v3(int(self._stream.handle)):
            raise cuda.last_fault(f"TensorRT: {self._lib.why()}")

    def _shape(self, context: Any, bucket: Bucket) -> None:
        for name, (shape, _) in buckets.input_layout(bucket, self._spec).items():
            if not context.set_input_shape(name, shape):
                raise BackendRecoverable(f"TensorRT refuses {name} {shape}: {self._lib.why()}")
        if missing := context.infer_shapes():
            raise BackendRecoverable(f"TensorRT misses the shapes of {missing}")

    @staticmethod
    def _bind(context: Any, place: Place) -> None:
        for name, at in (*place.inputs.addresses.items(), *place.outputs.addresses.items()):
            if not context.set_tensor_address(name, at):
                raise BackendRecoverable(f"TensorRT refuses the address of {name}")

    def close(self) -> None:
        """Free graphs, contexts, engine and runtime in this order, then memory and streams."""
        with captures.call():
            for graph in self._graphs:
                graph.close()
            self._graphs.clear()
            self._contexts.clear()
            self._engine = None
            self._runtime = None
            self._pipeline.close()
