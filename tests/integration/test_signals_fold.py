"""The script in Redis folds events as the pure function that training uses."""

from __future__ import annotations

import random
import uuid
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis import Redis

from service.domain import Event, Signal
from service.encoding.history import VISIT_MS, fold
from service.signals.keys import keys_of
from service.signals.records import decode_records, encode_signal
from service.signals.writes import SCRIPT, Writes

MAX_MS = 10**14 - 1
ITEMS = st.sampled_from(["a", "b", "a/b", "ü", '"', "\\", "日本", "", "\x00", "1e3", "</"])
TIMES_MS = st.one_of(
    st.integers(0, 3 * VISIT_MS),
    st.sampled_from([0, VISIT_MS - 1, VISIT_MS, VISIT_MS + 1, MAX_MS - VISIT_MS, MAX_MS]),
)
DWELLS_MS = st.one_of(st.integers(0, 10_000), st.sampled_from([0, 2**31, MAX_MS]))
EVENTS = st.builds(
    Event,
    user=st.just("u"),
    item_id=st.one_of(ITEMS, st.sampled_from([f"i{n}" for n in range(20)])),
    type=st.sampled_from(["click", "dwell", "impression"]),
    at_ms=TIMES_MS,
    dwell_ms=DWELLS_MS,
    event_id=st.one_of(st.none(), st.sampled_from(["1", "2", "3"])),
    surface=st.sampled_from(["", "home", "ü/"]),
)


class Folded:
    """What Redis should hold after each call, by the pure function alone."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._seen: set[str] = set()
        self.signals: list[Signal] = []

    def after(self, call: list[Event]) -> tuple[int, int]:
        """Fold one call; how many events were accepted, and how many were duplicates."""
        duplicates = 0
        for event in call:
            if event.event_id is not None:
                if event.event_id in self._seen:
                    duplicates += 1
                    continue
                self._seen.add(event.event_id)
            if event.type != "impression":
                signal = Signal(
                    event.item_id, event.type, event.at_ms, event.dwell_ms, event.surface
                )
                self.signals = fold(self.signals, signal, keep=self._keep)
        return len(call) - duplicates, duplicates


def run_script(client: Redis, writes: Writes, user: str, events: list[Event]) -> Any:
    """One call of the script with the arguments that the service sends."""
    number_of_keys, *rest = writes._call(user, events)
    return client.eval(SCRIPT.decode(), int(number_of_keys), *rest)


def assert_script_equals_fold(url: str, calls: list[list[Event]], keep: int) -> None:
    user = uuid.uuid4().hex
    writes = Writes(None, keep=keep, ttl_s=60, writers=1)  # type: ignore[arg-type]
    expected = Folded(keep)
    with Redis.from_url(url, protocol=2) as client:
        for call in calls:
            accepted, duplicates, _ = run_script(client, writes, user, call)
            assert (accepted, duplicates) == expected.after(call)
            records: Any = client.lrange(keys_of(user).signals.decode(), 0, -1)
            assert list(decode_records(records).signals) == expected.signals


@settings(max_examples=60, deadline=None)
@given(
    calls=st.lists(st.lists(EVENTS, min_size=1, max_size=15), min_size=1, max_size=2),
    keep=st.sampled_from([1, 3, 20, 50]),
)
def test_the_script_equals_fold_for_strange_values(
    valkey_server: str, calls: list[list[Event]], keep: int
) -> None:
    assert_script_equals_fold(valkey_server, calls, keep)


@pytest.mark.parametrize("keep", [1, 3, 15, 16, 17, 50])
@pytest.mark.parametrize("items", [3, 20, 40])
def test_the_script_equals_fold_for_long_logs(valkey_server: str, keep: int, items: int) -> None:
    """Visits that end, windows that fill, lists that overflow, in calls of many sizes."""
    rng = random.Random(keep * 100 + items)
    at_ms = 0
    events = []
    for _ in range(600):
        # Whole parts of a visit, so that events also fall exactly on its end.
        at_ms += rng.choice([0, 0, 0, VISIT_MS // 6, VISIT_MS // 3, VISIT_MS // 2])
        events.append(
            Event(
                "u",
                f"i{rng.randrange(items)}",
                rng.choice(["click", "dwell", "impression"]),
                max(0, at_ms + rng.choice([0, 0, -VISIT_MS, VISIT_MS])),
                dwell_ms=rng.choice([0, 100, 5000]),
                event_id=rng.choice([None, f"e{rng.randrange(500)}"]),
            )
        )
    calls = []
    while events:
        size = rng.choice([1, 5, 60])
        calls.append(events[:size])
        events = events[size:]
    assert_script_equals_fold(valkey_server, calls, keep)


def test_records_that_readers_skip_take_in_no_event(valkey_url: str) -> None:
    """An event that joined a record which does not decode would be lost."""
    own = Signal("x", "click", 1000)
    unreadable = [
        b"not json",
        b'["x"]',
        b'{"i":"x","a":"impression","t":1000}',
        b'{"i":"x","a":"click","t":1000.5}',
        b'{"i":"x","a":"click","t":-1}',
        b'{"i":"x","a":"click","t":"1000"}',
        b'{"i":"x","a":"click","t":1000,"d":-5}',
        b'{"i":"x","a":"click","t":1000,"s":7}',
        b'{"i":["x"],"a":"click","t":1000}',
    ]
    writes = Writes(None, keep=50, ttl_s=60, writers=1)  # type: ignore[arg-type]
    with Redis.from_url(valkey_url, protocol=2) as client:
        client.lpush("signals:{u}", *unreadable)
        run_script(client, writes, "u", [Event("u", "x", "click", 1000)])
        records: Any = client.lrange("signals:{u}", 0, -1)
    assert records == [encode_signal(own), *reversed(unreadable)]
