"""The order of steps for one request; this module alone knows it.

Whatever fails on the way, the caller gets an order, with the reason.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from service.domain import (
    DegradedReason,
    Int64Array,
    ItemFeatures,
    UserState,
    user_key,
)
from service.encoding.history import Person
from service.encoding.slate import Slate, best, prior_order
from service.errors import (
    BackendFault,
    DeadlineExceeded,
    NotReady,
    Overloaded,
    RankerError,
    Refusal,
    RequestFault,
    SignalsMissing,
)
from service.inference.batcher import JobScores
from service.ranking.admission import Admission, Deadline
from service.ranking.query import Candidate, Query, Ranking
from service.versions.loaded import LoadedVersion
from service.versions.roles import Versions
from service.versions.traffic import Sample

_SIGNALS_SHARE = 0.5
"""The most of a request's budget that reading signals may take."""


class HistorySource(Protocol):
    """Where a user's state comes from."""

    async def fetch(self, user: str, *, token: str | None, budget_s: float) -> UserState:
        """The user's state, within the budget; never raises for want of the store."""
        ...


class _Slate(msgspec.Struct, frozen=True):
    """A query's items, taken apart."""

    ids: Sequence[str]
    priors: Sequence[float | None] | None
    features: Sequence[ItemFeatures | None] | None


class _Request(msgspec.Struct, kw_only=True):
    """One request on its way."""

    query: Query
    slate: _Slate
    user: str
    now_ms: int
    deadline: Deadline
    ranking: Ranking
    """The answer, filled in step by step."""
    top_n: int


class Ranker:
    """Ranks one slate for one person."""

    def __init__(
        self,
        *,
        versions: Versions,
        signals: HistorySource,
        admission: Admission,
        max_items: int,
        signals_budget_s: float,
    ) -> None:
        self._versions = versions
        self._signals = signals
        self._admission = admission
        self._max_items = max_items
        self._signals_budget_s = signals_budget_s

    async def rank(self, query: Query, deadline: Deadline) -> Ranking:
        """Rank a slate before the deadline.

        Raises RequestFault for a wrong request, and a Refusal only where the query does
        not allow a degraded answer.
        """
        slate = self._check(query)
        request = _Request(
            query=query,
            slate=slate,
            user=user_key(query.user_id, query.session_id),
            now_ms=_request_time_ms(query),
            deadline=deadline,
            ranking=Ranking(request_id=query.request_id or new_id(), ranking_id=new_id()),
            top_n=min(query.top_n or len(slate.ids), len(slate.ids)),
        )
        ranking = request.ranking
        self._admission.note_turn(deadline.received_s)
        try:
            with self._admission as admitted:
                version = self._versions.pick(query.model, request.user)
                ranking.model_name, ranking.model_version = version.name, version.version
                ranking.ranking_id += version.tag
                if not admitted:
                    raise Overloaded("too many requests in flight")
                with version:
                    order, scores = await self._score(request, version)
        except (Refusal, BackendFault) as error:
            if not query.allow_degraded:
                raise _as_refusal(error) from error
            ranking.degraded.append(_reason(error))
            order, scores = prior_order(slate.priors, len(slate.ids), top_n=request.top_n)
        ranking.indexes = order.tolist()
        ranking.scores = scores.tolist()
        ranking.ids = list(map(slate.ids.__getitem__, ranking.indexes))
        return ranking

    async def _score(
        self, request: _Request, version: LoadedVersion
    ) -> tuple[Int64Array, NDArray[np.float64]]:
        """The straight line: check, signals, batch, order."""
        query, slate, ranking = request.query, request.slate, request.ranking
        deadline, now_ms = request.deadline, request.now_ms
        batcher = version.batcher
        shown = Slate(slate.ids, slate.features, query.context.surface, now_ms)
        tiles, most = (
            shown.tiles(version.space.spec.tile_width),
            version.manifest.batch.tile_buckets,
        )
        if tiles > most[-1]:
            width = version.space.spec.tile_width
            raise RequestFault(
                f"this version ranks at most {most[-1] * width} items at once", field="items"
            )
        batcher.check(tiles, deadline.at_s, query.priority)

        started = ranking.times.signals_at_s = time.monotonic()
        state = await self._fetch(request)
        ranking.times.signals_s = time.monotonic() - started
        _note_signals(ranking, state, now_ms)
        if not query.allow_degraded and ranking.degraded:
            raise SignalsMissing(f"the user's signals are not at hand: {ranking.degraded[0]}")

        person = Person(state.signals, state.profile, query.context, now_ms)
        future = batcher.submit(
            person,
            shown,
            deadline_s=deadline.at_s,
            priority=query.priority,
        )
        scored = await _before(deadline, future)
        ranking.sample = Sample(person, shown)
        ranking.times.queue_s = scored.queue_s
        ranking.times.inference_s = scored.inference_s
        ranking.backend, ranking.precision = scored.backend, scored.precision
        ranking.batch = scored.batch
        if scored.unknown:
            ranking.degraded.append("unknown_items")
        if scored.rung:
            ranking.degraded.append("fallback_backend")
        return best(scored.scores, top_n=request.top_n)

    async def _fetch(self, request: _Request) -> UserState:
        left_s = request.deadline.left_s()
        if left_s <= 0:
            raise DeadlineExceeded("the deadline had passed on arrival")
        budget_s = min(self._signals_budget_s, left_s * _SIGNALS_SHARE)
        token = request.query.min_signal_token
        return await self._signals.fetch(request.user, token=token, budget_s=budget_s)

    def _check(self, query: Query) -> _Slate:
        """Raise RequestFault for what the types cannot say; take the items apart."""
        items = query.items
        if query.user_id is None and query.session_id is None:
            raise RequestFault("user_id or session_id is required", field="user_id")
        if len(items) > self._max_items:
            raise RequestFault(
                f"{len(items)} items, at most {self._max_items} are ranked at once", field="items"
            )
        slate = _take_apart(items)
        if len(set(slate.ids)) != len(slate.ids):
            seen: set[str] = set()
            for at, item_id in enumerate(slate.ids):
                if item_id in seen:
                    raise RequestFault(f"the id {item_id!r} comes twice", field=f"items[{at}].id")
                seen.add(item_id)
        return slate


def _take_apart(items: list[str | Candidate]) -> _Slate:
    if set(map(type, items)) == {str}:
        return _Slate(items, None, None)  # type: ignore[arg-type]
    objects = [item if isinstance(item, Candidate) else Candidate(item) for item in items]
    ids = [item.id for item in objects]
    priors = [item.prior for item in objects]
    features = [item.features for item in objects]
    return _Slate(
        ids,
        priors if any(prior is not None for prior in priors) else None,
        features if any(features) else None,
    )


def _note_signals(ranking: Ranking, state: UserState, now_ms: int) -> None:
    ranking.signal_source = state.source
    ranking.signal_count = len(state.signals)
    if state.signals:
        ranking.signal_age_ms = max(0, now_ms - state.signals[0].at_ms)
    if state.source == "none":
        ranking.degraded.append("signals_unavailable")
    elif state.stale:
        ranking.degraded.append("stale_signals")


async def _before(deadline: Deadline, future: asyncio.Future[JobScores]) -> JobScores:
    """The scores, or DeadlineExceeded; the job then leaves the queue."""
    timer = asyncio.get_running_loop().call_later(max(0.0, deadline.left_s()), _expire, future)
    try:
        return await future
    finally:
        timer.cancel()


def _expire(future: asyncio.Future[JobScores]) -> None:
    if not future.done():
        future.set_exception(DeadlineExceeded("the deadline came before the scores"))


def _reason(error: RankerError) -> DegradedReason:
    if isinstance(error, DeadlineExceeded):
        return "deadline"
    if isinstance(error, NotReady):
        return "warming"
    if isinstance(error, Overloaded):
        return "overload"
    return "fallback_backend"


def _as_refusal(error: Refusal | BackendFault) -> Refusal:
    if isinstance(error, Refusal):
        return error
    return NotReady("no engine could score the slate")


def _request_time_ms(query: Query) -> int:
    now_ms = time.time_ns() // 1_000_000
    return now_ms if query.ts is None else min(now_ms, query.ts)


_PROCESS = os.urandom(6).hex()
_serial = itertools.count()


def new_id() -> str:
    """An id that no other request has: the process's random digits and a serial number."""
    return f"{_PROCESS}{next(_serial):08x}"
