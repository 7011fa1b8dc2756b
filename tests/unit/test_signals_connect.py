"""Redis URLs: what each kind becomes, and the fault that a bad one names."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster
from redis.asyncio.sentinel import SentinelConnectionPool

from service.signals.breaker import Breaker
from service.signals.connect import connect
from service.signals.store import SignalStore


def options(url: str) -> dict[str, object]:
    client = connect(url, timeout_s=0.05, max_connections=8)
    assert isinstance(client, Redis)
    return dict(client.connection_pool.connection_kwargs)


def test_timeouts_are_the_given_ones_and_nothing_is_repeated() -> None:
    got = options("redis://host")
    assert got["socket_timeout"] == got["socket_connect_timeout"] == 0.05
    assert got["retry"]._retries == 0  # type: ignore[attr-defined]
    assert got["protocol"] == 2


def test_a_full_url() -> None:
    got = options("rediss://me:p%40ss@h:1234/3?ssl_ca_certs=/ca.pem")
    assert (got["host"], got["port"], got["db"]) == ("h", 1234, 3)
    assert (got["username"], got["password"]) == ("me", "p@ss")
    assert got["ssl_ca_certs"] == "/ca.pem"


def test_ports_and_databases_have_their_usual_defaults() -> None:
    got = options("redis://:secret@[::1]")
    assert (got["host"], got["port"], got["db"]) == ("::1", 6379, 0)
    assert "username" not in got


def test_a_unix_socket() -> None:
    got = options("unix:///run/valkey.sock?db=2")
    assert (got["path"], got["db"]) == ("/run/valkey.sock", 2)


def test_a_sentinel_url() -> None:
    client = connect(
        "redis+sentinel://:pw@a:1,b/main/4?sentinel_password=spw",
        timeout_s=0.05,
        max_connections=8,
    )
    assert isinstance(client, Redis)
    pool = client.connection_pool
    assert isinstance(pool, SentinelConnectionPool)
    assert (pool.service_name, pool.connection_kwargs["db"]) == ("main", 4)
    assert pool.connection_kwargs["password"] == "pw"
    watched = [s.connection_pool.connection_kwargs for s in pool.sentinel_manager.sentinels]
    assert [(w["host"], w["port"], w["password"]) for w in watched] == [
        ("a", 1, "spw"),
        ("b", 26379, "spw"),
    ]


def test_a_cluster_url() -> None:
    client = connect("redis+cluster://a:1,b:2", timeout_s=0.05, max_connections=8)
    assert isinstance(client, RedisCluster)
    assert list(client.nodes_manager.startup_nodes) == ["a:1", "b:2"]


@pytest.mark.parametrize(
    ("url", "fault"),
    [
        ("http://h", "unknown scheme 'http'"),
        ("", "unknown scheme"),
        ("redis://", "no host"),
        ("redis://h:port", "bad port"),
        ("redis://h:99999", "bad port"),
        ("redis://h/one", "database must be a number"),
        ("redis://h/1/2", "not a database number"),
        ("redis://a,b", r"\+sentinel or \+cluster"),
        ("redis://h?socket_timeout=5", "unknown option 'socket_timeout'"),
        ("redis://h?ssl_ca_certs=x", "unknown option 'ssl_ca_certs'"),
        ("unix://", "needs a path"),
        ("unix:///s?db=x", "db must be a number"),
        ("redis+sentinel://h", "name of the master"),
        ("redis+sentinel://h/main/x", "database must be a number"),
        ("redis+cluster://h/1", "no numbered databases"),
        ("redis+cluster://h,:5", "no host in ':5'"),
    ],
)
def test_a_bad_url_names_its_fault_and_no_password(url: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault) as caught:
        connect(url.replace("://", "://u:hunter2@"), timeout_s=0.05, max_connections=8)
    assert "hunter2" not in str(caught.value)


def test_a_store_that_could_not_open_its_connections_does_not_start() -> None:
    client = connect("redis://host", timeout_s=0.05, max_connections=5)
    with pytest.raises(ValueError, match="may open 5 connections, but 4 pipelines and 2 writers"):
        SignalStore(client, breaker=Breaker())
