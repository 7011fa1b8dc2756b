"""The data routes: `POST /rank`, `POST /v1/events`, `DELETE /v1/users/{user_id}`.

Each is an endpoint of an exchange; telemetry is written after the reply.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from service.domain import Event, Outcome
from service.errors import (
    DeadlineExceeded,
    Overloaded,
    RankerError,
    RequestFault,
)
from service.http.access import Access
from service.http.asgi import (
    JSON,
    CallerLeft,
    Exchange,
    Headers,
    header,
    reply_problem,
    request_id_of,
)
from service.http.events import Accepted, Parsed, Rejected, parse_events
from service.http.wire import (
    Problem,
    decode_query,
    encode_ranking,
    problem_of,
    server_timing,
)
from service.ranking.admission import Deadline
from service.ranking.query import MAX_TIMEOUT_MS, Query, Ranking, Report
from service.ranking.ranker import Ranker, new_id

_log = logging.getLogger("ranker.http")
_NDJSON = ("application/x-ndjson", "application/ndjson", "application/jsonl")

Record = Callable[[Report], None]
CountEvents = Callable[[str, int], None]
Answered = Callable[[Ranking], None]
Stored = Callable[[Sequence[Event]], None]


class EventSink(Protocol):
    """Where events and the forgetting of a user go."""

    async def write(self, events: Sequence[Event]) -> Written:
        """Store events; raises SignalFault if they are not stored."""
        ...

    async def forget(self, user: str) -> None:
        """Remove all that is known of a user; raises SignalFault."""
        ...


class Written(Protocol):
    """What the sink says of a write."""

    @property
    def accepted(self) -> int:
        """Events taken."""
        ...

    @property
    def duplicates(self) -> int:
        """Events known already."""
        ...

    @property
    def token(self) -> str:
        """What makes a later read see this write."""
        ...


class RankEndpoint:
    """`POST /rank`."""

    def __init__(
        self,
        ranker: Ranker,
        *,
        access: Access,
        record: Record,
        answered: Answered,
        max_body_bytes: int,
        timeout_s: float,
    ) -> None:
        """`record` and `answered` are called after the reply."""
        self._ranker = ranker
        self._access = access
        self._record = record
        self._max_body_bytes = max_body_bytes
        self._timeout_s = timeout_s
        self._answered = answered

    async def __call__(self, exchange: Exchange) -> None:
        """Answer one request."""
        headers = exchange.headers
        request_id = request_id_of(headers) or ""
        answered: Ranking | None = None
        try:
            self._access.check(headers)
            query = decode_query(await exchange.body(self._max_body_bytes))
            if query.request_id is None:
                query = msgspec.structs.replace(query, request_id=request_id or new_id())
            request_id = query.request_id or ""
            deadline = Deadline(self._timeout(headers, query), received_s=exchange.received_s)
            exchange.cancel_on_leave = True
            ranking = await self._ranker.rank(query, deadline)
            exchange.cancel_on_leave = False
            ranking.times.total_s = time.monotonic() - exchange.received_s
            await _reply_ranking(exchange, ranking)
            report = _report_of(ranking, len(query.items), exchange)
            answered = ranking
        except CallerLeft:
            report = _unanswered("/rank", request_id, exchange)
        except asyncio.CancelledError:
            if not exchange.gone:
                raise
            _uncancel()
            report = _unanswered("/rank", request_id, exchange)
        except Exception as error:  # noqa: BLE001  a bug becomes a 500, and the log has it
            exchange.cancel_on_leave = False
            report = await _reply_error(exchange, error, request_id or new_id(), route="/rank")
        report.times.total_s = time.monotonic() - exchange.received_s
        self._record(report)
        if answered is not None:
            self._answered(answered)

    def _timeout(self, headers: Headers, query: Query) -> float:
        timeout_s = self._timeout_s if query.timeout_ms is None else query.timeout_ms / 1e3
        given = header(headers, b"x-request-timeout-ms")
        if given is None:
            return timeout_s
        try:
            wanted_ms = float(given)
        except ValueError:
            wanted_ms = -1.0
        if not 0 < wanted_ms <= MAX_TIMEOUT_MS:
            raise RequestFault(
                f"not a number of ms above 0, at most {MAX_TIMEOUT_MS}",
                field="X-Request-Timeout-Ms",
            )
        return min(timeout_s, wanted_ms / 1e3)


def _uncancel() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.uncancel()


async def _reply_ranking(exchange: Exchange, ranking: Ranking) -> None:
    headers = [
        JSON,
        (b"x-request-id", ranking.request_id.encode()),
        (b"x-model-version", ranking.model_version.encode()),
        (b"server-timing", server_timing(ranking).encode()),
    ]
    if ranking.degraded:
        headers.append((b"x-degraded", ",".join(ranking.degraded).encode()))
    await exchange.reply(200, headers, encode_ranking(ranking))


def _report_of(ranking: Ranking, candidates: int, exchange: Exchange) -> Report:
    return Report(
        route="/rank",
        outcome="degraded" if ranking.degraded else "ok",
        status=200,
        request_id=ranking.request_id,
        started_s=exchange.received_s,
        headers=exchange.headers,
        model_name=ranking.model_name,
        model_version=ranking.model_version,
        backend=ranking.backend,
        precision=ranking.precision,
        degraded=tuple(ranking.degraded),
        candidates=candidates,
        signal_source=ranking.signal_source,
        signal_count=ranking.signal_count,
        signal_age_ms=ranking.signal_age_ms,
        times=ranking.times,
        batch=ranking.batch,
    )


def _unanswered(route: str, request_id: str, exchange: Exchange) -> Report:
    return Report(
        route=route,
        outcome="cancelled",
        status=499,
        request_id=request_id,
        started_s=exchange.received_s,
        headers=exchange.headers,
    )


async def _reply_error(
    exchange: Exchange, error: Exception, request_id: str, *, route: str
) -> Report:
    if not isinstance(error, RankerError):
        _log.error("unexpected error", exc_info=error, extra={"request_id": request_id})
    problem = problem_of(error, request_id)
    await reply_problem(exchange, problem)
    return Report(
        route=route,
        outcome=_outcome(error),
        status=problem.status,
        request_id=request_id,
        started_s=exchange.received_s,
        headers=exchange.headers,
        detail=problem.code,  # the problem's own words may quote an item
    )


def _outcome(error: Exception) -> Outcome:
    match error:
        case RequestFault():
            return "invalid"
        case DeadlineExceeded():
            return "expired"
        case Overloaded():
            return "overloaded"
        case _:
            return "failed"


class EventsEndpoint:
    """`POST /v1/events`."""

    def __init__(
        self,
        sink: EventSink,
        *,
        access: Access,
        record: Record,
        count: CountEvents,
        stored: Stored,
        max_body_bytes: int,
    ) -> None:
        self._sink = sink
        self._access = access
        self._record = record
        self._count = count
        self._stored = stored
        self._max_body_bytes = max_body_bytes

    async def __call__(self, exchange: Exchange) -> None:
        """Answer 202 once the events are in the signal store."""
        route = "/v1/events"
        headers = exchange.headers
        request_id = request_id_of(headers) or new_id()
        outcome: Outcome = "ok"
        status = 202
        try:
            self._access.check(headers)
            body = await exchange.body(self._max_body_bytes)
            kind = (header(headers, b"content-type") or "").partition(";")[0].strip().lower()
            parsed = parse_events(body, ndjson=kind in _NDJSON)
            if parsed.events:
                written = await self._sink.write(parsed.events)
                await _reply_accepted(exchange, parsed, written, request_id)
                self._stored(parsed.events)
                self._count("accepted", written.accepted)
                self._count("duplicate", written.duplicates)
                self._count("clamped", parsed.clamped)
            else:
                outcome, status = "invalid", 422
                await reply_problem(exchange, _all_rejected(parsed.rejected, request_id))
            self._count("rejected", len(parsed.rejected))
            report = Report(
                route=route,
                outcome=outcome,
                status=status,
                request_id=request_id,
                started_s=exchange.received_s,
                headers=headers,
            )
        except CallerLeft:
            report = _unanswered(route, request_id, exchange)
        except Exception as error:  # noqa: BLE001  a bug becomes a 500, and the log has it
            report = await _reply_error(exchange, error, request_id, route=route)
        report.times.total_s = time.monotonic() - exchange.received_s
        self._record(report)


async def _reply_accepted(
    exchange: Exchange, parsed: Parsed, written: Written, request_id: str
) -> None:
    accepted = Accepted(
        accepted=written.accepted,
        duplicates=written.duplicates,
        clamped=parsed.clamped,
        rejected=parsed.rejected,
        signal_token=written.token,
    )
    headers = [JSON, (b"x-request-id", request_id.encode())]
    await exchange.reply(202, headers, msgspec.json.encode(accepted))


def _all_rejected(rejected: list[Rejected], request_id: str) -> Problem:
    """A body without one good event is an error, which names the first reason."""
    first = rejected[0]
    problem = problem_of(RequestFault(first.detail, field=first.field), request_id)
    return msgspec.structs.replace(problem, rejected=rejected)


async def forget_user(user_id: str, *, sink: EventSink, access: Access, exchange: Exchange) -> None:
    """`DELETE /v1/users/{user_id}`: 204 once nothing is known of the user."""
    request_id = request_id_of(exchange.headers) or new_id()
    try:
        access.check(exchange.headers)
        await sink.forget(user_id)
    except Exception as error:  # noqa: BLE001  a bug becomes a 500, and the log has it
        await _reply_error(exchange, error, request_id, route="/v1/users/{user_id}")
        return
    await exchange.reply(204, [(b"x-request-id", request_id.encode())], b"")
