"""One round trip: commands out on one connection, every reply read back in order.

The only place that talks to Redis. A connection that failed, or holds bytes that nobody
asked for, is closed, so that a reply can never reach the wrong command.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import hiredis
from redis._parsers.hiredis import NOT_ENOUGH_DATA
from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import (
    MaxConnectionsError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
)

from service.errors import SignalFault
from service.signals.breaker import Breaker
from service.signals.connect import Client

Command = tuple[bytes | str | int, ...]
_pack: Callable[[Command], bytes] = hiredis.pack_command  # type: ignore[assignment]
Reply = Any
"""bytes, int, list, None, or the RedisError with which Redis answered this one command."""


class Exchange(Protocol):
    """Sends commands, returns one reply for each; raises SignalFault if there was no answer."""

    timeout_s: float

    async def __call__(self, commands: Sequence[Command]) -> list[Reply]:
        """Never cancel it: a cancelled exchange costs its connection."""

    async def close(self) -> None:
        """Give the connections back."""


def exchange_with(client: Client, breaker: Breaker) -> Exchange:
    """The exchange for this kind of client; each outcome is reported to the breaker."""
    if isinstance(client, RedisCluster):
        return ClusterExchange(client, breaker)
    return ServerExchange(client, breaker)


class ServerExchange:
    """Exchange with one server, perhaps found by Sentinel.

    Speaks through redis-py's Connection instead of its Pipeline, with one deadline for all
    replies. CPU of a user's two commands: 18 µs against 72 when 32 users share the round
    trip, 68 against 226 alone (loadtests/bench_signals.py).
    """

    def __init__(self, client: Redis, breaker: Breaker) -> None:
        self._pool = client.connection_pool
        self._breaker = breaker
        self._idle: list[AbstractConnection] = []
        self.timeout_s = float(self._pool.connection_kwargs["socket_timeout"])

    async def __call__(self, commands: Sequence[Command]) -> list[Reply]:
        """See Exchange."""
        try:
            connection = await self._take()
        except MaxConnectionsError as error:
            raise SignalFault(f"no free connection: {error}") from error
        except (RedisError, OSError) as error:
            self._breaker.failed()
            raise SignalFault(f"cannot connect: {error}") from error
        try:
            async with asyncio.timeout(self.timeout_s):
                await connection.send_packed_command(
                    b"".join([_pack(command) for command in commands]), check_health=False
                )
                replies = await _read(connection, len(commands))
        except (RedisError, OSError, TimeoutError) as error:
            self._breaker.failed()
            await self._drop(connection)
            reason = str(error) or f"no answer within {self.timeout_s * 1000:.0f} ms"
            raise SignalFault(reason) from error
        except BaseException:
            await self._drop(connection)
            raise
        self._breaker.succeeded()
        self._idle.append(connection)
        return replies

    async def close(self) -> None:
        """See Exchange."""
        while self._idle:
            await self._drop(self._idle.pop())

    async def _take(self) -> AbstractConnection:
        connection: AbstractConnection
        while self._idle:
            connection = self._idle.pop()
            if not await _is_spoilt(connection):
                return connection
            await self._drop(connection)
        connection = await self._pool.get_connection()  # type: ignore[no-untyped-call]
        # The deadline of a whole exchange replaces one timer a reply.
        connection.socket_timeout = None
        return connection

    async def _drop(self, connection: AbstractConnection) -> None:
        connection.socket_timeout = self.timeout_s
        await connection.disconnect(nowait=True)
        await self._pool.release(connection)


async def _read(connection: AbstractConnection, count: int) -> list[Reply]:
    """So many replies, each one's own error among them.

    The first is awaited through redis-py; those that came with it are taken from the parser
    without a coroutine each.
    """
    replies: list[Reply] = []
    while len(replies) < count:
        try:
            replies.append(await connection.read_response())
        except ResponseError as error:
            replies.append(error)
        parser: Any = connection._parser  # noqa: SLF001 - redis-py has no way to poll
        reader = parser._reader  # noqa: SLF001
        while len(replies) < count and (reply := reader.gets()) is not NOT_ENOUGH_DATA:
            if isinstance(reply, RedisConnectionError | ReadOnlyError):
                raise reply  # not of one command: the server is loading, or no master any more
            replies.append(reply)
    return replies


async def _is_spoilt(connection: AbstractConnection) -> bool:
    """Whether the peer ended it while idle, or it holds bytes that nobody asked for."""
    writer = connection._writer  # noqa: SLF001 - redis-py shows a reset nowhere else
    return writer is None or writer.is_closing() or bool(await connection.can_read())


class ClusterExchange:
    """Exchange with a cluster: redis-py splits the commands by node and follows moved slots."""

    def __init__(self, client: RedisCluster, breaker: Breaker) -> None:
        self._client = client
        self._breaker = breaker
        self.timeout_s = float(client.connection_kwargs["socket_timeout"])

    async def __call__(self, commands: Sequence[Command]) -> list[Reply]:
        """See Exchange."""
        try:
            # Twice: the first use, and a move, ask for the map of slots.
            async with asyncio.timeout(2 * self.timeout_s):
                pipeline = self._client.pipeline()
                for command in commands:
                    pipeline.execute_command(*command)
                replies: list[Reply] = await pipeline.execute(raise_on_error=False)
        except (RedisError, RedisClusterException, OSError, TimeoutError) as error:
            self._breaker.failed()
            raise SignalFault(str(error) or "no answer in time") from error
        if all(isinstance(reply, Exception) for reply in replies):
            self._breaker.failed()
        else:
            self._breaker.succeeded()
        return replies

    async def close(self) -> None:
        """See Exchange."""
