"""The signal store: what ranking and the event routes ask. Reads degrade, writes say so.

It never decides what a request does with stale or missing signals.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import msgspec
from redis.asyncio import Redis

from service.domain import EMPTY_PROFILE, EMPTY_STATE, Event, UserState
from service.errors import SignalFault
from service.signals.breaker import Breaker
from service.signals.connect import Client, disconnect
from service.signals.exchange import exchange_with
from service.signals.local import LocalCopies
from service.signals.reads import ReadCounts, Reads
from service.signals.records import decode_array, decode_profile
from service.signals.token import parse, user_hash
from service.signals.writes import Writes, Written


class SignalStore:
    """Signals of users in Redis, with last-known copies in memory. Owns the client."""

    def __init__(
        self,
        client: Client,
        *,
        keep: int = 50,
        ttl_s: int = 30 * 86400,
        budget_s: float = 0.010,
        local_bytes: int = 64 << 20,
        pipelines: int = 4,
        writers: int = 2,
        breaker: Breaker,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`budget_s` bounds each fetch; at most `pipelines` + `writers` connections are used.

        Raises ValueError if the client may not open that many.
        """
        allowed = client.connection_pool.max_connections if isinstance(client, Redis) else None
        if allowed is not None and allowed < pipelines + writers:
            raise ValueError(
                f"the Redis client may open {allowed} connections, "
                f"but {pipelines} pipelines and {writers} writers need {pipelines + writers}"
            )
        self._client = client
        self._budget_s = budget_s
        self.breaker = breaker
        self.local = LocalCopies(max_bytes=local_bytes, clock=clock)
        self._exchange = exchange_with(client, breaker)
        self._reads = Reads(self._exchange, self.local, keep=keep, pipelines=pipelines)
        self._writes = Writes(self._exchange, keep=keep, ttl_s=ttl_s, writers=writers)

    @property
    def counts(self) -> ReadCounts:
        """Totals of reads since the start."""
        return self._reads.counts

    async def fetch(self, user: str, *, token: str | None, budget_s: float) -> UserState:
        """The user's state within the smaller budget; Redis's faults never raise here.

        source "redis": Redis answered (a new user has no signals); "local": the last-known
        copy, stale; "none": Redis did not answer and nothing is known. stale with "redis":
        older than the token. Raises RequestFault for a malformed token.
        """
        needed = parse(token).get(user_hash(user), 0) if token else 0
        budget_s = min(budget_s, self._budget_s)
        if budget_s <= 0 or not self.breaker.allow():
            return self._last_known(user)
        now_s = asyncio.get_running_loop().time
        until_s = now_s() + budget_s
        answer = await self._reads.read(user, numbered=needed > 0, budget_s=budget_s)
        if answer is None:
            return self._last_known(user)
        if answer.write_number < needed:
            again = await self._reads.read(user, numbered=True, budget_s=until_s - now_s())
            answer = again or answer
            if answer.write_number < needed:
                return msgspec.structs.replace(answer.state, stale=True)
        return answer.state

    async def write(self, events: Sequence[Event]) -> Written:
        """Store events; raises SignalFault if Redis did not take them all (see Writes.write)."""
        if not self.breaker.allow():
            raise SignalFault("Redis has failed repeatedly; it is asked again shortly")
        return await self._writes.write(events)

    async def forget(self, user: str) -> None:
        """Delete the user in Redis and in this process; raises SignalFault if Redis did not.

        Copies in other processes go with their next read of the user, or by age.
        """
        try:
            await self._writes.forget(user)
        finally:
            self._reads.forget(user)

    async def close(self) -> None:
        """Let what is on its way finish, then close every connection."""
        await self._reads.close()
        await self._writes.close()
        await self._exchange.close()
        await disconnect(self._client)

    def _last_known(self, user: str) -> UserState:
        known = self.local.get(user)
        if known is None:
            return EMPTY_STATE
        profile = decode_profile(known.profile) or EMPTY_PROFILE
        return UserState(decode_array(known.records), profile, source="local", stale=True)
