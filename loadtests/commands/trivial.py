"""A server that does nothing, to measure the generator itself; it freezes on request.

It answers every request with the same empty slate, and `POST /freeze?ms=1000` by holding
its whole loop, as a stop-the-world pause would.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import cast
from urllib.parse import parse_qs, urlsplit

import httptools
import uvloop

_BODY = b'{"items":[],"degraded":[]}'
_ANSWER = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nserver-timing: work;dur=0.01\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(_BODY), _BODY)
)


class _Answering(asyncio.Protocol):
    def __init__(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._url = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._url = url

    def on_message_complete(self) -> None:
        assert self._transport is not None
        self._transport.write(_ANSWER)
        if self._url.startswith(b"/freeze"):
            query = parse_qs(urlsplit(self._url.decode()).query)
            asyncio.get_running_loop().call_soon(time.sleep, int(query["ms"][0]) / 1000)


async def serve(host: str, port: int) -> None:
    """Serve until cancelled; prints the address once it listens."""
    server = await asyncio.get_running_loop().create_server(_Answering, host, port, backlog=4096)
    bound = server.sockets[0].getsockname()
    print(f"http://{bound[0]}:{bound[1]}", flush=True)
    await server.serve_forever()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")


def run(args: argparse.Namespace) -> int:
    uvloop.run(serve(args.host, args.port))
    return 0
