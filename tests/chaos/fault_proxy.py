"""A TCP proxy whose faults are switched while it runs. They strike open connections too."""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
import struct
from types import TracebackType
from typing import Self

from redis.asyncio.connection import parse_url

CHUNK_BYTES = 65536


class FaultProxy:
    """Stands before a server; set its attributes to bring faults, `heal` to end them.

    delay_s, jitter_s: each chunk of a reply is held, plus a random part of jitter_s
    black_hole: nothing passes, either way; what was held goes on after healing
    truncate_bytes: a longer chunk of a reply is cut to so many bytes and the connection ended
    """

    def __init__(self, url: str, *, tls: ssl.SSLContext | None = None, seed: int = 0) -> None:
        target = parse_url(url)
        self._target = (target["host"], target["port"])
        self._tls = tls
        self._random = random.Random(seed)
        self._open: set[asyncio.StreamWriter] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self._passing = asyncio.Event()
        self._passing.set()
        self.delay_s = 0.0
        self.jitter_s = 0.0
        self.truncate_bytes: int | None = None
        self.connections = 0

    @property
    def black_hole(self) -> bool:
        return not self._passing.is_set()

    @black_hole.setter
    def black_hole(self, on: bool) -> None:
        if on:
            self._passing.clear()
        else:
            self._passing.set()

    async def __aenter__(self) -> Self:
        await self._listen(0)
        self.port = int(self._server.sockets[0].getsockname()[1])
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.heal()
        self.refuse()
        if self._serving:
            await asyncio.wait(self._serving)

    def heal(self) -> None:
        """No faults; a refusing proxy needs `accept`."""
        self.delay_s = self.jitter_s = 0.0
        self.truncate_bytes = None
        self.black_hole = False

    def refuse(self) -> None:
        """Close the port and reset what is open."""
        self._server.close()
        self.reset()

    async def accept(self) -> None:
        """Open the same port again."""
        await self._listen(self.port)

    def reset(self) -> None:
        """End every open connection with RST."""
        linger = struct.pack("ii", 1, 0)
        for writer in self._open:
            sock = writer.get_extra_info("socket")
            if sock is not None and sock.fileno() >= 0:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()

    def half_close(self) -> None:
        """End the replies of every open connection; requests still pass."""
        for writer in self._open:
            if writer.can_write_eof() and not writer.is_closing():
                writer.write_eof()

    async def _listen(self, port: int) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port, ssl=self._tls)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._open.add(writer)
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        onward: asyncio.StreamWriter | None = None
        try:
            back, onward = await asyncio.open_connection(*self._target)
            await asyncio.wait(
                [
                    asyncio.ensure_future(self._pass_requests(reader, onward)),
                    asyncio.ensure_future(self._pass_replies(back, writer)),
                ]
            )
        except OSError:
            pass  # the server is away: the client sees a closed connection
        finally:
            self._open.discard(writer)
            self._serving.discard(task)
            for end in (writer, onward):
                if end is not None:
                    end.close()

    async def _pass_requests(
        self, reader: asyncio.StreamReader, onward: asyncio.StreamWriter
    ) -> None:
        try:
            while chunk := await reader.read(CHUNK_BYTES):
                await self._passing.wait()
                onward.write(chunk)
                await onward.drain()
        except OSError:
            pass
        finally:
            onward.close()

    async def _pass_replies(self, back: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while chunk := await back.read(CHUNK_BYTES):
                await self._passing.wait()
                if self.delay_s or self.jitter_s:
                    await asyncio.sleep(self.delay_s + self._random.random() * self.jitter_s)
                if self.truncate_bytes is not None and len(chunk) > self.truncate_bytes:
                    writer.write(chunk[: self.truncate_bytes])
                    await writer.drain()
                    return
                writer.write(chunk)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()
