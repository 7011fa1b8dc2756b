"""HTTP/1.1 as a load generator needs it: warm connections, callbacks, no retries.

Owns connections and time-outs. Never decides when to send, and never hides a failure:
every request ends in exactly one Reply.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Literal, cast

import httptools
import msgspec

from loadtests.driving.target import Target

Fault = Literal["", "refused", "reset", "protocol", "timeout", "unsent"]
_SWEEP_S = 0.005
OnReply = Callable[["Reply"], None]


class Reply(msgspec.Struct, frozen=True):
    """The end of one request; `status` is 0 and `fault` a word where no answer came."""

    status: int
    fault: Fault
    headers: dict[bytes, bytes]
    """Names in lower case."""
    body: bytes
    sent_s: float
    """`perf_counter` when the bytes went to the socket, 0 if they never did."""
    received_s: float

    @property
    def ok(self) -> bool:
        """True for a status from 200 to 299."""
        return 200 <= self.status < 300


class _Exchange:
    """One request on its way: waiting for a connection, then for its answer."""

    __slots__ = ("connection", "expires_s", "on_reply", "request", "sent_s")

    def __init__(self, request: bytes, on_reply: OnReply, expires_s: float) -> None:
        self.request = request
        self.on_reply: OnReply | None = on_reply
        self.connection: _Connection | None = None
        self.expires_s = expires_s
        self.sent_s = 0.0

    def finish(
        self,
        *,
        status: int = 0,
        fault: Fault = "",
        headers: dict[bytes, bytes] | None = None,
        body: bytes = b"",
    ) -> None:
        on_reply = self.on_reply
        if on_reply is None:
            return
        self.on_reply = None
        on_reply(Reply(status, fault, headers or {}, body, self.sent_s, perf_counter()))


class _Connection(asyncio.Protocol):
    def __init__(self, client: Client) -> None:
        self._client = client
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[bytes, bytes] = {}
        self._body: list[bytes] = []
        self._answering = False
        self.exchange: _Exchange | None = None
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._client.opened(self)

    def send(self, exchange: _Exchange) -> None:
        assert self.exchange is None
        assert self.transport is not None
        self.exchange = exchange
        exchange.connection = self
        exchange.sent_s = perf_counter()
        self.transport.write(exchange.request)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.fail("protocol")

    def on_message_begin(self) -> None:
        self._headers = {}
        self._body = []
        self._answering = True

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_body(self, chunk: bytes) -> None:
        self._body.append(chunk)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:  # 100 and 103 announce the answer
            return
        reusable = self._parser.should_keep_alive()
        self._answer(status, reusable=reusable)

    def _answer(self, status: int, *, reusable: bool) -> None:
        exchange, self.exchange = self.exchange, None
        self._answering = False
        if exchange is None:  # an answer that nobody asked for
            self.abort()
            return
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        headers = self._headers
        if reusable:
            self._client.reuse(self)
        else:
            self.abort()
        exchange.finish(status=status, headers=headers, body=body)

    def connection_lost(self, exc: Exception | None) -> None:
        self._client.closed(self)
        if self.exchange is None:
            return
        until_close = not self._headers.keys() & {b"content-length", b"transfer-encoding"}
        if exc is None and self._answering and until_close:
            self._answer(self._parser.get_status_code(), reusable=False)
        else:
            self.fail("reset")

    def fail(self, fault: Fault) -> None:
        exchange, self.exchange = self.exchange, None
        self.abort()
        if exchange is not None:
            exchange.finish(fault=fault)

    def abort(self) -> None:
        self._client.forget(self)
        if self.transport is not None:
            self.transport.abort()


class Client:
    """Connections to one target; a request takes an idle one, or opens one, or waits for one.

    A request that gets no connection within `timeout_s` ends as `unsent`, one that gets no
    answer as `timeout`; both times count from `send`, and are looked at every 5 ms.
    """

    def __init__(self, target: Target, *, max_connections: int, timeout_s: float) -> None:
        self.target = target
        self.timeout_s = timeout_s
        self._max_connections = max_connections
        self._sockets: set[_Connection] = set()
        self._all_closed = asyncio.Event()
        self._open: set[_Connection] = set()
        self._idle: list[_Connection] = []
        self._waiting: deque[_Exchange] = deque()
        self._unfinished: deque[_Exchange] = deque()
        self._sweep: asyncio.TimerHandle | None = None
        self._opening: set[asyncio.Task[None]] = set()
        self._ssl = ssl.create_default_context() if target.tls else None
        self._loop = asyncio.get_running_loop()

    async def warm(self, count: int) -> None:
        """Open `count` connections; raises OSError if the target refuses."""
        connections = [await self._connect() for _ in range(count)]
        self._idle += connections

    def send(self, request: bytes, on_reply: OnReply) -> None:
        """Send now and return at once; `on_reply` is called once, on the loop."""
        exchange = _Exchange(request, on_reply, perf_counter() + self.timeout_s)
        self._unfinished.append(exchange)
        if self._sweep is None:
            self._sweep = self._loop.call_later(_SWEEP_S, self._expire)
        if self._idle:
            self._idle.pop().send(exchange)
            return
        self._waiting.append(exchange)
        self._open_another()

    async def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """Send, and wait for the Reply."""
        answer: asyncio.Future[Reply] = self._loop.create_future()

        def resolve(reply: Reply) -> None:
            if not answer.done():
                answer.set_result(reply)

        self.send(self.target.encode(method, path, body, headers), resolve)
        return await answer

    async def close(self) -> None:
        """Abort all connections and see them gone; requests on their way end as `reset`."""
        if self._sweep is not None:
            self._sweep.cancel()
        for task in list(self._opening):
            task.cancel()
        while self._waiting:
            self._waiting.popleft().finish(fault="unsent")
        for connection in list(self._open):
            connection.fail("reset")
        if self._sockets:
            await self._all_closed.wait()

    def reuse(self, connection: _Connection) -> None:
        """Give an idle connection its next request."""
        while self._waiting:
            exchange = self._waiting.popleft()
            if exchange.on_reply is not None:
                connection.send(exchange)
                return
        self._idle.append(connection)

    def forget(self, connection: _Connection) -> None:
        """Drop a connection that is closed or about to be, and open one for who waits."""
        if connection not in self._open:
            return
        self._open.remove(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        if self._waiting:
            self._open_another()

    def opened(self, connection: _Connection) -> None:
        """Count a socket."""
        self._open.add(connection)
        self._sockets.add(connection)

    def closed(self, connection: _Connection) -> None:
        """Forget a socket that is gone."""
        self.forget(connection)
        self._sockets.discard(connection)
        if not self._sockets:
            self._all_closed.set()

    async def _connect(self) -> _Connection:
        _, connection = await self._loop.create_connection(
            lambda: _Connection(self), self.target.host, self.target.port, ssl=self._ssl
        )
        return connection

    def _open_another(self) -> None:
        if len(self._open) + len(self._opening) < self._max_connections:
            task = self._loop.create_task(self._open_for_waiting())
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _open_for_waiting(self) -> None:
        opening = asyncio.current_task()
        assert opening is not None
        try:
            connection = await self._connect()
        except OSError:
            self._opening.discard(opening)
            nobody_else = not self._open and not self._opening
            for _ in range(len(self._waiting) if nobody_else else min(1, len(self._waiting))):
                self._waiting.popleft().finish(fault="refused")
        else:
            self.reuse(connection)

    def _expire(self) -> None:
        """End what is past its time; one timer for all is cheaper than one for each."""
        unfinished, now_s = self._unfinished, perf_counter()
        while unfinished and (unfinished[0].on_reply is None or unfinished[0].expires_s <= now_s):
            exchange = unfinished.popleft()
            if exchange.on_reply is None:
                continue
            if exchange.connection is None:
                exchange.finish(fault="unsent")
            else:
                exchange.connection.fail("timeout")
        self._sweep = self._loop.call_later(_SWEEP_S, self._expire) if unfinished else None
