"""ONNX Runtime, on the CPU and on a CUDA device; the only importer of onnxruntime."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from service.bundle import BatchSpec, InputSpec
from service.domain import BackendKind, BackendName, Float32Array
from service.encoding.batch import Batch
from service.errors import BackendRecoverable, ManifestFault
from service.inference.backends import buckets, cuda
from service.inference.backends.capturing import captures
from service.inference.backends.pipeline import PLACES, Launch, Pipeline, Place

_CAPTURE_RUNS = 3
"""A bucket is run plainly twice before it is captured."""
CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"

# onnxruntime's exceptions share no base class of their own
_ORT_ERRORS: tuple[type[Exception], ...] = (
    *(
        kind
        for kind in vars(ort_errors).values()
        if isinstance(kind, type) and issubclass(kind, Exception)
    ),
    RuntimeError,
    ValueError,
)


def _options(threads: int) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    # an idle engine that spins takes its core from the event loop
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.set_denormal_as_zero", "1")
    options.log_severity_level = 3
    return options


def _session(graph: bytes, options: Any, provider: str, settings: dict[str, str]) -> Any:
    """A session that runs on this provider and no other; raises ManifestFault."""
    try:
        session = ort.InferenceSession(graph, options, providers=[(provider, settings)])
    except _ORT_ERRORS as error:
        raise ManifestFault(f"ONNX Runtime refuses the graph: {error}") from error
    if session.get_providers()[0] != provider:
        raise ManifestFault(f"ONNX Runtime runs on {session.get_providers()}")
    floats = {"hist_mask"}
    found = {entry.name: entry.type for entry in session.get_inputs()}
    wanted = {
        name: "tensor(float)" if name in floats else "tensor(int32)"
        for name in Batch.__struct_fields__
    }
    if found != wanted:
        raise ManifestFault(f"the graph's inputs are {found}, not {wanted}")
    return session


class OnnxCpu:
    """One single-threaded session by default: a second thread gains little and doubles CPU."""

    name: BackendName = "onnxruntime"
    kind: BackendKind = "onnx-cpu"

    def __init__(self, graph: bytes, *, precision: str, threads: int = 1) -> None:
        """Load a verified graph; raises ManifestFault if it is not one that we can feed."""
        self.precision = precision
        self._session: Any = _session(graph, _options(threads), CPU, {})

    def score(self, batch: Batch) -> Float32Array:
        """Logits [N, T, 2]; any failure of the session fails this batch alone."""
        feeds = {name: getattr(batch, name) for name in batch.__struct_fields__}
        try:
            (logits,) = self._session.run(None, feeds)
        except _ORT_ERRORS as error:
            raise BackendRecoverable(f"ONNX Runtime: {error}") from error
        scores: Float32Array = logits
        return scores

    def close(self) -> None:
        """Drop the session and its arena."""
        self._session = None


def check_device() -> None:
    """Raise Unavailable where ONNX Runtime could not use a CUDA device."""
    if CUDA not in ort.get_available_providers():
        raise cuda.Unavailable("this onnxruntime has no CUDA provider")
    cuda.probe()


class OnnxCuda:
    """A session on a CUDA device: fixed buckets, pinned buffers, and a CUDA graph for each.

    ONNX Runtime runs a bucket plainly at first, captures it, and replays it from then on.
    """

    name: BackendName = "onnxruntime"
    kind: BackendKind = "onnx-cuda"

    def __init__(
        self,
        graph: bytes,
        *,
        precision: str,
        spec: InputSpec,
        limits: BatchSpec,
        graphs: bool = True,
    ) -> None:
        """Load a verified graph; raises Unavailable without a device, ManifestFault."""
        check_device()
        ort.preload_dlls()
        self.precision = precision
        self._spec = spec
        self.graphs = graphs
        """Whether launches are captured; try it in a side process first, as it may abort."""
        self._pipeline = Pipeline(spec, limits, self._prepare, self._guard)
        options = _options(threads=1)
        # an operator without a CUDA kernel must be an error, not a silent detour
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        settings = {
            "device_id": "0",
            "user_compute_stream": str(int(self._pipeline.computing.handle)),
            "arena_extend_strategy": "kSameAsRequested",
            "use_tf32": "0",
            "enable_cuda_graph": str(int(graphs)),
        }
        with captures.call():
            self._session: Any = _session(graph, options, CUDA, settings)

    def score(self, batch: Batch) -> Float32Array:
        """Logits [N, T, 2]; a fatal CUDA error raises BackendLost."""
        return self.begin(batch)()

    def begin(self, batch: Batch) -> Callable[[], Float32Array]:
        """See Overlapping; a batch is copied to the device while the one before is computed."""
        return self._pipeline.begin(batch)

    def _guard(self, place: Place | None) -> AbstractContextManager[None]:
        first = self.graphs and place is not None and place.runs < _CAPTURE_RUNS
        return captures.capture() if first else captures.call()

    def capture(self) -> None:
        """Run every place of every bucket until it is captured; raises BackendFault."""
        for bucket in self._pipeline.buckets.pairs:
            batch = Batch(**buckets.zeros(buckets.input_layout(bucket, self._spec)))
            for _ in range(PLACES * _CAPTURE_RUNS):
                self.score(batch)

    def _prepare(self, place: Place) -> Launch:
        """Bind a place's memory to the session once and for all."""
        binding, options = self._session.io_binding(), ort.RunOptions()
        for name, (shape, dtype) in buckets.input_layout(place.bucket, self._spec).items():
            at = place.inputs.addresses[name]
            binding.bind_input(name, "cuda", 0, dtype.type, list(shape), at)
        for name, (shape, dtype) in buckets.output_layout(place.bucket, self._spec).items():
            at = place.outputs.addresses[name]
            binding.bind_output(name, "cuda", 0, dtype.type, list(shape), at)
        # whoever ends the batch waits for it, once, after the copy back
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        serial = place.serial if self.graphs else -1
        options.add_run_config_entry("gpu_graph_id", str(serial))
        return partial(self._run, binding, options)

    def _run(self, binding: Any, options: Any) -> None:
        try:
            self._session.run_with_iobinding(binding, options)
        except _ORT_ERRORS as error:
            raise cuda.fault_in(str(error), "ONNX Runtime") from error

    def close(self) -> None:
        """Free the graphs, then the buffers, then the streams."""
        with captures.call():
            self._session = None
            self._pipeline.close()
