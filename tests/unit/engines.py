"""Engines at the one seam where a fake may stand: slow, failing, or held until released."""

import threading
from collections.abc import Callable

import numpy as np

from service.domain import BackendKind, BackendName, Float32Array
from service.encoding.batch import Batch
from service.encoding.items import ITEM1


def echo(batch: Batch) -> Float32Array:
    """Each candidate's first item row, in millionths, as its click probability."""
    logits = np.zeros((*batch.cand_ids.shape[:2], 2), np.float32)
    share = np.maximum(batch.cand_ids[..., ITEM1], 0.4) / 1e6
    logits[..., 0] = np.log(share / (1 - share))
    return logits


class ScriptedEngine:
    """Runs `answer` for every batch, and remembers the batches' sizes."""

    name: BackendName = "onnxruntime"
    precision = "fp32"

    def __init__(
        self,
        answer: Callable[[Batch], Float32Array] = echo,
        *,
        kind: BackendKind = "onnx-cpu",
    ) -> None:
        self.answer = answer
        self.kind: BackendKind = kind
        self.tiles: list[int] = []
        self.open = threading.Event()
        self.open.set()
        self.entered = threading.Event()
        self.closed = False

    def hold(self) -> None:
        """Keep the next batches inside the engine until `release`."""
        self.open.clear()
        self.entered.clear()

    def release(self) -> None:
        self.open.set()

    def score(self, batch: Batch) -> Float32Array:
        self.tiles.append(len(batch.cand_ids))
        self.entered.set()
        assert self.open.wait(10)
        return self.answer(batch)

    def close(self) -> None:
        self.closed = True
