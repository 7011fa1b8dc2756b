"""The device thread: one thread owns the engines of a version, and nothing else touches them.

It runs a batch on the first rung of the ladder and, if that fails, once on the next.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue

import msgspec
import numpy as np

from service.domain import BackendName, Float32Array
from service.encoding.batch import Batch
from service.errors import BackendFault, BackendRecoverable
from service.inference.backends.base import Backend


class Scored(msgspec.Struct, frozen=True):
    """A batch's logits [N, T, 2], who computed them, and how long it took."""

    logits: Float32Array
    backend: BackendName
    precision: str
    rung: int
    """0 for the first choice; more means that a fallback answered."""
    started_s: float
    """On the monotonic clock."""
    seconds: float


Done = Callable[[Scored | BackendFault], None]


class Executor:
    """Runs batches in the order given; `done` is called on the device thread."""

    def __init__(self, rungs: Sequence[Backend], *, name: str) -> None:
        assert rungs
        self.rungs = tuple(rungs)
        self._work: SimpleQueue[tuple[Batch, Done] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"device-{name}", daemon=True)
        self._thread.start()

    def submit(self, batch: Batch, done: Done) -> None:
        """Queue one batch; never blocks."""
        self._work.put((batch, done))

    def run(self, batch: Batch) -> Scored:
        """Run one batch on the device thread and wait for it; raises BackendFault."""
        answer: Future[Scored] = Future()

        def done(result: Scored | BackendFault) -> None:
            if isinstance(result, BackendFault):
                answer.set_exception(result)
            else:
                answer.set_result(result)

        self.submit(batch, done)
        return answer.result()

    def _climb(self, batch: Batch) -> Scored:
        """Run one batch on the first rung that can; raises the last rung's BackendFault."""
        fault: BackendFault | None = None
        for rung, backend in enumerate(self.rungs[:2]):
            started = time.monotonic()
            try:
                logits = backend.score(batch)
                if not np.isfinite(logits).all():
                    raise BackendRecoverable(f"{backend.name} gave scores that are no numbers")
            except BackendFault as error:
                fault = error
                continue
            return Scored(
                logits, backend.name, backend.precision, rung, started, time.monotonic() - started
            )
        assert fault is not None
        raise fault

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            batch, done = work
            try:
                result: Scored | BackendFault = self._climb(batch)
            except BackendFault as error:
                result = error
            except Exception as error:  # noqa: BLE001  the batch loop's boundary: one batch fails
                result = BackendRecoverable(f"{type(error).__name__}: {error}")
            done(result)
            del batch, done, result, work
        for backend in self.rungs:
            backend.close()

    def close(self) -> None:
        """Finish what is queued, free the engines in their own thread, and wait for it."""
        self._work.put(None)
        self._thread.join()
