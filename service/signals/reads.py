"""Reads of requests that arrive together share one pipeline; each reader has its own bound.

A pipeline is never cancelled: readers who leave early leave it running, and its late
answers still refresh the last-known copies.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import msgspec
from redis.exceptions import RedisError, ResponseError

from service.domain import EMPTY_PROFILE, UserState
from service.errors import SignalFault
from service.signals.exchange import Command, Exchange, Reply
from service.signals.keys import keys_of
from service.signals.local import LocalCopies
from service.signals.records import decode_profile, decode_records

MAX_USERS = 128
"""In one pipeline; some 500 kB of replies."""


class Answer(NamedTuple):
    """One user's state as Redis has it."""

    state: UserState
    write_number: int
    """0 unless asked for."""


class ReadCounts(msgspec.Struct):
    """Totals since the start."""

    pipelines: int = 0
    users: int = 0
    shared: int = 0
    """Reads answered by another reader's read of the same user."""
    late: int = 0
    """Readers who left before their answer."""
    failed: int = 0
    """Users whom Redis did not answer."""
    skipped_records: int = 0
    """Records and profiles that did not decode."""


class _Read:
    __slots__ = ("numbered", "user", "waiters", "wanted")

    def __init__(self, user: str) -> None:
        self.user = user
        self.numbered = False
        self.wanted = True
        self.waiters: list[asyncio.Future[Answer | None]] = []

    def commands(self, newest: int) -> list[Command]:
        keys = keys_of(self.user)
        commands: list[Command] = [("LRANGE", keys.signals, 0, newest), ("GET", keys.profile)]
        if self.numbered:
            commands.append(("GET", keys.written))
        return commands

    def resolve(self, answer: Answer | None) -> None:
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(answer)


_GRACE_TURNS = 3
"""Turns of the loop past the budget: a loop that was busy runs its timers before it looks at
its sockets, and must not take its own lateness for Redis's."""


class Reads:
    """The queue of readers and the pipelines in flight, at most `pipelines`."""

    def __init__(
        self, exchange: Exchange, local: LocalCopies, *, keep: int, pipelines: int
    ) -> None:
        self._exchange = exchange
        self._local = local
        self._newest = keep - 1
        self._pipelines = pipelines
        self._pending: dict[str, _Read] = {}
        self._scheduled = False
        self._in_flight: dict[asyncio.Task[None], list[_Read]] = {}
        self.counts = ReadCounts()

    async def read(self, user: str, *, numbered: bool, budget_s: float) -> Answer | None:
        """The user's state, or None if Redis did not give it within the budget.

        The pipeline leaves when the loop has run all that is ready: nobody waits for company.
        """
        loop = asyncio.get_running_loop()
        read = self._pending.get(user)
        if read is None:
            read = self._pending[user] = _Read(user)
        else:
            self.counts.shared += 1
        read.numbered |= numbered
        waiter: asyncio.Future[Answer | None] = loop.create_future()
        read.waiters.append(waiter)
        if not self._scheduled:
            self._scheduled = True
            loop.call_soon(self._flush)
        bound = loop.call_later(budget_s, self._leave, waiter, _GRACE_TURNS)
        try:
            return await waiter
        finally:
            bound.cancel()

    def forget(self, user: str) -> None:
        """Keep answers that are on their way from becoming local copies again."""
        for reads in self._in_flight.values():
            for read in reads:
                if read.user == user:
                    read.wanted = False
        self._local.discard(user)

    async def close(self) -> None:
        """Wait for the pipelines in flight; the exchange's timeout bounds them."""
        while self._in_flight:
            await asyncio.wait(self._in_flight)

    def _leave(self, waiter: asyncio.Future[Answer | None], turns: int) -> None:
        if waiter.done():
            return
        if turns:
            asyncio.get_running_loop().call_later(0, self._leave, waiter, turns - 1)
        else:
            self.counts.late += 1
            waiter.set_result(None)

    def _flush(self) -> None:
        self._scheduled = False
        while self._pending and len(self._in_flight) < self._pipelines:
            reads: list[_Read] = []
            while self._pending and len(reads) < MAX_USERS:
                read = self._pending.pop(next(iter(self._pending)))
                if not all(waiter.done() for waiter in read.waiters):
                    reads.append(read)
            if reads:
                task = asyncio.get_running_loop().create_task(self._run(reads))
                self._in_flight[task] = reads
                task.add_done_callback(self._landed)

    def _landed(self, task: asyncio.Task[None]) -> None:
        for read in self._in_flight.pop(task):
            read.resolve(None)
        self._flush()

    async def _run(self, reads: list[_Read]) -> None:
        self.counts.pipelines += 1
        self.counts.users += len(reads)
        commands = [command for read in reads for command in read.commands(self._newest)]
        numbered = [read.numbered for read in reads]
        try:
            replies = iter(await self._exchange(commands))
        except SignalFault:
            self.counts.failed += len(reads)
            return
        for read, has_number in zip(reads, numbered, strict=True):
            records, profile = next(replies), next(replies)
            answer = self._answer(read, records, profile, next(replies) if has_number else None)
            self.counts.failed += answer is None
            read.resolve(answer)

    def _answer(self, read: _Read, records: Reply, profile: Reply, number: Reply) -> Answer | None:
        # A key of another type is a foreign producer's garbage; other errors are the server's.
        records, profile, number = map(self._tolerate, (records, profile, number))
        if any(isinstance(reply, RedisError) for reply in (records, profile, number)):
            return None
        decoded = decode_records(records or ())
        decoded_profile = decode_profile(profile)
        self.counts.skipped_records += decoded.skipped + (decoded_profile is None)
        if read.wanted:
            if decoded.signals or profile:
                self._local.put(read.user, decoded.json_array, profile or b"")
            else:
                self._local.discard(read.user)
        state = UserState(decoded.signals, decoded_profile or EMPTY_PROFILE, "redis")
        return Answer(state, int(number) if number and number.isdigit() else 0)

    def _tolerate(self, reply: Reply) -> Reply:
        if isinstance(reply, ResponseError) and str(reply).startswith("WRONGTYPE"):
            self.counts.skipped_records += 1
            return None
        return reply
