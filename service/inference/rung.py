"""A rung: one engine, and the one thread that owns it. It runs batches in the order given."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

import msgspec
import numpy as np

from service.domain import BackendName, Float32Array
from service.encoding.batch import Batch
from service.errors import BackendFault, BackendLost, BackendRecoverable
from service.inference.backends.base import Backend

_log = logging.getLogger("ranker.rungs")
_CLOSE_S = 15.0


class Scored(msgspec.Struct, frozen=True):
    """A batch's logits [N, T, 2], who computed them, and how long it took."""

    logits: Float32Array
    backend: BackendName
    precision: str
    started_s: float
    """On the monotonic clock."""
    seconds: float


Done = Callable[[Scored | BackendFault], None]


class Rung:
    """Runs batches on its backend; `done` is called on the rung's own thread."""

    def __init__(self, backend: Backend, *, name: str) -> None:
        self.backend = backend
        self.lost: BackendLost | None = None
        """Why the backend is never touched again, once it is lost."""
        self._work: SimpleQueue[tuple[Batch, Done] | None] = SimpleQueue()
        self._thread = threading.Thread(
            target=self._run, name=f"{backend.kind}-{name}", daemon=True
        )
        self._thread.start()

    def submit(self, batch: Batch, done: Done) -> None:
        """Queue one batch; never blocks."""
        self._work.put((batch, done))

    def run(self, batch: Batch) -> Scored:
        """Run one batch on the rung's thread and wait for it; raises BackendFault."""
        answer: Future[Scored] = Future()

        def done(result: Scored | BackendFault) -> None:
            if isinstance(result, BackendFault):
                answer.set_exception(result)
            else:
                answer.set_result(result)

        self.submit(batch, done)
        return answer.result()

    def _score(self, batch: Batch) -> Scored:
        if self.lost is not None:
            raise BackendLost(str(self.lost))
        backend = self.backend
        started = time.monotonic()
        logits = backend.score(batch)
        if not np.isfinite(logits).all():
            raise BackendRecoverable(f"{backend.kind} gave scores that are no numbers")
        seconds = time.monotonic() - started
        return Scored(logits, backend.name, backend.precision, started, seconds)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            batch, done = work
            try:
                result: Scored | BackendFault = self._score(batch)
            except BackendLost as error:
                self.lost = result = error
            except BackendFault as error:
                result = error
            except Exception as error:  # noqa: BLE001  the batch loop's boundary: one batch fails
                result = BackendRecoverable(f"{type(error).__name__}: {error}")
            done(result)
            del batch, done, result, work
        if self.lost is None:  # a lost device is not even asked to free anything
            self.backend.close()

    def close(self) -> None:
        """Finish what is queued, free the engine in its own thread, and wait for it.

        A thread that hangs inside its engine is left behind.
        """
        self._work.put(None)
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            _log.error("engine thread does not end", extra={"rung": self.backend.kind})
