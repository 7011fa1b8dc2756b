"""Reading and answering on bare ASGI: what a framework would add to the hot path, left out."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

from service.errors import TooLarge
from service.http.wire import Problem

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Endpoint = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

_request_id = re.compile(r"[!-~]{1,128}")
JSON = (b"content-type", b"application/json")
_PROBLEM = (b"content-type", b"application/problem+json")


class CallerLeft(Exception):
    """The connection closed before the body was whole."""


def header(scope: Scope, name: bytes) -> str | None:
    """One request header by its lower-case name."""
    for key, value in scope["headers"]:
        if key == name:
            return str(value, "latin-1")
    return None


def request_id_of(scope: Scope) -> str | None:
    """The caller's `X-Request-Id`, if it is one that a body may hold too."""
    given = header(scope, b"x-request-id")
    return given if given is not None and _request_id.fullmatch(given) else None


async def read_body(receive: Receive, limit: int) -> bytes:
    """The whole body; raises TooLarge past the limit, CallerLeft if it stays incomplete."""
    message = await receive()
    if message["type"] == "http.request" and not message.get("more_body", False):
        body: bytes = message.get("body", b"")
        if len(body) > limit:
            raise _too_large(limit)
        return body
    parts: list[bytes] = []
    size = 0
    while True:
        if message["type"] == "http.disconnect":
            raise CallerLeft
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            raise _too_large(limit)
        if not message.get("more_body", False):
            return b"".join(parts)
        message = await receive()


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"the body is larger than {limit} bytes")


def last_answer(send: Send) -> Send:
    """A `send` that tells the caller to use another connection from here on."""

    async def send_last(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
        await send(message)

    return send_last


async def reply(send: Send, status: int, headers: Headers, body: bytes) -> None:
    """Send a whole answer."""
    headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def reply_problem(send: Send, problem: Problem) -> None:
    """Send an error as problem+json."""
    headers: Headers = [_PROBLEM, (b"x-request-id", problem.request_id.encode())]
    if problem.retry_after_s:
        headers.append((b"retry-after", str(max(1, round(problem.retry_after_s))).encode()))
    if problem.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await reply(send, problem.status, headers, msgspec.json.encode(problem))
