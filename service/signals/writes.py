"""Events -> signals in Redis: one atomic script a user, all users of a call in one pipeline."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from hashlib import sha1
from importlib.resources import files

import msgspec
from redis.exceptions import NoScriptError, RedisError

from service.domain import Event, Signal
from service.encoding.history import VISIT_MS, VISIT_RECORDS
from service.errors import SignalFault
from service.signals import token
from service.signals.exchange import Command, Exchange
from service.signals.keys import keys_of
from service.signals.records import encode_signal

SEEN_KEPT = 1000
"""Event ids remembered for each user."""
EVENTS_PER_SCRIPT = 100
"""Redis does nothing else while a script runs."""

SCRIPT = files(__package__).joinpath("fold.lua").read_bytes()
SCRIPT_SHA = sha1(SCRIPT, usedforsecurity=False).hexdigest()


class Written(msgspec.Struct, frozen=True):
    """What Redis acknowledged."""

    accepted: int
    """New events, impressions among them."""
    duplicates: int
    token: str
    """Covers all users of the call, duplicates' too."""


class Writes:
    """Writers, at most `writers` at a time."""

    def __init__(self, exchange: Exchange, *, keep: int, ttl_s: int, writers: int) -> None:
        self._exchange = exchange
        self._constants = (keep, ttl_s, VISIT_MS, VISIT_RECORDS, SEEN_KEPT)
        self._slots = asyncio.Semaphore(writers)
        self._running: set[asyncio.Task[list[object]]] = set()

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
        if self._running:
            await asyncio.wait(self._running)

    def _call(self, user: str, events: list[Event]) -> Command:
        """Arguments of the script, without the command and the script itself."""
        keys = keys_of(user)
        arguments: list[bytes | str | int] = []
        for event in events:
            arguments.append(event.event_id or "")
            arguments.append(b"" if event.type == "impression" else encode_signal(_signal(event)))
        return (3, keys.signals, keys.seen, keys.written, *self._constants, *arguments)

    async def _evaluate(self, calls: list[Command]) -> list[object]:
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

    async def _send(self, commands: list[Command]) -> list[object]:
        """One exchange that goes on when its caller is cancelled."""
        try:
            async with asyncio.timeout(self._exchange.timeout_s):
                await self._slots.acquire()
        except TimeoutError as error:
            raise SignalFault("too many writes at once") from error
        task = asyncio.get_running_loop().create_task(self._hold_slot(commands))
        self._running.add(task)
        task.add_done_callback(self._finished)
        return await asyncio.shield(task)

    async def _hold_slot(self, commands: list[Command]) -> list[object]:
        try:
            return await self._exchange(commands)
        finally:
            self._slots.release()

    def _finished(self, task: asyncio.Task[list[object]]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # seen, although its caller may have left


def _signal(event: Event) -> Signal:
    assert event.type != "impression"
    return Signal(event.item_id, event.type, event.at_ms, event.dwell_ms, event.surface)
