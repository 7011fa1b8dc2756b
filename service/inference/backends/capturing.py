"""Who may call CUDA while a session of this process captures its launches: nobody else.

ONNX Runtime captures in CUDA's global mode, in which an allocation or a wait by another
thread makes the capture fail.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Captures:
    """Many may call, or one may capture, which goes before new calls."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._calls = 0
        self._captures = 0
        """Those that wait or run."""
        self._turn = threading.Lock()

    @contextmanager
    def call(self) -> Iterator[None]:
        """Keep captures out for the block."""
        with self._changed:
            self._changed.wait_for(lambda: not self._captures)
            self._calls += 1
        try:
            yield
        finally:
            with self._changed:
                self._calls -= 1
                self._changed.notify_all()

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Keep calls and other captures out for the block."""
        with self._changed:
            self._captures += 1
        try:
            with self._turn:
                with self._changed:
                    self._changed.wait_for(lambda: not self._calls)
                yield
        finally:
            with self._changed:
                self._captures -= 1
                self._changed.notify_all()


captures = Captures()
"""Of this process: every backend on CUDA holds it around what it calls."""
