"""The connection: uvicorn's, with a short way for requests to the hot routes.

On that way a request is no ASGI message exchange: its endpoint starts once the body is
whole, and answers in one write. Whatever is unusual (a large body, a pipelined request, an
upgrade, a caller who does not read) goes uvicorn's way.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections.abc import Mapping
from typing import Any, Protocol, cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from service.http.asgi import ON_LEAVE, RECEIVED, CallerLeft, Endpoint, Headers, Scope, too_large

_MAX_BODY_BYTES = 65_536
"""More than this is read with uvicorn's flow control."""
_log = logging.getLogger("ranker.http")


class HotApp(Protocol):
    """An app with endpoints that need no framework."""

    hot: Mapping[bytes, Endpoint]
    """By raw path; all are `POST`."""

    @property
    def draining(self) -> bool:
        """Whether answers shall end their connections."""
        ...


class DirectExchange:
    """An exchange on one connection; see `Exchange`. uvicorn's protocol takes it for a cycle."""

    def __init__(
        self, connection: Connection, endpoint: Endpoint, headers: Headers, *, keep_alive: bool
    ) -> None:
        self.headers = headers
        self.received_s = time.monotonic()
        self.gone = False
        self.cancel_on_leave = False
        self.keep_alive = keep_alive
        self.response_complete = False
        self.held: bytes | bytearray = b""
        """The body so far, in one piece: a caller may send it in single bytes."""
        self.whole = False
        self._connection = connection
        self._endpoint = endpoint
        self._task: asyncio.Task[None] | None = None

    async def body(self, limit: int) -> bytes:
        """See Exchange."""
        if not self.whole:
            raise CallerLeft
        if len(self.held) > limit:
            raise too_large(limit)
        return bytes(self.held)

    async def reply(self, status: int, headers: Headers, body: bytes) -> None:
        """See Exchange; raises RuntimeError for a second answer, or a value with a line break."""
        if self.response_complete:
            raise RuntimeError("the request is answered already")
        connection = self._connection
        if self.gone or connection.transport.is_closing():
            self.response_complete = True
            return
        last = not self.keep_alive or connection.hot_app.draining
        lines = [STATUS_LINE[status]]
        for name, value in (*connection.server_state.default_headers, *headers):
            if b"\n" in value or b"\r" in value:
                raise RuntimeError(f"the header {name!r} has a line break")
            lines += (name, b": ", value, b"\r\n")
        ending = b"connection: close\r\n\r\n" if last else b"\r\n"
        lines += (b"content-length: %d\r\n" % len(body), ending, body)
        connection.transport.write(b"".join(lines))
        self.response_complete = True
        self.held = b""  # the connection keeps this exchange until its next one
        connection.answering = None
        if last:
            connection.transport.close()
        connection.on_response_complete()

    def start(self) -> None:
        """Run the endpoint."""
        tasks = self._connection.tasks
        self._connection.answering = self
        # a context of its own: asyncio would leak one request's into the next
        self._task = self._connection.loop.create_task(
            cast("Any", self._endpoint(self)), context=contextvars.Context()
        )
        tasks.add(self._task)
        self._task.add_done_callback(self._ended)

    def leave(self) -> None:
        """Tell the endpoint that its caller is gone."""
        self.gone = True
        if self._task is None:
            self.start()
        elif self.cancel_on_leave:
            self._task.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._connection.tasks.discard(task)
        if self._connection.answering is self:
            self._connection.answering = None
        error = None if task.cancelled() else task.exception()
        if error is not None:
            _log.error("unexpected error", exc_info=error)
        if not self.response_complete:
            self._connection.transport.close()


class Connection(HttpToolsProtocol):
    """uvicorn's connection; it stamps requests, and tells them when their caller leaves."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.hot_app = cast("HotApp", self.app)
        self._direct: DirectExchange | None = None
        """The exchange whose body is being read, on the short way."""
        self.answering: DirectExchange | None = None
        """The exchange whose endpoint runs; a pipelined request may be the newer cycle."""

    def on_headers_complete(self) -> None:
        """Stamp the request, for a busy loop may run it much later; choose its way."""
        endpoint = self.hot_app.hot.get(self.url)
        busy = self.cycle is not None and not self.cycle.response_complete
        parser = self.parser
        if (
            endpoint is None
            or busy
            or parser.get_method() != b"POST"
            or parser.should_upgrade()
            or self.expect_100_continue
            or self.flow.write_paused
        ):
            cast("Scope", self.scope)[RECEIVED] = time.monotonic()
            super().on_headers_complete()
            return
        keep_alive = parser.get_http_version() != "1.0" and parser.should_keep_alive()
        self._direct = DirectExchange(self, endpoint, self.headers, keep_alive=keep_alive)
        self.cycle = cast("Any", self._direct)

    def on_body(self, body: bytes) -> None:
        """Keep a part of the body."""
        direct = self._direct
        if direct is None:
            super().on_body(body)
            return
        if not direct.held:
            direct.held = body
        else:
            if isinstance(direct.held, bytes):
                direct.held = bytearray(direct.held)
            direct.held += body
        if len(direct.held) > _MAX_BODY_BYTES:
            self._direct = None
            self.cycle = cast("Any", None)
            cast("Scope", self.scope)[RECEIVED] = direct.received_s
            super().on_headers_complete()
            super().on_body(bytes(direct.held))

    def on_message_complete(self) -> None:
        """Run the request whose body is whole."""
        direct = self._direct
        if direct is None:
            super().on_message_complete()
            return
        self._direct = None
        direct.whole = True
        direct.start()

    def connection_lost(self, exc: Exception | None) -> None:
        """Close as uvicorn does, then tell the request."""
        cycle: Any = self.cycle
        running = self.answering
        if isinstance(cycle, DirectExchange):
            self.cycle = cast("Any", None)  # uvicorn knows no such cycle
            if not cycle.response_complete:
                running = cycle
        super().connection_lost(exc)
        if running is not None:
            running.leave()
        elif cycle is not None and not cycle.response_complete:
            leave = cast("Scope", cycle.scope).get(ON_LEAVE)
            if leave is not None:
                leave()
