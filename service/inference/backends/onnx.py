"""ONNX Runtime on the CPU; the only importer of onnxruntime."""

from __future__ import annotations

from typing import Any

import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from service.domain import BackendKind, BackendName, Float32Array
from service.encoding.batch import Batch
from service.errors import BackendRecoverable, ManifestFault

PROVIDER = "CPUExecutionProvider"

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


class OnnxCpu:
    """One single-threaded session by default: a second thread gains little and doubles CPU."""

    name: BackendName = "onnxruntime"
    kind: BackendKind = "onnx-cpu"

    def __init__(self, graph: bytes, *, precision: str, threads: int = 1) -> None:
        """Load a verified graph; raises ManifestFault if it is not one that we can feed."""
        self.precision = precision
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
        # an idle engine that spins takes its core from the event loop
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.add_session_config_entry("session.set_denormal_as_zero", "1")
        options.log_severity_level = 3
        try:
            session = ort.InferenceSession(graph, options, providers=[PROVIDER])
        except _ORT_ERRORS as error:
            raise ManifestFault(f"ONNX Runtime refuses the graph: {error}") from error
        if session.get_providers() != [PROVIDER]:
            raise ManifestFault(f"ONNX Runtime runs on {session.get_providers()}")
        self._check_inputs(session)
        self._session: Any = session

    @staticmethod
    def _check_inputs(session: Any) -> None:
        found = {entry.name: entry.type for entry in session.get_inputs()}
        floats = {"hist_mask"}
        wanted = {
            name: "tensor(float)" if name in floats else "tensor(int32)"
            for name in Batch.__struct_fields__
        }
        if found != wanted:
            raise ManifestFault(f"the graph's inputs are {found}, not {wanted}")

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
