"""How many requests may be in flight: fewer while turns come late, more again after."""

from __future__ import annotations

import time

import pytest

from service.ranking.admission import Admission

LATE_S = 0.025


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1_000.0]
    monkeypatch.setattr("service.ranking.admission.time.monotonic", lambda: now[0])
    return now


def enter(gate: Admission, count: int) -> list[bool]:
    return [gate.__enter__() for _ in range(count)]


def turn(gate: Admission, clock: list[float], *, late: bool) -> None:
    clock[0] += 0.2
    gate.note_turn(clock[0] - (0.1 if late else 0.001))


def test_the_last_place_is_taken_and_the_next_refused() -> None:
    gate = Admission(max_in_flight=2)
    assert enter(gate, 3) == [True, True, False]
    gate.__exit__()
    gate.__exit__()
    assert enter(gate, 1) == [True]
    assert gate.in_flight == 2


def test_late_turns_lower_the_limit_to_what_one_batch_takes(clock: list[float]) -> None:
    gate = Admission(max_in_flight=1_000, late_s=LATE_S)
    assert all(enter(gate, 500))
    turn(gate, clock, late=True)
    assert gate.limit == pytest.approx(350)
    assert enter(gate, 1) == [False]
    for _ in range(20):
        turn(gate, clock, late=True)
    assert gate.limit == 32


def test_a_burst_of_late_turns_counts_once(clock: list[float]) -> None:
    gate = Admission(max_in_flight=1_000, late_s=LATE_S)
    enter(gate, 1_000)
    for _ in range(50):
        gate.note_turn(clock[0] - 0.1)
    assert gate.limit == pytest.approx(700)


def test_turns_in_time_raise_it_again_while_it_is_needed(clock: list[float]) -> None:
    gate = Admission(max_in_flight=100, late_s=LATE_S)
    enter(gate, 40)
    for _ in range(10):
        turn(gate, clock, late=True)
    assert gate.limit == 32
    for _ in range(5_000):
        turn(gate, clock, late=False)
    assert 79 < gate.limit < 82, "no more than twice what is in flight"
    enter(gate, 60)
    for _ in range(5_000):
        turn(gate, clock, late=False)
    assert gate.limit == 100


def test_without_a_bound_on_lateness_the_limit_stays() -> None:
    gate = Admission(max_in_flight=10)
    gate.note_turn(time.monotonic() - 3_600)
    assert gate.limit == 10
