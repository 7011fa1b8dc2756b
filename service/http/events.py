"""Bodies of `POST /v1/events`: one event, a list, or NDJSON; each event stands on its own."""

from __future__ import annotations

import time
from typing import Annotated

import msgspec
from msgspec import Meta

from service.domain import Event, EventType, Word, user_key
from service.errors import MalformedBody, RequestFault
from service.http.wire import decode, fault_of
from service.ranking.query import Id

MAX_EVENTS = 1_000
DwellMs = Annotated[int, Meta(ge=0, le=86_400_000)]


class _EventBody(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"
):
    item_id: Id
    user_id: Id | None = None
    session_id: Id | None = None
    event_id: Id | None = None
    """Dedupe key: the same one is counted once a user."""
    ranking_id: Id | None = None
    position: Annotated[int, Meta(ge=0, le=1_000_000)] | None = None
    surface: Word = ""
    dwell_ms: DwellMs | None = None
    ts: Annotated[int, Meta(ge=10**11, le=2**52)] | None = None
    """When it happened, in ms since 1970; now if absent, never in the future.

    A time before 1973 is a time in seconds, sent where milliseconds are wanted.
    """


class Impression(_EventBody, frozen=True, kw_only=True, tag="impression"):
    """The item was shown: counted, but no signal."""


class Click(_EventBody, frozen=True, kw_only=True, tag="click"):
    """The item was clicked, and perhaps looked at for a while."""


class Dwell(_EventBody, frozen=True, kw_only=True, tag="dwell"):
    """The item was looked at for `dwell_ms`."""

    dwell_ms: DwellMs


EventBody = Impression | Click | Dwell
_TYPES: dict[type, EventType] = {Impression: "impression", Click: "click", Dwell: "dwell"}


class EventList(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Several events in one body."""

    events: Annotated[list[EventBody], Meta(min_length=1, max_length=MAX_EVENTS)]


class Rejected(msgspec.Struct, frozen=True):
    """An event of the body that was not taken, and why."""

    index: int
    code: str
    detail: str
    field: str = ""


class Accepted(msgspec.Struct, frozen=True, kw_only=True):
    """The 202 body of `/v1/events`."""

    accepted: int
    duplicates: int
    clamped: int
    """Events whose time lay in the future."""
    rejected: list[Rejected]
    signal_token: str


class Parsed(msgspec.Struct, frozen=True):
    """A body taken apart."""

    events: list[Event]
    rejected: list[Rejected]
    clamped: int


class _RawList(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    events: list[msgspec.Raw]


_raw_list = msgspec.json.Decoder(_RawList)
_event: msgspec.json.Decoder[EventBody] = msgspec.json.Decoder(EventBody)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def parse_events(body: bytes, *, ndjson: bool) -> Parsed:
    """Every event of a body; raises MalformedBody or RequestFault for the body as a whole."""
    parts = [line for line in body.splitlines() if line.strip()] if ndjson else _split(body)
    if not parts:
        raise RequestFault("no events", field="events")
    if len(parts) > MAX_EVENTS:
        raise RequestFault(
            f"{len(parts)} events, at most {MAX_EVENTS} are taken at once", field="events"
        )
    now_ms = time.time_ns() // 1_000_000
    events: list[Event] = []
    rejected: list[Rejected] = []
    clamped = 0
    for index, part in enumerate(parts):
        try:
            event = _decode(part)
        except RequestFault as fault:
            rejected.append(Rejected(index, fault.code, fault.detail, fault.field))
            continue
        at_ms = now_ms if event.ts is None else event.ts
        if at_ms > now_ms:
            at_ms = now_ms
            clamped += 1
        events.append(
            Event(
                user=user_key(event.user_id, event.session_id),
                item_id=event.item_id,
                type=_TYPES[type(event)],
                at_ms=at_ms,
                dwell_ms=event.dwell_ms or 0,
                event_id=event.event_id,
                surface=event.surface,
                ranking_id=event.ranking_id,
            )
        )
    return Parsed(events, rejected, clamped)


def _split(body: bytes) -> list[bytes]:
    try:
        fields = _fields.decode(body)
        if "events" not in fields:
            return [body]
        return [bytes(raw) for raw in _raw_list.decode(body).events]
    except RecursionError as error:
        raise MalformedBody("the body is nested too deeply") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise fault_of(error) from error


def _decode(part: bytes) -> EventBody:
    try:
        event = decode(_event, part)
    except MalformedBody as fault:
        raise RequestFault(fault.detail, code="malformed_body") from fault
    except RequestFault as fault:
        if fault.field == "ts":
            fault.detail = f"ts is in milliseconds since 1970: {fault.detail}"
        raise
    if event.user_id is None and event.session_id is None:
        raise RequestFault("user_id or session_id is required", field="user_id")
    return event
