"""A rung: one engine, and the thread that owns it. It runs batches in the order given.

Where an engine takes the next batch before the last one is done, a second thread waits for
what the first one has begun.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import ParamSpec, TypeVar

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
Begin = Callable[[Batch], Callable[[], Float32Array]]
Begun = Callable[[], Float32Array] | BackendFault
P = ParamSpec("P")
R = TypeVar("R")


class Rung:
    """Runs batches on its backend; `done` is called on a thread of the rung."""

    def __init__(self, backend: Backend, *, name: str) -> None:
        self.backend = backend
        self.lost: BackendLost | None = None
        """Why the backend is never touched again, once it is lost."""
        self._work: SimpleQueue[tuple[Batch, Done] | None] = SimpleQueue()
        self._begun: SimpleQueue[tuple[Begun, float, Done] | None] = SimpleQueue()
        self._ended_s = 0.0
        """When the last batch was scored."""
        self._ender: threading.Thread | None = None
        """Waits for batches of an engine that takes the next one meanwhile."""
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

    def _run(self) -> None:
        """The thread that owns the engine."""
        while (work := self._work.get()) is not None:
            batch, done = work
            begun_s = time.monotonic()
            begin: Begin | None = getattr(self.backend, "begin", None)
            if begin is None:
                score = partial(self.backend.score, batch)
                done(self._guarded(self._end, score, begun_s))
                del score
            else:
                self._hand_on(self._guarded(begin, batch), begun_s, done)
            del batch, begin, done, work
        if self._ender is not None:
            self._begun.put(None)
            self._ender.join()
        if self.lost is None:  # a lost device is not even asked to free anything
            self.backend.close()

    def _hand_on(self, begun: Begun, begun_s: float, done: Done) -> None:
        """Let another thread wait for a batch, while the next one is begun in this one."""
        if self._ender is None:
            self._ender = threading.Thread(
                target=self._end_all, name=f"{self._thread.name}-end", daemon=True
            )
            self._ender.start()
        self._begun.put((begun, begun_s, done))

    def _end_all(self) -> None:
        while (work := self._begun.get()) is not None:
            begun, begun_s, done = work
            if isinstance(begun, BackendFault):
                done(begun)
            else:
                done(self._guarded(self._end, begun, begun_s))
            del begun, done, work

    def _guarded(self, step: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | BackendFault:
        """What a step of a batch gives, or why it failed."""
        try:
            if self.lost is not None:
                raise BackendLost(str(self.lost))  # noqa: TRY301  the device must not be touched
            return step(*args, **kwargs)
        except BackendLost as error:
            self.lost = error
            return error
        except BackendFault as error:
            return error
        except Exception as error:  # noqa: BLE001  the batch loop's boundary: one batch fails
            return BackendRecoverable(f"{type(error).__name__}: {error}")

    def _end(self, logits_of: Callable[[], Float32Array], begun_s: float) -> Scored:
        """Wait for a batch's logits; its time counts from when the engine was free for it."""
        backend = self.backend
        logits = logits_of()
        if not np.isfinite(logits).all():
            raise BackendRecoverable(f"{backend.kind} gave scores that are no numbers")
        started_s, self._ended_s = max(begun_s, self._ended_s), time.monotonic()
        return Scored(logits, backend.name, backend.precision, started_s, self._ended_s - started_s)

    def close(self) -> None:
        """Finish what is queued, free the engine in its own thread, and wait for it.

        A thread that hangs inside its engine is left behind.
        """
        self._work.put(None)
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            _log.error("engine thread does not end", extra={"rung": self.backend.kind})
