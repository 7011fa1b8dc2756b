"""What the batcher asks of an engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from service.domain import BackendKind, BackendName, Float32Array
from service.encoding.batch import Batch


class Backend(Protocol):
    """One engine with one model version; used by one thread at a time."""

    @property
    def name(self) -> BackendName:
        """The word for this engine in answers."""
        ...

    @property
    def kind(self) -> BackendKind:
        """The word for this engine in settings and on the admin routes."""
        ...

    @property
    def precision(self) -> str:
        """Precision of the graph, such as fp32 or int8."""
        ...

    def score(self, batch: Batch) -> Float32Array:
        """Logits [N, T, 2]; raises BackendRecoverable or BackendLost."""
        ...

    def close(self) -> None:
        """Free what the engine holds; the last call."""
        ...


class Overlapping(Backend, Protocol):
    """An engine that takes the next batch before the last one is done."""

    def begin(self, batch: Batch) -> Callable[[], Float32Array]:
        """Queue a batch; what is given back waits for its logits. Both raise as `score` does.

        What is given back may be called in another thread, in the order of the batches.
        """
        ...
