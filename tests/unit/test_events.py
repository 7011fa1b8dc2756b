import time

import pytest

from service.errors import MalformedBody, RequestFault
from service.http.events import MAX_EVENTS, parse_events

CLICK = b'{"type":"click","user_id":"u","item_id":"a","ts":1700000000000}'


def test_one_event_a_list_and_ndjson_are_the_same() -> None:
    bodies = [(CLICK, False), (b'{"events":[' + CLICK + b"]}", False), (CLICK + b"\n\n", True)]
    parsed = [parse_events(body, ndjson=ndjson).events for body, ndjson in bodies]
    assert parsed[0] == parsed[1] == parsed[2]
    assert parsed[0][0].at_ms == 1_700_000_000_000


@pytest.mark.parametrize(
    ("event", "field"),
    [
        (b'{"type":"click","user_id":"u"}', "item_id"),
        (b'{"type":"like","user_id":"u","item_id":"a"}', "type"),
        (b'{"type":"click","item_id":"a"}', "user_id"),
        (b'{"type":"dwell","user_id":"u","item_id":"a"}', "dwell_ms"),
        (b'{"type":"dwell","user_id":"u","item_id":"a","dwell_ms":-1}', "dwell_ms"),
        (b'{"type":"click","user_id":"u","item_id":"a","ts":1700000000}', "ts"),
        (b'{"type":"click","user_id":"","item_id":"a"}', "user_id"),
        (b'{"type":"click","user_id":"u","item_id":"a","color":"red"}', "color"),
        (b"7", ""),
    ],
)
def test_a_bad_event_is_rejected_alone_with_its_field(event: bytes, field: str) -> None:
    parsed = parse_events(b'{"events":[' + event + b"," + CLICK + b"]}", ndjson=False)
    assert [event.item_id for event in parsed.events] == ["a"]
    assert [(fault.index, fault.field) for fault in parsed.rejected] == [(0, field)]
    assert parsed.rejected[0].detail


def test_a_broken_ndjson_line_does_not_take_the_others_with_it() -> None:
    parsed = parse_events(CLICK + b'\n{"type":\n' + CLICK, ndjson=True)
    assert len(parsed.events) == 2
    assert [(fault.index, fault.code) for fault in parsed.rejected] == [(1, "malformed_body")]


def test_future_times_are_clamped_and_counted() -> None:
    event = CLICK.replace(b"1700000000000", b"4000000000000")
    parsed = parse_events(event, ndjson=False)
    assert parsed.clamped == 1
    assert parsed.events[0].at_ms <= time.time() * 1e3


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe"])
def test_a_body_that_is_no_object_is_a_fault_of_the_body(body: bytes) -> None:
    with pytest.raises(RequestFault):
        parse_events(body, ndjson=False)


def test_what_is_not_json_is_malformed() -> None:
    with pytest.raises(MalformedBody):
        parse_events(b"{nope", ndjson=False)


def test_too_many_events_are_refused_whole() -> None:
    body = b'{"events":[' + b",".join([CLICK] * (MAX_EVENTS + 1)) + b"]}"
    with pytest.raises(RequestFault, match="at most 1000"):
        parse_events(body, ndjson=False)
