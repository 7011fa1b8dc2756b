"""SIGTERM on a live process under load: readiness off, wait, close, finish, exit 0.

`pytest tests/integration/test_drain.py -o log_cli=true -o log_cli_level=info` shows figures.
"""

import asyncio
import logging
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest

from loadtests.driving.client import Client, Reply
from loadtests.driving.target import Target
from tests.live import LiveService, live_service

pytestmark = pytest.mark.alone

_log = logging.getLogger("tests.drain")
DRAIN_S = 1.5
RATE = 100
BALANCER_POLL_S = 0.1
BALANCER_LAG_S = 0.4
"""From seeing that a replica is not ready until the last caller knows."""
WIDE = {
    "timeout_ms": "10000",
    "signals_budget_ms": "5000",
    "redis_timeout_ms": "5000",
    "max_queue_ms": "5000",
    "stall_ms": "10000",
}


class Replica:
    """One replica as a balancer sees it: ready or not, by its last look at /readyz."""

    def __init__(self, service: LiveService) -> None:
        target = Target.parse(service.url)
        self.client = Client(target, max_connections=64, timeout_s=20)
        self.probe = Client(target, max_connections=1, timeout_s=20)
        self.ready = True
        self.left_s = float("inf")
        self.replies: list[Reply] = []

    async def follow_readiness(self) -> None:
        while True:
            reply = await self.probe.request("GET", "/readyz")
            if not reply.ok:
                self.left_s = reply.received_s
                await asyncio.sleep(BALANCER_LAG_S)
                self.ready = False
                return
            await asyncio.sleep(BALANCER_POLL_S)

    def rank(self, number: int) -> None:
        body = {"user_id": f"u{number % 20}", "items": [f"i{n}" for n in range(20)]}
        request = self.client.target.encode("POST", "/rank", msgspec.json.encode(body))
        self.client.send(request, self.replies.append)


async def until(happened: Callable[[], bool], within_s: float = 30) -> None:
    async with asyncio.timeout(within_s):
        while not happened():
            await asyncio.sleep(0.01)


async def test_a_replica_leaves_under_load_and_no_request_fails(valkey_url: str) -> None:
    drain_ms = str(int(DRAIN_S * 1000))
    with (
        live_service(redis_url=valkey_url, drain_ms=drain_ms, **WIDE) as leaving,
        live_service(redis_url=valkey_url, **WIDE) as staying,
    ):
        replicas = [Replica(leaving), Replica(staying)]
        followers = [asyncio.create_task(one.follow_readiness()) for one in replicas]
        sent = 0

        async def open_loop() -> None:
            nonlocal sent
            start_s = time.perf_counter()
            while True:
                ready = [one for one in replicas if one.ready]
                ready[sent % len(ready)].rank(sent)
                sent += 1
                await asyncio.sleep(start_s + sent / RATE - time.perf_counter())

        load = asyncio.create_task(open_loop())
        await until(lambda: min(len(one.replies) for one in replicas) > RATE // 4)
        leaving.process.send_signal(signal.SIGTERM)
        told_s = time.perf_counter()
        await until(lambda: not replicas[0].ready)
        status = await asyncio.to_thread(leaving.process.wait, 30)
        ended_s = time.perf_counter() - told_s
        await asyncio.sleep(0.3)
        for task in (load, *followers):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await until(lambda: sum(len(one.replies) for one in replicas) == sent)
        for one in replicas:
            await one.client.close()
            await one.probe.close()

    replies = [reply for one in replicas for reply in one.replies]
    unready_s = replicas[0].left_s - told_s
    late = [reply for reply in replicas[0].replies if reply.sent_s > replicas[0].left_s]
    _log.info(
        "%d requests, %d of them sent to the leaving replica when it was not ready any more; "
        "not ready after %.2f s, ended after %.2f s",
        *(sent, len(late), unready_s, ended_s),
    )
    assert [reply for reply in replies if not reply.ok] == []
    assert len(late) > RATE * BALANCER_LAG_S / 8
    assert {reply.headers.get(b"connection") for reply in late} == {b"close"}
    assert unready_s < DRAIN_S <= ended_s
    assert status == 0


async def test_a_request_on_its_way_is_answered_after_the_listener_closed(valkey_url: str) -> None:
    with live_service(redis_url=valkey_url, drain_ms="200", **WIDE) as service:
        where = urlsplit(service.url)
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        body = msgspec.json.encode({"user_id": "u1", "items": ["a", "b"]})
        request = Target.parse(service.url).encode("POST", "/rank", body)
        writer.write(request[:-10])
        await asyncio.sleep(0.2)
        service.process.send_signal(signal.SIGTERM)

        async def refused() -> bool:
            try:
                _, probe = await asyncio.open_connection(where.hostname, where.port)
            except ConnectionError:  # reset, if it stood in the listener's queue
                return True
            probe.close()
            return False

        async with asyncio.timeout(20):
            while not await refused():
                await asyncio.sleep(0.02)
        writer.write(request[-10:])
        answer = await reader.read()
        writer.close()
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert await asyncio.to_thread(service.process.wait, 30) == 0


def test_a_draining_replica_serves_and_asks_callers_to_go(valkey_url: str) -> None:
    slate = {"user_id": "u1", "items": ["a", "b"]}
    with (
        live_service(redis_url=valkey_url, drain_ms="3000", **WIDE) as service,
        httpx.Client(base_url=service.url, timeout=20) as client,
    ):
        assert "connection" not in client.post("/rank", json=slate).headers
        service.process.send_signal(signal.SIGTERM)
        while client.get("/readyz").status_code == 200:
            time.sleep(0.01)
        answer = client.post("/rank", json=slate)
        assert (answer.status_code, answer.headers["connection"]) == (200, "close")
        assert client.get("/livez").status_code == 200
