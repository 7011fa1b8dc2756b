"""Body shapes and codecs, and the one table from errors to statuses."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import msgspec
import orjson

from service import errors as e
from service.ranking.query import Query, Ranking

_query = msgspec.json.Decoder(Query)

# first match wins, so the particular stands before the general
_STATUS: tuple[tuple[type[e.RankerError], int, str], ...] = (
    (e.MalformedBody, 400, "malformed_body"),
    (e.Unauthenticated, 401, "unauthenticated"),
    (e.Forbidden, 403, "forbidden"),
    (e.NotFound, 404, "not_found"),
    (e.TooLarge, 413, "too_large"),
    (e.RequestFault, 422, "invalid_request"),
    (e.QuotaExceeded, 429, "quota_exceeded"),
    (e.Overloaded, 503, "overloaded"),
    (e.NotReady, 503, "not_ready"),
    (e.SignalsMissing, 503, "signals_unavailable"),
    (e.SignalFault, 503, "signals_unavailable"),
    (e.DeadlineExceeded, 504, "deadline_exceeded"),
)
CODES = {code: status for _, status, code in _STATUS} | {"internal": 500}
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


def problem_of(error: Exception, request_id: str) -> Problem:
    """The problem that tells of an error; anything not ours is `internal`."""
    status, code = next(
        ((status, code) for kind, status, code in _STATUS if isinstance(error, kind)),
        (500, "internal"),
    )
    detail = str(error) if status != HTTPStatus.INTERNAL_SERVER_ERROR else "a bug; see the log"
    return Problem(
        title=HTTPStatus(status).phrase,
        status=status,
        detail=detail,
        code=code,
        request_id=request_id,
        retryable=status in _RETRYABLE,
        field=error.field if isinstance(error, e.RequestFault) else "",
        retry_after_s=getattr(error, "retry_after_s", 1.0) if status in _RETRYABLE else 0.0,
    )


def decode_query(body: bytes) -> Query:
    """A `/rank` body; raises MalformedBody or RequestFault with the field and the reason."""
    try:
        return _query.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise fault_of(error) from error


def fault_of(error: msgspec.DecodeError | UnicodeDecodeError) -> e.RequestFault:
    """Msgspec's words as a fault with a field."""
    if not isinstance(error, msgspec.ValidationError):
        return e.MalformedBody(f"the body is not valid JSON: {error}")
    reason, _, path = str(error).partition(" - at `$")
    return e.RequestFault(reason, field=path.rstrip("`").removeprefix("."))


def encode_ranking(ranking: Ranking) -> bytes:
    """The 200 body of `/rank`."""
    times = ranking.times
    rows = zip(ranking.ids, ranking.indexes, ranking.scores, strict=True)
    return orjson.dumps(
        {
            "request_id": ranking.request_id,
            "ranking_id": ranking.ranking_id,
            "model": {
                "name": ranking.model_name,
                "version": ranking.model_version,
                "backend": ranking.backend,
                "precision": ranking.precision,
            },
            "items": [{"id": id_, "index": index, "score": score} for id_, index, score in rows],
            "degraded": ranking.degraded,
            "signals": {
                "source": ranking.signal_source,
                "count": ranking.signal_count,
                "age_ms": ranking.signal_age_ms,
            },
            "timing_ms": {
                "total": round(times.total_s * 1e3, 3),
                "signals": round(times.signals_s * 1e3, 3),
                "queue": round(times.queue_s * 1e3, 3),
                "inference": round(times.inference_s * 1e3, 3),
            },
        }
    )


def server_timing(ranking: Ranking) -> str:
    """The stages as a `Server-Timing` header."""
    times = ranking.times
    return (
        f"signals;dur={times.signals_s * 1e3:.3f}, queue;dur={times.queue_s * 1e3:.3f}, "
        f"inference;dur={times.inference_s * 1e3:.3f}, total;dur={times.total_s * 1e3:.3f}"
    )
