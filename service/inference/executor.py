"""The rungs of one version, best first. Who gets which batch is the batcher's decision."""

from __future__ import annotations

from collections.abc import Sequence

from service.encoding.batch import Batch
from service.inference.backends.base import Backend
from service.inference.rung import Rung, Scored


class Executor:
    """Opens a thread for every backend, and closes them all."""

    def __init__(self, backends: Sequence[Backend], *, name: str) -> None:
        assert backends
        self.rungs = tuple(Rung(backend, name=name) for backend in backends)

    def run(self, batch: Batch, *, rung: int = 0) -> Scored:
        """Run one batch on one rung and wait for it; raises BackendFault."""
        return self.rungs[rung].run(batch)

    def close(self) -> None:
        """Finish what is queued and free the engines."""
        for rung in self.rungs:
            rung.close()
