"""Body shapes and codecs, and the one table from errors to statuses."""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec
import orjson

from service import errors as e
from service.domain import BackendName, DegradedReason, SignalSource
from service.ranking.query import Query, Ranking

T = TypeVar("T")

_query = msgspec.json.Decoder(Query)
_encode = msgspec.json.Encoder().encode

# first match wins, so the particular stands before the general
_STATUS: tuple[tuple[type[e.RankerError], int, str], ...] = (
    (e.MalformedBody, 400, "malformed_body"),
    (e.Unauthenticated, 401, "unauthenticated"),
    (e.Forbidden, 403, "forbidden"),
    (e.NotFound, 404, "not_found"),
    (e.Conflict, 409, "conflict"),
    (e.TooLarge, 413, "too_large"),
    (e.RequestFault, 422, "invalid_request"),
    (e.QuotaExceeded, 429, "quota_exceeded"),
    (e.Overloaded, 503, "overloaded"),
    (e.NotReady, 503, "not_ready"),
    (e.SignalsMissing, 503, "signals_unavailable"),
    (e.SignalFault, 503, "signals_unavailable"),
    (e.FleetFault, 503, "fleet_unavailable"),
    (e.DeadlineExceeded, 504, "deadline_exceeded"),
)
CODES = {code: status for _, status, code in _STATUS} | {"internal": 500}
_NAMED_FIELD = re.compile(r"(?:missing required|unknown) field `(.+)`")
_PATTERN = re.compile(r"matching regex .*", re.DOTALL)
_RETRYABLE = frozenset({429, 503, 504})


class Problem(msgspec.Struct, frozen=True, omit_defaults=True):
    """An error as RFC 9457 has it, with our `code`, `request_id` and `retryable`."""

    title: str
    status: int
    detail: str
    code: str
    request_id: str
    retryable: bool
    type: str = "about:blank"
    field: str = ""
    """Path of the wrong field, such as `items[3].id`."""
    retry_after_s: float = 0.0
    rejected: list[Any] = []


class RankedItem(msgspec.Struct, frozen=True, gc=False):
    """A candidate in its new place."""

    id: str
    index: int
    """Its place in the request."""
    score: float


class Model(msgspec.Struct, frozen=True, gc=False):
    """The version that ranked."""

    name: str
    version: str
    backend: BackendName
    precision: str


class Signals(msgspec.Struct, frozen=True, gc=False):
    """The signals that were used."""

    source: SignalSource
    count: int
    age_ms: int | None
    """Age of the newest one."""


class TimingMs(msgspec.Struct, frozen=True, gc=False):
    """Milliseconds by stage."""

    total: float
    signals: float
    queue: float
    inference: float


class RankAnswer(msgspec.Struct, frozen=True):
    """The 200 body of `POST /rank`."""

    request_id: str
    ranking_id: str
    model: Model
    items: list[RankedItem]
    degraded: list[DegradedReason]
    signals: Signals
    timing_ms: TimingMs


def problem_of(error: Exception, request_id: str) -> Problem:
    """The problem that tells of an error; anything not ours is `internal`."""
    status, code = next(
        ((status, code) for kind, status, code in _STATUS if isinstance(error, kind)),
        (500, "internal"),
    )
    detail = str(error) if status != HTTPStatus.INTERNAL_SERVER_ERROR else "a bug; see the log"
    retry_after_s = getattr(error, "retry_after_s", 1.0) if status in _RETRYABLE else 0.0
    return Problem(
        title=HTTPStatus(status).phrase,
        status=status,
        detail=detail,
        code=code,
        request_id=request_id,
        retryable=retry_after_s > 0,
        field=error.field if isinstance(error, e.RequestFault) else "",
        retry_after_s=retry_after_s,
    )


def decode_query(body: bytes) -> Query:
    """A `/rank` body; raises MalformedBody or RequestFault with the field and the reason."""
    return decode(_query, body)


def decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Decode a body; raises MalformedBody or RequestFault with the field and the reason.

    JSON knows one kind of number, so 3.0 is taken where an integer is wanted; msgspec
    refuses that, and only such a body is read a second time.
    """
    try:
        return decoder.decode(body)
    except RecursionError as error:
        raise e.MalformedBody("the body is nested too deeply") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if "got `float`" in str(error):
            return _decode_again(decoder, body, error)
        raise fault_of(error) from error


def _decode_again(
    decoder: msgspec.json.Decoder[T], body: bytes, first: msgspec.DecodeError | UnicodeDecodeError
) -> T:
    try:
        whole: T = msgspec.convert(_integral(orjson.loads(body)), decoder.type)
    except msgspec.ValidationError:
        raise fault_of(first) from first
    except (orjson.JSONDecodeError, RecursionError) as error:
        raise e.MalformedBody(f"the body is not valid JSON: {error}") from error
    return whole


def _integral(value: Any) -> Any:
    match value:
        case float() if value.is_integer():
            return int(value)
        case list():
            return [_integral(part) for part in value]
        case dict():
            return {key: _integral(part) for key, part in value.items()}
    return value


def fault_of(error: msgspec.DecodeError | UnicodeDecodeError) -> e.RequestFault:
    """Msgspec's words as a fault with a field."""
    if not isinstance(error, msgspec.ValidationError):
        return e.MalformedBody(f"the body is not valid JSON: {error}")
    reason, _, path = str(error).partition(" - at `$")
    reason = _PATTERN.sub("of the form that the documentation tells", reason)
    path = path.rstrip("`")
    named = _NAMED_FIELD.search(reason)
    if named is not None:
        path += f".{named[1]}"
    return e.RequestFault(reason, field=path.removeprefix("."))


def encode_ranking(ranking: Ranking) -> bytes:
    """The 200 body of `/rank`."""
    times = ranking.times
    return _encode(
        RankAnswer(
            ranking.request_id,
            ranking.ranking_id,
            Model(ranking.model_name, ranking.model_version, ranking.backend, ranking.precision),
            list(map(RankedItem, ranking.ids, ranking.indexes, ranking.scores)),
            ranking.degraded,
            Signals(ranking.signal_source, ranking.signal_count, ranking.signal_age_ms),
            TimingMs(
                round(times.total_s * 1e3, 3),
                round(times.signals_s * 1e3, 3),
                round(times.queue_s * 1e3, 3),
                round(times.inference_s * 1e3, 3),
            ),
        )
    )


def server_timing(ranking: Ranking) -> str:
    """The stages as a `Server-Timing` header."""
    times = ranking.times
    return (
        f"signals;dur={times.signals_s * 1e3:.3f}, queue;dur={times.queue_s * 1e3:.3f}, "
        f"inference;dur={times.inference_s * 1e3:.3f}, total;dur={times.total_s * 1e3:.3f}"
    )
