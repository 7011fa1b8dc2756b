"""While one session captures, nobody else of the process calls the device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from service.inference.backends.capturing import Captures


def started(block: Callable[[], AbstractContextManager[None]]) -> tuple[threading.Event, ...]:
    """A thread in, or before, the block: whether it is inside, and how to let it leave."""
    inside, leave = threading.Event(), threading.Event()

    def run() -> None:
        with block():
            inside.set()
            assert leave.wait(10)

    threading.Thread(target=run, daemon=True).start()
    return inside, leave


def test_calls_run_beside_each_other_and_a_capture_waits_for_them() -> None:
    captures = Captures()
    calls = [started(captures.call) for _ in range(2)]
    assert all(inside.wait(10) for inside, _ in calls)
    inside, leave = started(captures.capture)
    assert not inside.wait(0.05)
    late, leave_late = started(captures.call)
    assert not late.wait(0.05), "a capture goes before new calls"
    for _, leave_call in calls:
        leave_call.set()
    assert inside.wait(10)
    assert not late.wait(0.05)
    leave.set()
    assert late.wait(10)
    leave_late.set()


def test_one_capture_at_a_time_and_a_failed_one_lets_the_next_in() -> None:
    captures = Captures()
    with pytest.raises(ValueError, match="refused"), captures.capture():
        raise ValueError("refused")
    first, leave_first = started(captures.capture)
    assert first.wait(10)
    second, leave_second = started(captures.capture)
    assert not second.wait(0.05)
    leave_first.set()
    assert second.wait(10)
    leave_second.set()
