"""Events -> signals in Redis: one atomic script a user; calls that meet share a pipeline."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from hashlib import sha1
from importlib.resources import files
from itertools import islice
from typing import NamedTuple

import msgspec
from redis.exceptions import NoScriptError, RedisError

from service.domain import Event, Signal
from service.encoding.history import VISIT_MS, VISIT_RECORDS
from service.errors import SignalFault
from service.signals import token
from service.signals.exchange import Command, Exchange, Reply
from service.signals.keys import keys_of
from service.signals.records import encode_signal

SEEN_KEPT = 1000
"""Event ids remembered for each user."""
EVENTS_PER_SCRIPT = 100
"""Redis does nothing else while a script runs."""
MAX_COMMANDS = 128
"""In one pipeline, unless a single call needs more."""
MAX_PENDING = 512
"""Calls that may wait for a pipeline; the next one is refused."""

SCRIPT = files(__package__).joinpath("fold.lua").read_bytes()
SCRIPT_SHA = sha1(SCRIPT, usedforsecurity=False).hexdigest()


class Written(msgspec.Struct, frozen=True):
    """What Redis acknowledged."""

    accepted: int
    """New events, impressions among them."""
    duplicates: int
    token: str
    """Covers all users of the call, duplicates' too."""


class _Write(NamedTuple):
    """Commands of one call, and who waits for their replies."""

    commands: list[Command]
    replies: asyncio.Future[list[Reply]]


class Writes:
    """Calls that arrive together share a pipeline; at most `writers` pipelines are on their way."""

    def __init__(self, exchange: Exchange, *, keep: int, ttl_s: int, writers: int) -> None:
        self._exchange = exchange
        self._constants = (keep, ttl_s, VISIT_MS, VISIT_RECORDS, SEEN_KEPT)
        self._writers = writers
        self._pending: deque[_Write] = deque()
        self._scheduled = False
        self._in_flight: dict[asyncio.Task[None], list[_Write]] = {}

    async def write(self, events: Sequence[Event]) -> Written:
        """Fold the events into their users' lists; raises SignalFault if Redis did not take all.

        Repeating a failed call is safe for events that have an id: those that were taken the
        first time count as duplicates.
        """
        by_user: dict[str, list[Event]] = {}
        for event in events:
            by_user.setdefault(event.user, []).append(event)
        users, calls = [], []
        for user, own in by_user.items():
            for start in range(0, len(own), EVENTS_PER_SCRIPT):
                users.append(user)
                calls.append(self._call(user, own[start : start + EVENTS_PER_SCRIPT]))
        accepted = duplicates = 0
        numbers: dict[str, int] = {}
        for user, reply in zip(users, await self._evaluate(calls), strict=True):
            assert isinstance(reply, list)
            accepted += reply[0]
            duplicates += reply[1]
            numbers[user] = reply[2]
        return Written(accepted, duplicates, token.encode(numbers))

    async def forget(self, user: str) -> None:
        """Delete all keys of the user; raises SignalFault if Redis did not."""
        await self._send([("DEL", *keys_of(user))])

    async def close(self) -> None:
        """Wait for the writes on their way."""
        self._flush()
        while self._in_flight:
            await asyncio.wait(self._in_flight)

    def _call(self, user: str, events: list[Event]) -> Command:
        """Arguments of the script, without the command and the script itself."""
        keys = keys_of(user)
        arguments: list[bytes | str | int] = []
        for event in events:
            arguments.append(event.event_id or "")
            arguments.append(b"" if event.type == "impression" else encode_signal(_signal(event)))
        return (3, keys.signals, keys.seen, keys.written, *self._constants, *arguments)

    async def _evaluate(self, calls: list[Command]) -> list[Reply]:
        replies = await self._send([("EVALSHA", SCRIPT_SHA, *call) for call in calls])
        # A restarted or failed-over server has not seen the script; EVAL also stores it.
        unknown = [n for n, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
        if unknown:
            again = await self._send([("EVAL", SCRIPT, *calls[n]) for n in unknown])
            for n, reply in zip(unknown, again, strict=True):
                replies[n] = reply
        for reply in replies:
            if isinstance(reply, RedisError):
                raise SignalFault(f"Redis refused a write: {reply}") from reply
        return replies

    async def _send(self, commands: list[Command]) -> list[Reply]:
        """Replies of an exchange that goes on when its caller is cancelled."""
        if len(self._pending) >= MAX_PENDING:
            raise SignalFault("too many writes at once")
        loop = asyncio.get_running_loop()
        write = _Write(commands, loop.create_future())
        self._pending.append(write)
        if not self._scheduled:
            self._scheduled = True
            loop.call_soon(self._flush)
        return await write.replies

    def _flush(self) -> None:
        """Send what waits; a busy loop then finds fewer, fuller pipelines, not a longer queue."""
        self._scheduled = False
        while self._pending and len(self._in_flight) < self._writers:
            writes = [self._pending.popleft()]
            left = MAX_COMMANDS - len(writes[0].commands)
            while self._pending and len(self._pending[0].commands) <= left:
                writes.append(self._pending.popleft())
                left -= len(writes[-1].commands)
            task = asyncio.get_running_loop().create_task(self._run(writes))
            self._in_flight[task] = writes
            task.add_done_callback(self._landed)

    def _landed(self, task: asyncio.Task[None]) -> None:
        writes = self._in_flight.pop(task)
        error = None if task.cancelled() else task.exception()
        for write in writes:
            if error is not None and not write.replies.done():
                write.replies.set_exception(error)
            else:
                write.replies.cancel()  # nothing, where there are replies
        self._flush()

    async def _run(self, writes: list[_Write]) -> None:
        commands = [command for write in writes for command in write.commands]
        replies = iter(await self._exchange(commands))
        for write in writes:
            own = list(islice(replies, len(write.commands)))
            if not write.replies.done():
                write.replies.set_result(own)


def _signal(event: Event) -> Signal:
    assert event.type != "impression"
    return Signal(event.item_id, event.type, event.at_ms, event.dwell_ms, event.surface)
