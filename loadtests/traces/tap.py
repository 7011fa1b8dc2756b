"""An ASGI tap: writes the requests that pass into a trace, without delaying them.

Users are sampled, not requests, so a recorded user's clicks come along. Ids are replaced
by a keyed hash before anything is kept; without the key nobody can link them back.
"""

from __future__ import annotations

import hashlib
import queue
import threading
import time
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import IO, Any

import msgspec

from loadtests.traces.trace import Record, open_bytes

_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]
_App = Callable[[_Message, _Receive, _Send], Awaitable[None]]


class _Item(msgspec.Struct):
    id: str


class _Context(msgspec.Struct, frozen=True):
    surface: str = ""


class _Rank(msgspec.Struct):
    items: list[str | _Item]
    user_id: str = ""
    session_id: str = ""
    context: _Context = _Context()
    priority: str = ""
    timeout_ms: float | None = None


class _Event(msgspec.Struct):
    type: str
    item_id: str
    user_id: str = ""
    session_id: str = ""
    dwell_ms: int = 0


class _Events(msgspec.Struct):
    events: list[_Event]


class Pseudonyms:
    """Keyed hashes of ids, the same for the same key: BLAKE2b, 64 bits."""

    def __init__(self, key: bytes, *, keep_items: bool) -> None:
        if len(key) < 16:
            raise ValueError("the key of the pseudonyms has fewer than 16 bytes")
        self._key = hashlib.blake2b(key).digest()
        self._keep_items = keep_items

    def user(self, user: str) -> str:
        return "u" + self._hash(user, b"user").hex()

    def item(self, item: str) -> str:
        return item if self._keep_items else "i" + self._hash(item, b"item").hex()

    def sampled(self, user: str, share: float) -> bool:
        """True for the same `share` of users in every process with this key."""
        return int.from_bytes(self._hash(user, b"sample")) < share * 2**64

    def _hash(self, word: str, use: bytes) -> bytes:
        return hashlib.blake2b(word.encode(), key=self._key, person=use, digest_size=8).digest()


class Tap:
    """An ASGI app around another; a full queue drops records and counts them in `dropped`."""

    def __init__(self, app: _App, *, out: Path, pseudonyms: Pseudonyms, share: float = 1.0) -> None:
        self._app = app
        self._pseudonyms = pseudonyms
        self._share = share
        self._started_s = time.monotonic()
        self._queue: queue.Queue[tuple[float, str, bytes] | None] = queue.Queue(10_000)
        self.recorded = 0
        self.dropped = 0
        self._thread = threading.Thread(
            target=self._write, args=(open_bytes(out, "wb"),), name="tap", daemon=True
        )
        self._thread.start()

    async def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        """Pass everything through; remember the body of `/rank` and `/v1/events`."""
        if scope["type"] != "http" or scope["path"] not in {"/rank", "/v1/events"}:
            await self._app(scope, receive, send)
            return
        now_ms = round((time.monotonic() - self._started_s) * 1e3, 3)
        chunks: list[bytes] = []

        async def listen() -> _Message:
            message = await receive()
            if message["type"] == "http.request":
                chunks.append(message.get("body", b""))
                if not message.get("more_body", False):
                    self._put((now_ms, scope["path"], b"".join(chunks)))
            return message

        await self._app(scope, listen, send)

    def close(self) -> None:
        """Write what is queued and close the file; waits for both."""
        self._queue.put(None)
        self._thread.join()

    def _put(self, entry: tuple[float, str, bytes]) -> None:
        try:
            self._queue.put_nowait(entry)
        except queue.Full:
            self.dropped += 1

    def _write(self, file: IO[bytes]) -> None:
        first_ms, last_ms = -1.0, 0.0
        with file:
            while (entry := self._queue.get()) is not None:
                now_ms, path, body = entry
                if first_ms < 0:
                    first_ms = now_ms
                # bodies end in another order than they begin
                last_ms = max(last_ms, round(now_ms - first_ms, 3))
                for record in self._records(last_ms, path, body):
                    file.write(msgspec.json.encode(record) + b"\n")
                    self.recorded += 1

    def _records(self, now_ms: float, path: str, body: bytes) -> list[Record]:
        try:
            if path == "/rank":
                found = [self._rank(now_ms, msgspec.json.decode(body, type=_Rank))]
            else:
                found = [self._event(now_ms, event) for event in _read_events(body)]
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError):
            return []  # the service refuses it too; there is nothing to replay
        return [record for record in found if record is not None]

    def _rank(self, now_ms: float, rank: _Rank) -> Record | None:
        user = rank.user_id or rank.session_id
        if not self._pseudonyms.sampled(user, self._share):
            return None
        ids = [item if isinstance(item, str) else item.id for item in rank.items]
        return Record(
            timestamp=now_ms,
            user=self._pseudonyms.user(user),
            items=[self._pseudonyms.item(item) for item in ids],
            surface=rank.context.surface,
            priority=rank.priority,
            deadline_ms=rank.timeout_ms,
        )

    def _event(self, now_ms: float, event: _Event) -> Record | None:
        user = event.user_id or event.session_id
        if not self._pseudonyms.sampled(user, self._share):
            return None
        return msgspec.convert(
            {
                "timestamp": now_ms,
                "user": self._pseudonyms.user(user),
                "event": event.type,
                "item": self._pseudonyms.item(event.item_id),
                "dwell_ms": event.dwell_ms,
            },
            Record,
        )


def _read_events(body: bytes) -> list[_Event]:
    try:
        return msgspec.json.decode(body, type=_Events).events
    except msgspec.DecodeError:
        return [msgspec.json.decode(line, type=_Event) for line in body.splitlines() if line]
