"""One generator: sends its share of a spool on time, whatever the answers do.

Open loop: nothing here waits for an answer. What it cannot send on time, it sends late and
says so; latency counts from the due time either way.
"""

from __future__ import annotations

import asyncio
import gc
import math
import os
import resource
import signal
import time
from array import array
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter

import msgspec
import numpy as np
import uvloop
from numpy.typing import NDArray

from loadtests.driving.client import Client, Reply
from loadtests.driving.samples import FAULTS, Samples
from loadtests.driving.spool import KINDS, Spool
from loadtests.driving.target import Target
from loadtests.driving.timerfd import TimerFd

_BURST = 32
"""Most requests sent before answers are looked at again."""
_GRAIN_S = 0.0002
"""Least time between two wake-ups: it bounds what waking costs at high rates."""
_PULSE_LATENCIES = 1000
"""Most latencies of a pulse: what fits a pipe never makes the sender wait for the reader."""
_READ_EVERY = 16
"""Of every so many rankings the body is read, for the age of its signals; and of those by
users who clicked before."""
_RANK = KINDS.index("rank")
_FAULT_PLACE = {fault: place for place, fault in enumerate(FAULTS)}


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What one generator process is told."""

    folder: str
    part: int
    parts: int
    target: Target
    connections: int
    max_connections: int
    timeout_s: float
    core: int | None
    realtime: bool


class Pulse(msgspec.Struct, frozen=True):
    """A generator's last second."""

    sent: int
    done: int
    failed: int
    answers: int
    """Of the last second."""
    latencies_s: list[float]
    """Of some of them, evenly chosen."""


class _Signals(msgspec.Struct, frozen=True):
    age_ms: float | None = None


class _Ranking(msgspec.Struct):
    signals: _Signals = _Signals()


_read_ranking = msgspec.json.Decoder(_Ranking).decode


class Generator:
    """Sends and writes down; `run` ends when every request has."""

    def __init__(self, spool: Spool, mine: NDArray[np.int64], client: Client) -> None:
        self._spool = spool
        self._mine = mine.tolist()
        self._due_s: list[float] = spool.due_s[mine].tolist()
        self._is_rank: list[bool] = (spool.kind[mine] == _RANK).tolist()
        self._is_click: list[bool] = spool.click[mine].tolist()
        self._user: list[int] = spool.user[mine].tolist()
        self._clicked_ms: dict[int, float] = {}
        """User to the time of their last acknowledged click."""
        self._client = client
        self._start_s = 0.0
        self._clock_offset_ms = 0.0
        count = len(mine)
        self._late = array("d", bytes(8 * count))
        self._latency = array("d", bytes(8 * count))
        self._status = array("h", bytes(2 * count))
        self._fault = array("B", bytes(count))
        self._degraded = array("H", bytes(2 * count))
        self._version = array("H", bytes(2 * count))
        self._sent_ms = array("d", bytes(8 * count))
        self._wanted_ms = array("d", bytes(8 * count))
        self._age_ms = array("f", [math.nan]) * count
        self._behind_ms = array("f", [math.nan]) * count
        self._timing: list[bytes | None] = [None] * count
        self._words: dict[bytes, int] = {b"": 0}
        self._next = 0
        self._done = 0
        self._failed = 0
        self._recent: list[float] = []
        self._finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self, start_s: float) -> None:
        """Send everything, counted from `start_s` on the clock of `perf_counter`."""
        self._start_s = start_s
        self._clock_offset_ms = time.time() * 1e3 - perf_counter() * 1e3
        if not self._mine:
            return
        loop = asyncio.get_running_loop()
        with TimerFd() as timer:
            loop.add_reader(timer.fd, self._on_timer, timer)
            timer.arm(start_s + self._due_s[0])
            try:
                await self._finished
            finally:
                loop.remove_reader(timer.fd)

    def pulse(self) -> Pulse:
        """Counts so far, and what came since the last call."""
        recent, self._recent = self._recent, []
        some = recent[:: -(-len(recent) // _PULSE_LATENCIES) or 1]
        return Pulse(self._next, self._done, self._failed, len(recent), some)

    def _on_timer(self, timer: TimerFd) -> None:
        at, due_s, start_s = self._next, self._due_s, self._start_s
        mine, request, send = self._mine, self._spool.request, self._client.send
        last = min(at + _BURST, len(due_s))
        now_s = perf_counter()
        while at < last and start_s + due_s[at] <= now_s:
            self._late[at] = now_s - start_s - due_s[at]
            now_ms = int(now_s * 1e3 + self._clock_offset_ms)
            self._sent_ms[at] = now_ms
            if self._is_rank[at]:
                self._wanted_ms[at] = self._clicked_ms.get(self._user[at], 0.0)
            send(request(mine[at], now_ms), partial(self._on_reply, at))
            at += 1
            now_s = perf_counter()
        self._next = at
        if at < len(due_s):
            due_next_s = start_s + due_s[at]
            timer.arm(due_next_s if at == last else max(due_next_s, now_s + _GRAIN_S))
        else:
            timer.clear()

    def _on_reply(self, at: int, reply: Reply) -> None:
        latency_s = reply.received_s - self._start_s - self._due_s[at]
        self._latency[at] = latency_s
        self._status[at] = reply.status
        self._recent.append(latency_s)
        if reply.fault:
            self._fault[at] = _FAULT_PLACE[reply.fault]
        headers = reply.headers
        if reason := headers.get(b"x-degraded"):
            self._degraded[at] = self._word(reason)
        if version := headers.get(b"x-model-version"):
            self._version[at] = self._word(version)
        self._timing[at] = headers.get(b"server-timing")
        if reply.ok:
            if self._is_rank[at] and (self._wanted_ms[at] or at % _READ_EVERY == 0):
                self._read_age(at, reply)
            elif self._is_click[at]:
                self._clicked_ms[self._user[at]] = self._sent_ms[at]
        else:
            self._failed += 1
        self._done += 1
        if self._done == len(self._mine):
            self._finished.set_result(None)

    def _read_age(self, at: int, reply: Reply) -> None:
        try:
            age_ms = _read_ranking(reply.body).signals.age_ms
        except (msgspec.DecodeError, UnicodeDecodeError):
            return  # some other service's answer: no age to tell
        if age_ms is not None:
            self._age_ms[at] = age_ms
        if wanted_ms := self._wanted_ms[at]:
            now_ms = reply.received_s * 1e3 + self._clock_offset_ms
            newest_ms = -math.inf if age_ms is None else now_ms - age_ms
            self._behind_ms[at] = max(wanted_ms - newest_ms, 0.0)

    def _word(self, word: bytes) -> int:
        place = self._words.get(word)
        if place is None:
            place = self._words[word] = min(len(self._words), 2**16 - 1)
        return place

    def samples(self) -> Samples:
        """The columns, once `run` has ended."""
        return Samples(
            due_s=np.array(self._due_s),
            late_s=np.array(self._late),
            latency_s=np.array(self._latency),
            kind=self._spool.kind[self._mine],
            status=np.array(self._status),
            fault=np.array(self._fault),
            degraded=np.array(self._degraded),
            version=np.array(self._version),
            signal_age_ms=np.array(self._age_ms),
            behind_ms=np.array(self._behind_ms),
            stages=parse_server_timing(self._timing),
            words=[word.decode("latin-1") for word in self._words],
        )


def parse_server_timing(headers: list[bytes | None]) -> dict[str, NDArray[np.float32]]:
    """Durations in ms by metric name, [n] each, of `Server-Timing` headers; NaN if not told."""
    stages: dict[str, NDArray[np.float32]] = {}
    for at, header in enumerate(headers):
        if not header:
            continue
        for metric in header.decode("latin-1").split(","):
            name, *fields = (part.strip() for part in metric.split(";"))
            for field in fields:
                key, _, value = field.partition("=")
                if key == "dur":
                    if name not in stages:
                        stages[name] = np.full(len(headers), np.nan, np.float32)
                    try:
                        stages[name][at] = float(value)
                    except ValueError:
                        continue
    return stages


def work(order: Order, parent: Connection) -> None:
    """The life of a generator process: say ready, get the start, send, say done.

    Messages to the parent: "ready", Pulses, then the path of the samples and CPU seconds;
    or an error's text.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    if order.core is not None:
        os.sched_setaffinity(0, {order.core})
    try:
        if order.realtime:
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        uvloop.run(_work(order, parent))
    except OSError as error:
        address = f"{order.target.host}:{order.target.port}"
        parent.send(f"generator {order.part}, to {address}: {error}")


async def _work(order: Order, parent: Connection) -> None:
    spool = Spool.open(Path(order.folder))
    client = Client(order.target, max_connections=order.max_connections, timeout_s=order.timeout_s)
    generator = Generator(spool, spool.share(order.part, order.parts), client)
    await client.warm(order.connections)
    parent.send("ready")
    start_s: float = await asyncio.to_thread(parent.recv)
    cpu_before_s = time.process_time()
    gc.collect()
    gc.freeze()
    gc.disable()
    beat = asyncio.create_task(_beat(generator.pulse, parent))
    await generator.run(start_s)
    beat.cancel()
    cpu_s = time.process_time() - cpu_before_s
    await client.close()
    path = Path(order.folder) / f"part-{order.part}.npz"
    generator.samples().save(path)
    parent.send((str(path), cpu_s))


async def _beat(pulse: Callable[[], Pulse], parent: Connection) -> None:
    while True:
        await asyncio.sleep(1)
        parent.send(pulse())
