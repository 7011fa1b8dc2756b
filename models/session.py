"""ONNX Runtime on the CPU, for looking at graphs offline: one thread, one batch after another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnxruntime
from tqdm import tqdm

from models.dataset import Examples
from models.train import take
from service.domain import Float32Array
from service.encoding.batch import Batch

SLATES_PER_BATCH = 64
Feeds = dict[str, Any]


def open_session(graph: bytes, *, threads: int = 1, fused: bool = True) -> Any:
    """A session; without fusion each operator computes just what the standard says.

    Fused products of 8 bits saturate on cores without VNNI, and of FP8 they are wrong, so
    graphs for devices are judged unfused.
    """
    level = onnxruntime.GraphOptimizationLevel
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = level.ORT_ENABLE_ALL if fused else level.ORT_ENABLE_BASIC
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


def feeds(examples: Examples, *, slates_per_batch: int = SLATES_PER_BATCH) -> Iterator[Feeds]:
    """All slates in order, as inputs of a graph."""
    slates = np.arange(len(examples.at_ms))
    for start in range(0, len(slates), slates_per_batch):
        inputs, _ = take(examples, slates[start : start + slates_per_batch])
        arrays = (array.numpy() for array in inputs)
        yield dict(zip(Batch.__struct_fields__, arrays, strict=True))


def score_graph(
    graph: bytes, examples: Examples, *, name: str = "graph", fused: bool = True
) -> Float32Array:
    """Logits of all tiles [N, T, 2]."""
    session = open_session(graph, fused=fused)
    batches = list(feeds(examples))
    progress = tqdm(batches, desc=f"score {name}", leave=False, mininterval=1)
    logits: Float32Array = np.concatenate([session.run(None, batch)[0] for batch in progress])
    return logits
