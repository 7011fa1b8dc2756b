"""The bare engine: one ONNX Runtime session on one thread, with the service's own graph.

The floor under the service's numbers: what it costs beyond this is its own doing.
"""

from __future__ import annotations

import io
from time import perf_counter, process_time

import msgspec
import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from service.bundle import Bundle


class EngineCost(msgspec.Struct, frozen=True):
    """One batch size: CPU a request, and the time of one run."""

    requests: int
    cpu_us: float
    run_p50_ms: float


class BareEngine:
    """A session on a bundle's graph, fed with repetitions of its golden requests."""

    def __init__(self, bundle: Bundle, precision: str) -> None:
        manifest = bundle.manifest
        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        graph = bundle.read(manifest.graphs[precision])
        self._session = ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        self._tile_width = manifest.input.tile_width
        with np.load(io.BytesIO(bundle.read(manifest.golden.file))) as golden:
            self._golden = {name: golden[name] for name in golden.files}

    def feed(self, requests: int, slate: int) -> dict[str, NDArray[np.generic]]:
        """Inputs of a batch of `requests` users with slates of `slate` candidates."""
        golden = self._golden
        tiles = -(-slate // self._tile_width)
        full = np.flatnonzero(golden["cand_ids"][:, -1, 0])
        rows = full if len(full) else np.arange(len(golden["cand_ids"]))
        users = np.arange(requests) % len(golden["ctx_ids"])
        feed = {name: golden[name][users] for name in ("hist_ids", "hist_age", "hist_mask")}
        feed["ctx_ids"] = golden["ctx_ids"][users]
        feed["cand_ids"] = golden["cand_ids"][rows[np.arange(requests * tiles) % len(rows)]]
        feed["tile_user"] = np.repeat(np.arange(requests, dtype=np.int32), tiles)
        return feed

    def measure(self, requests: int, slate: int, *, for_s: float = 1.0) -> EngineCost:
        """Run one batch size again and again, after a warm-up."""
        feed = self.feed(requests, slate)
        for _ in range(5):
            self._session.run(None, feed)
        runs_s: list[float] = []
        cpu_before_s, started_s = process_time(), perf_counter()
        while perf_counter() - started_s < for_s:
            before_s = perf_counter()
            self._session.run(None, feed)
            runs_s.append(perf_counter() - before_s)
        cpu_us = (process_time() - cpu_before_s) / len(runs_s) / requests * 1e6
        return EngineCost(requests, cpu_us, float(np.median(runs_s)) * 1e3)
