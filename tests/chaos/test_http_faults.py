"""What a caller sees while Redis fails, and what one caller's trouble does to others."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import httpx
import pytest

from tests.chaos.fault_proxy import FaultProxy
from tests.live import LiveService, live_service

ITEMS = [f"sku-{at:05d}" for at in range(20)]
BUDGET_MS = 400
DEADLINE_MS = 2_000
SLACK_MS = 3_000
TIMEOUT_MS = 2_500
"""Redis's own, for writes. A busy machine may be late by the slack."""


@pytest.fixture
async def proxy(valkey_url: str) -> AsyncIterator[FaultProxy]:
    async with FaultProxy(valkey_url) as proxy:
        yield proxy


@pytest.fixture
async def service(proxy: FaultProxy) -> AsyncIterator[LiveService]:
    settings = {
        "redis_url": f"redis://127.0.0.1:{proxy.port}/0",
        "signals_budget_ms": str(BUDGET_MS),
        "redis_timeout_ms": str(TIMEOUT_MS),
        "timeout_ms": str(DEADLINE_MS),
        "max_queue_ms": "5000",
        "stall_ms": "5000",
    }
    manager = live_service(**settings)
    service = await asyncio.to_thread(manager.__enter__)
    yield service
    await asyncio.to_thread(manager.__exit__, None, None, None)


@pytest.fixture
async def client(service: LiveService) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=service.url, timeout=30) as client:
        yield client


async def rank(client: httpx.AsyncClient, user: str = "u1") -> dict[str, object]:
    started = time.monotonic()
    answer = await client.post("/rank", json={"user_id": user, "items": ITEMS})
    assert (time.monotonic() - started) * 1e3 < DEADLINE_MS + SLACK_MS
    assert answer.status_code == 200, answer.text
    body: dict[str, object] = answer.json()
    assert len(body["items"]) == len(ITEMS)  # type: ignore[arg-type]
    return body


async def source(client: httpx.AsyncClient, user: str = "u1") -> tuple[str, list[str]]:
    body = await rank(client, user)
    return body["signals"]["source"], body["degraded"]  # type: ignore[index, return-value]


async def click(client: httpx.AsyncClient, user: str = "u1") -> int:
    event = {"type": "click", "user_id": user, "item_id": ITEMS[0]}
    return (await client.post("/v1/events", json=event)).status_code


async def heals(client: httpx.AsyncClient) -> None:
    """The breaker asks again about once a second."""
    for _ in range(80):
        if (await source(client, "healed"))[0] == "redis":
            return
        await asyncio.sleep(0.1)
    raise AssertionError("Redis is back and nobody noticed")


@pytest.mark.parametrize("fault", ["refused", "black hole", "slow", "cut", "killed"])
async def test_redis_trouble_degrades_and_heals(
    client: httpx.AsyncClient, proxy: FaultProxy, fault: str
) -> None:
    assert await click(client, "known") == 202
    assert (await source(client, "known"))[0] == "redis"
    match fault:
        case "refused":
            proxy.refuse()
        case "black hole":
            proxy.black_hole = True
        case "slow":
            proxy.delay_s = 1.5 * TIMEOUT_MS / 1e3
        case "cut":
            proxy.truncate_bytes = 3
        case "killed":
            proxy.delay_s = 0.02
            asking = [asyncio.create_task(rank(client, f"u{at}")) for at in range(20)]
            await asyncio.sleep(0.01)
            proxy.refuse()
            await asyncio.gather(*asking)
    assert await source(client, "unknown") == ("none", ["signals_unavailable"])
    assert await source(client, "known") == ("local", ["stale_signals"])
    assert (await client.get("/livez")).status_code == 200
    assert (await client.get("/readyz")).status_code == 200
    assert await click(client, "lost") == 503
    proxy.heal()
    if fault in {"refused", "killed"}:
        await proxy.accept()
    await heals(client)
    assert await click(client) == 202


async def test_callers_who_insist_on_fresh_signals_are_told(
    client: httpx.AsyncClient, proxy: FaultProxy
) -> None:
    proxy.refuse()
    body = {"user_id": "new", "items": ITEMS, "allow_degraded": False}
    answer = await client.post("/rank", json=body)
    assert answer.status_code == 503
    assert answer.json()["code"] == "signals_unavailable"
    assert answer.json()["retryable"] is True


@pytest.mark.parametrize(
    "sent",
    [
        b"POST /rank HTTP/1.1\r\nhost: x\r\ncontent-length: 500\r\n\r\n{",
        b"POST /rank HTTP/1.1\r\nhost: x\r\ncontent-length: 10485760\r\n\r\n" + b"\x00" * 100_000,
        b"\x16\x03\x01 this is no HTTP \r\n\r\n" * 1_000,
        b"POST /v1/events HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"",
    ],
    ids=["body cut short", "junk body", "not HTTP", "bad chunk", "nothing"],
)
async def test_one_callers_junk_changes_nothing_for_others(
    client: httpx.AsyncClient, service: LiveService, sent: bytes
) -> None:
    address = urlsplit(service.url)
    assert address.hostname is not None
    with socket.create_connection((address.hostname, address.port or 0)) as broken:
        broken.sendall(sent)
        assert (await source(client))[0] == "redis"
    assert (await source(client))[0] == "redis"


async def test_callers_who_leave_mid_flight_change_nothing_for_others(
    client: httpx.AsyncClient, service: LiveService, proxy: FaultProxy
) -> None:
    proxy.delay_s = 0.03  # so that they leave while their signals are on the way
    address = urlsplit(service.url)
    body = json.dumps({"user_id": "gone", "items": ITEMS}).encode()
    head = f"POST /rank HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    for _ in range(30):
        assert address.hostname is not None
        with socket.create_connection((address.hostname, address.port or 0)) as leaver:
            leaver.sendall(head + body)
            await asyncio.sleep(0.003)
    staying = await asyncio.gather(*[rank(client, f"u{at}") for at in range(10)])
    assert all(body["items"] for body in staying)
    proxy.delay_s = 0.0
    page = (await client.get("/metrics")).text
    assert 'outcome="cancelled"' in page
    assert 'outcome="failed"' not in page
