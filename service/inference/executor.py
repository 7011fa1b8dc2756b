"""The rungs of one version, best first. Who gets which batch is the batcher's decision."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from service.encoding.batch import Batch
from service.inference.backends.base import Backend
from service.inference.rung import Rung, Scored


class Executor:
    """Opens a thread for every backend, and closes them all."""

    def __init__(self, backends: Sequence[Backend], *, name: str) -> None:
        assert backends
        self._name = name
        self._lock = threading.Lock()
        self._closed = False
        self.rungs = tuple(Rung(backend, name=name) for backend in backends)

    def run(self, batch: Batch, *, rung: int = 0) -> Scored:
        """Run one batch on one rung and wait for it; raises BackendFault."""
        return self.rungs[rung].run(batch)

    def add(self, backend: Backend) -> Rung | None:
        """Open a thread for one more backend; None, and it is freed, if all is closed already."""
        with self._lock:
            if not self._closed:
                rung = Rung(backend, name=self._name)
                self.rungs = (rung, *self.rungs)
                return rung
        backend.close()
        return None

    def close(self) -> None:
        """Finish what is queued and free the engines."""
        with self._lock:
            self._closed = True
        for rung in self.rungs:
            rung.close()
