"""URL -> redis client with an online service's bounds: milliseconds, no retries, RESP2.

redis-py's defaults (5 s timeouts, 10 retries) would hold a request for seconds.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from redis.asyncio import ConnectionPool, Redis, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff

Client = Redis | RedisCluster

SCHEMES = (
    *("redis", "rediss", "unix"),
    *("redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster"),
)
TLS_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs")
SENTINEL_OPTIONS = ("sentinel_username", "sentinel_password")


def connect(url: str, *, timeout_s: float, max_connections: int) -> Client:
    """A client that opens its connections when first used.

    redis://[user:password@]host[:port][/db], rediss:// (TLS), unix:///path[?db=n],
    redis+sentinel://host[:port],.../<master>[/db] and redis+cluster://host[:port],...
    (rediss+ for TLS). TLS_OPTIONS and, for Sentinel's own login, SENTINEL_OPTIONS may stand
    in the query. Raises ValueError that names the fault, never the password.
    """
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES:
        raise ValueError(f"Redis URL: unknown scheme {parts.scheme!r}; known: {', '.join(SCHEMES)}")
    if timeout_s <= 0 or max_connections < 1:
        raise ValueError("Redis: timeout and number of connections must be positive")
    options: dict[str, Any] = {
        **_login(parts),
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "retry": Retry(NoBackoff(), 0),
        "health_check_interval": 0,
        "protocol": 2,
    }
    if parts.scheme.endswith("+sentinel"):
        return _sentinel(parts, options, max_connections)
    if parts.scheme.endswith("+cluster"):
        return _cluster(parts, options, max_connections)
    return _server(parts, options, max_connections)


def check_url(url: str) -> None:
    """Raise ValueError, which names the fault, where `connect` would; opens no connection."""
    connect(url, timeout_s=1.0, max_connections=1)


def _server(parts: SplitResult, options: dict[str, Any], max_connections: int) -> Redis:
    if parts.scheme == "unix":
        if not parts.path:
            raise ValueError("Redis URL: unix:// needs a path")
        options["connection_class"] = UnixDomainSocketConnection
        options["path"] = unquote(parts.path)
        options["db"] = _number(_query(parts, ("db",)).get("db", "0"), "db")
    else:
        hosts = _hosts(parts, default_port=6379)
        if len(hosts) > 1:
            raise ValueError("Redis URL: several hosts need +sentinel or +cluster in the scheme")
        options["host"], options["port"] = hosts[0]
        options["db"] = _database(_path(parts))
        options |= _query(parts, _tls_options(parts))
        if _is_tls(parts):
            options["connection_class"] = SSLConnection
    return Redis.from_pool(ConnectionPool(max_connections=max_connections, **options))


def _sentinel(parts: SplitResult, options: dict[str, Any], max_connections: int) -> Redis:
    path = _path(parts)
    if not path:
        raise ValueError("Redis URL: +sentinel needs the name of the master as its path")
    query = _query(parts, (*_tls_options(parts), *SENTINEL_OPTIONS))
    login = {name.removeprefix("sentinel_"): query.pop(name, None) for name in SENTINEL_OPTIONS}
    options |= query | {"ssl": _is_tls(parts)}
    sentinel = Sentinel(  # type: ignore[no-untyped-call]
        _hosts(parts, default_port=26379), sentinel_kwargs=options | login
    )
    master: Redis = sentinel.master_for(
        path[0], max_connections=max_connections, db=_database(path[1:]), **options
    )
    return master


def _cluster(parts: SplitResult, options: dict[str, Any], max_connections: int) -> RedisCluster:
    if _path(parts):
        raise ValueError("Redis URL: a cluster has no numbered databases")
    options |= _query(parts, _tls_options(parts))
    # The one repetition follows a slot that has moved.
    options["retry"] = Retry(NoBackoff(), 1)
    return RedisCluster(
        startup_nodes=[ClusterNode(*host) for host in _hosts(parts, default_port=6379)],
        max_connections=max_connections,
        ssl=_is_tls(parts),
        **options,
    )


async def disconnect(client: Client) -> None:
    """Close the client and, behind Sentinel, the clients that watch it."""
    await client.aclose()
    if isinstance(client, Redis):
        manager = getattr(client.connection_pool, "sentinel_manager", None)
        for sentinel in manager.sentinels if manager else ():
            await sentinel.aclose()


def _is_tls(parts: SplitResult) -> bool:
    return parts.scheme.startswith("rediss")


def _tls_options(parts: SplitResult) -> tuple[str, ...]:
    return TLS_OPTIONS if _is_tls(parts) else ()


def _path(parts: SplitResult) -> list[str]:
    return [unquote(part) for part in parts.path.split("/") if part]


def _query(parts: SplitResult, known: tuple[str, ...]) -> dict[str, str]:
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    unknown = sorted(set(query) - set(known))
    if unknown:
        raise ValueError(
            f"Redis URL: unknown option {unknown[0]!r} for {parts.scheme}://; "
            f"known: {', '.join(known) or 'none'}"
        )
    return query


def _login(parts: SplitResult) -> dict[str, str]:
    user_part, at, _ = parts.netloc.rpartition("@")
    user, _, password = user_part.partition(":")
    login = {"username": unquote(user), "password": unquote(password)} if at else {}
    return {name: value for name, value in login.items() if value}


def _hosts(parts: SplitResult, *, default_port: int) -> list[tuple[str, int]]:
    hosts = []
    for place in parts.netloc.rpartition("@")[2].split(","):
        one = urlsplit(f"//{place}")
        try:
            port = one.port
        except ValueError as error:
            raise ValueError(f"Redis URL: bad port in {place!r}") from error
        if not one.hostname:
            raise ValueError(f"Redis URL: no host in {place!r}")
        hosts.append((one.hostname, default_port if port is None else port))
    return hosts


def _database(path: list[str]) -> int:
    if len(path) > 1:
        raise ValueError(f"Redis URL: {'/'.join(path)!r} is not a database number")
    return _number(path[0], "database") if path else 0


def _number(text: str, name: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"Redis URL: {name} must be a number, not {text!r}")
    return int(text)
