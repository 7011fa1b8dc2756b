"""Three replicas follow one wish: those that sleep, start late or share only a folder too."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
import redis

from tests.bundles import copy_bundle
from tests.live import LiveService, client_of, live_service
from tests.operating import TOKEN, WIDE, act, eventually, roles

pytestmark = pytest.mark.alone


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("store")
    for version in ("v1", "v2"):
        copy_bundle(store, version)
    return store


@pytest.fixture
def fleet(store: Path, valkey_url: str) -> Iterator[list[tuple[LiveService, httpx.Client]]]:
    with ExitStack() as stack:
        replicas = []
        for name in ("a", "b", "c"):
            service = stack.enter_context(
                live_service(
                    store=str(store),
                    version="v1",
                    redis_url=valkey_url,
                    admin_token=TOKEN,
                    replica=name,
                    **WIDE,
                )
            )
            replicas.append((service, stack.enter_context(client_of(service))))
        yield replicas


def states(client: httpx.Client) -> dict[str, str]:
    page = client.get("/v1/models").json()
    return {one["replica"]: one["state"] for one in page["replicas"]}


def generation(client: httpx.Client) -> int:
    return int(client.get("/v1/models").json()["wish"]["generation"])


def load_seconds(service: LiveService, version: str) -> float:
    """How long the service says that it took to load a version."""
    for line in service.lines:
        if '"ranker.changes"' in line and f'"model.version":"{version}"' in line:
            return float(json.loads(line)["took_ms"]) / 1e3
    raise AssertionError(f"{version} was never loaded")


def test_a_promotion_reaches_every_replica_and_a_sleeper_catches_up(
    fleet: list[tuple[LiveService, httpx.Client]],
) -> None:
    (_, first), (_, second), (sleeper, third) = fleet
    eventually(lambda: states(first) == dict.fromkeys("abc", "converged"))
    sleeper.process.send_signal(signal.SIGSTOP)
    started = time.monotonic()
    act(first, "promote", version="v2")
    eventually(lambda: all(roles(client)["primary"] == "v2" for client in (first, second)))
    took = time.monotonic() - started
    slowest_load = max(load_seconds(service, "v2") for service, _ in fleet[:2])
    assert took - slowest_load < 2
    eventually(lambda: states(first)["c"] == "silent")
    reasons = {one["replica"]: one["reason"] for one in first.get("/v1/models").json()["replicas"]}
    assert "last heard of" in reasons["c"]
    sleeper.process.send_signal(signal.SIGCONT)
    eventually(lambda: roles(third)["primary"] == "v2")
    eventually(lambda: states(second) == dict.fromkeys("abc", "converged"))


def test_a_wish_that_redis_forgot_is_written_again_and_can_be_changed(
    fleet: list[tuple[LiveService, httpx.Client]], valkey_url: str
) -> None:
    (_, first), (_, second), (_, third) = fleet
    act(first, "promote", version="v2")
    eventually(lambda: all(roles(client)["primary"] == "v2" for client in (first, second, third)))
    known = generation(first)
    with redis.Redis.from_url(valkey_url) as store:
        store.flushall()
        eventually(lambda: store.exists("fleet:{shop}:wish") == 1)
    eventually(lambda: {generation(client) for client in (first, second, third)} == {known + 1})
    assert {roles(client)["primary"] for client in (first, second, third)} == {"v2"}
    assert act(third, "rollback").status_code == 202
    eventually(lambda: all(roles(client)["primary"] == "v1" for client in (first, second, third)))
    with redis.Redis.from_url(valkey_url) as store:
        store.flushall()
        assert act(second, "rollback").status_code == 202, "at once, before it is written again"
    eventually(lambda: all(roles(client)["primary"] == "v2" for client in (first, second, third)))


def test_a_store_that_comes_back_with_an_older_wish_is_told_the_newer_one(
    fleet: list[tuple[LiveService, httpx.Client]], valkey_url: str
) -> None:
    (_, first), (_, second), (_, third) = fleet
    with redis.Redis.from_url(valkey_url) as store:
        act(first, "promote", version="v2")
        eventually(lambda: generation(third) == 1)
        older = store.get("fleet:{shop}:wish")
        act(second, "rollback")
        eventually(lambda: {generation(client) for client in (first, second, third)} == {2})
        store.set("fleet:{shop}:wish", older)
        eventually(lambda: {generation(client) for client in (first, second, third)} == {3})
    eventually(lambda: all(roles(client)["primary"] == "v1" for client in (first, second, third)))
    assert act(third, "promote", version="v2").status_code == 202
    eventually(lambda: all(roles(client)["primary"] == "v2" for client in (first, second, third)))


def test_a_replicas_own_wish_never_becomes_the_fleets(
    fleet: list[tuple[LiveService, httpx.Client]], valkey_url: str
) -> None:
    (_, first), (_, second), (_, third) = fleet
    act(first, "promote", version="v2")
    eventually(lambda: {generation(client) for client in (first, second, third)} == {1})
    assert act(second, "promote", version="v1", scope="replica").status_code == 202
    eventually(lambda: roles(second)["primary"] == "v1")
    with redis.Redis.from_url(valkey_url) as store:
        store.flushall()
    eventually(lambda: {generation(client) for client in (first, second, third)} == {2})
    eventually(lambda: all(roles(client)["primary"] == "v2" for client in (first, second, third)))


def test_without_redis_a_shared_folder_holds_the_wish(store: Path, tmp_path: Path) -> None:
    shared = {
        "store": str(store),
        "version": "v1",
        "admin_token": TOKEN,
        "fleet_folder": str(tmp_path / "fleet"),
        **WIDE,
    }
    with live_service(replica="a", **shared) as one, client_of(one) as first:
        act(first, "promote", version="v2")
        eventually(lambda: roles(first)["primary"] == "v2")
        with live_service(replica="b", **shared) as late, client_of(late) as second:
            assert roles(second)["primary"] == "v2"
            act(second, "rollback")
            eventually(lambda: roles(first)["primary"] == "v1")
            eventually(lambda: states(first) == {"a": "converged", "b": "converged"})
        eventually(lambda: states(first) == {"a": "converged"})
