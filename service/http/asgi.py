"""Exchanges: one request and the way to answer it, free of the server that carries them.

What a framework would add to the hot path is left out.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any, Protocol

import msgspec

from service.errors import TooLarge
from service.http.wire import Problem

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = Sequence[tuple[bytes, bytes]]

ON_LEAVE = "ranker.on_leave"
"""Where a scope keeps what is called as its caller disconnects."""
RECEIVED = "ranker.received_s"
_request_id = re.compile(r"[!-~]{1,128}")
JSON = (b"content-type", b"application/json")
_PROBLEM = (b"content-type", b"application/problem+json")


class CallerLeft(Exception):
    """The connection closed before the body was whole."""


class Exchange(Protocol):
    """One request, and its answer."""

    headers: Headers
    """Of the request, with names in lower case."""
    received_s: float
    """When it came, on the monotonic clock."""
    gone: bool
    """Whether the caller has left."""
    cancel_on_leave: bool
    """Whether the endpoint's task is cancelled as that happens; False unless the endpoint asks."""

    async def body(self, limit: int) -> bytes:
        """The whole body; raises TooLarge past the limit, CallerLeft if it stays incomplete."""
        ...

    async def reply(self, status: int, headers: Headers, body: bytes) -> None:
        """Send the whole answer; its length is added."""
        ...


Endpoint = Callable[[Exchange], Awaitable[None]]


class AsgiExchange:
    """An exchange that any ASGI server carries; only our own tells it of leaving callers."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.headers: Headers = scope["headers"]
        self.received_s: float = scope.get(RECEIVED) or time.monotonic()
        self.gone = False
        self.cancel_on_leave = False
        self._receive = receive
        self._send = send
        self._task = asyncio.current_task()
        scope[ON_LEAVE] = self._leave

    def _leave(self) -> None:
        self.gone = True
        if self.cancel_on_leave and self._task is not None:
            self._task.cancel()

    async def body(self, limit: int) -> bytes:
        """See Exchange."""
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise CallerLeft
            part: bytes = message.get("body", b"")
            size += len(part)
            if size > limit:
                raise too_large(limit)
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)

    async def reply(self, status: int, headers: Headers, body: bytes) -> None:
        """See Exchange."""
        length = (b"content-length", str(len(body)).encode())
        start = {"type": "http.response.start", "status": status, "headers": [*headers, length]}
        await self._send(start)
        await self._send({"type": "http.response.body", "body": body})


def header(headers: Headers, name: bytes) -> str | None:
    """One request header by its lower-case name."""
    for key, value in headers:
        if key == name:
            return str(value, "latin-1")
    return None


def request_id_of(headers: Headers) -> str | None:
    """The caller's `X-Request-Id`, if it is one that a body may hold too."""
    given = header(headers, b"x-request-id")
    return given if given is not None and _request_id.fullmatch(given) else None


def too_large(limit: int) -> TooLarge:
    """The fault of a body over the limit."""
    return TooLarge(f"the body is larger than {limit} bytes")


def last_answer(send: Send) -> Send:
    """A `send` that tells the caller to use another connection from here on."""

    async def send_last(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
        await send(message)

    return send_last


async def reply_problem(exchange: Exchange, problem: Problem) -> None:
    """Answer with an error as problem+json."""
    headers = [_PROBLEM, (b"x-request-id", problem.request_id.encode())]
    if problem.retry_after_s:
        headers.append((b"retry-after", str(max(1, round(problem.retry_after_s))).encode()))
    if problem.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await exchange.reply(problem.status, headers, msgspec.json.encode(problem))
