"""OpenVINO on the CPU, in bf16 where the cores have it; the only importer of openvino."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from numpy.typing import NDArray

from service.bundle import BatchSpec, InputSpec
from service.domain import BackendKind, BackendName, Float32Array
from service.encoding.batch import Batch
from service.errors import BackendRecoverable, ManifestFault
from service.inference.backends.buckets import Bucket, Buckets, fill, input_layout, zeros
from service.inference.backends.cuda import Unavailable

_CPUINFO = Path("/proc/cpuinfo")


def has_bf16(cpuinfo: Path = _CPUINFO) -> bool:
    """Whether this host's cores multiply bf16 natively; without it bf16 is no gain."""
    try:
        flags = cpuinfo.read_text()
    except OSError:
        return False
    return "amx_bf16" in flags or "avx512_bf16" in flags


class _Place(NamedTuple):
    """A compiled bucket and the arrays that it reads."""

    arrays: dict[str, NDArray[Any]]
    request: Any


class OpenVino:
    """One compiled model for each bucket, all of static shapes; shared weights.

    A bucket's inputs are bound once and written over by each batch: to bind new arrays takes a
    fifth of a run for one user.
    """

    name: BackendName = "openvino"
    kind: BackendKind = "openvino"

    def __init__(
        self,
        graph: bytes,
        *,
        precision: str = "fp32",
        spec: InputSpec,
        limits: BatchSpec,
        threads: int = 1,
    ) -> None:
        """Load a verified graph; raises Unavailable without the library, ManifestFault."""
        try:
            import openvino  # noqa: PLC0415  an extra
        except ImportError as error:
            raise Unavailable("openvino is not installed") from error
        wide = "bf16" if has_bf16() else "fp32"
        self.precision = precision if precision == "int8" else wide
        self._spec = spec
        self._buckets = Buckets(limits)
        self._core: Any = openvino.Core()
        self._tensor: Any = openvino.Tensor
        self._settings = {
            "INFERENCE_NUM_THREADS": threads,
            "NUM_STREAMS": 1,
            "PERFORMANCE_HINT": "LATENCY",
            # or each run holds its thread on the host's first core, however busy that is
            "ENABLE_CPU_PINNING": False,
            "INFERENCE_PRECISION_HINT": "bf16" if wide == "bf16" else "f32",
        }
        self._places: dict[Bucket, _Place] = {}
        try:
            self._model: Any = self._core.read_model(graph)
        except RuntimeError as error:
            raise ManifestFault(f"OpenVINO refuses the graph: {error}") from error

    def score(self, batch: Batch) -> Float32Array:
        """Logits [N, T, 2]; any failure fails this batch alone."""
        bucket = self._buckets.of(batch)
        try:
            place = self._places.get(bucket) or self._compile(bucket)
            fill(place.arrays, batch)
            (logits,) = place.request.infer(share_outputs=True).values()
        except RuntimeError as error:
            raise BackendRecoverable(f"OpenVINO: {error}") from error
        scores: Float32Array = logits[: len(batch.tile_user)].copy()
        return scores

    def _compile(self, bucket: Bucket) -> _Place:
        layout = input_layout(bucket, self._spec)
        model = self._model.clone()
        model.reshape({name: list(shape) for name, (shape, _) in layout.items()})
        request = self._core.compile_model(model, "CPU", self._settings).create_infer_request()
        place = _Place(zeros(layout), request)
        for name, array in place.arrays.items():
            request.set_tensor(name, self._tensor(array, shared_memory=True))
        self._places[bucket] = place
        return place

    def close(self) -> None:
        """Drop what was compiled."""
        self._places.clear()
        self._model = self._core = None
