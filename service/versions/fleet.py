"""The fleet's shared state: one wish a model, and what each replica says that it runs.

Read and written beside the request path, never on it. In Redis, or in files on a volume
that the replicas share.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec
from redis.exceptions import RedisError

from service.errors import FleetFault
from service.versions.gates import Counts
from service.versions.rollout import Role, Wish

FORGET_S = 60.0
"""A replica unheard of for so long is taken off the list."""
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,199}")


class Replica(msgspec.Struct, kw_only=True):
    """What one replica runs, in its own words."""

    replica: str
    generation: int
    """The wish that it knows."""
    at_ms: int
    roles: dict[Role, str] = {}
    """Version by role."""
    loading: str | None = None
    faults: dict[Role | Literal["backend"], str] = {}
    """By role, and of the engine that is tried first: why it is not what is wished."""
    canary: Counts | None = None
    primary: Counts | None = None
    """Counts of the canary's present step, while there is a canary."""


class FleetState(msgspec.Struct, frozen=True):
    """One look at the shared state."""

    wish: Wish | None
    replicas: tuple[Replica, ...]

    @property
    def newest(self) -> int:
        """The newest generation that a replica says it knows."""
        return max((replica.generation for replica in self.replicas), default=0)


class Fleet(Protocol):
    """Where the shared state lies; each call raises FleetFault."""

    async def look(self, report: Replica | None) -> FleetState:
        """Leave one's own report, if any, and read everything."""
        ...

    async def replace(self, wish: Wish) -> bool:
        """Write a wish; False unless it is newer than the one that is there.

        Two that follow the same one have the same generation, so the second is not written; a
        store that has forgotten takes what replicas still know.
        """
        ...

    async def leave(self, replica: str) -> None:
        """Take a replica off the list."""
        ...


class RedisFleet:
    """One key for the wish and one hash for the reports; the braces keep both in one slot."""

    def __init__(self, client: Any, *, model: str) -> None:
        """`client` is a redis.asyncio client, of a server or of a cluster; not closed here."""
        self._client = client
        self._wish = f"fleet:{{{model}}}:wish"
        self._replicas = f"fleet:{{{model}}}:replicas"

    async def look(self, report: Replica | None) -> FleetState:
        """See Fleet."""
        try:
            pipeline = self._client.pipeline()
            if report is not None:
                pipeline.hset(self._replicas, report.replica, msgspec.json.encode(report))
                pipeline.expire(self._replicas, int(FORGET_S))
            pipeline.get(self._wish)
            pipeline.hgetall(self._replicas)
            *_, wish, replicas = await pipeline.execute()
            known, silent = _heard(replicas.values())
            if silent:
                await self._client.hdel(self._replicas, *silent)
        except (RedisError, OSError, TimeoutError) as error:
            raise FleetFault(f"Redis: {error}") from error
        return FleetState(_decode_wish(wish), known)

    async def replace(self, wish: Wish) -> bool:
        """See Fleet."""
        try:
            done = await self._client.eval(
                _REPLACE, 1, self._wish, wish.generation, msgspec.json.encode(wish)
            )
        except (RedisError, OSError, TimeoutError) as error:
            raise FleetFault(f"Redis: {error}") from error
        return bool(done)

    async def leave(self, replica: str) -> None:
        """See Fleet."""
        try:
            await self._client.hdel(self._replicas, replica)
        except (RedisError, OSError, TimeoutError) as error:
            raise FleetFault(f"Redis: {error}") from error


_REPLACE = """
local now = redis.call('GET', KEYS[1])
if now and cjson.decode(now)['generation'] >= tonumber(ARGV[1]) then return 0 end
redis.call('SET', KEYS[1], ARGV[2])
return 1
"""


class FileFleet:
    """`<folder>/wish.json` and `<folder>/replicas/<replica>.json`, each replaced by rename."""

    def __init__(self, folder: Path) -> None:
        self._wish = folder / "wish.json"
        self._replicas = folder / "replicas"

    async def look(self, report: Replica | None) -> FleetState:
        """See Fleet."""
        return await asyncio.to_thread(self._look, report)

    def _look(self, report: Replica | None) -> FleetState:
        try:
            self._replicas.mkdir(parents=True, exist_ok=True)
            if report is not None:
                assert _WORD.fullmatch(report.replica)
                _write(self._replicas / f"{report.replica}.json", msgspec.json.encode(report))
            reports = [path.read_bytes() for path in sorted(self._replicas.glob("*.json"))]
            known, silent = _heard(reports)
            for replica in silent:
                (self._replicas / f"{replica}.json").unlink(missing_ok=True)
            wish = self._wish.read_bytes() if self._wish.exists() else None
        except OSError as error:
            raise FleetFault(f"{self._wish.parent}: {error}") from error
        return FleetState(_decode_wish(wish), known)

    async def replace(self, wish: Wish) -> bool:
        """See Fleet."""
        return await asyncio.to_thread(self._replace, wish)

    def _replace(self, wish: Wish) -> bool:
        try:
            self._wish.parent.mkdir(parents=True, exist_ok=True)
            with self._wish.with_suffix(".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                now = _decode_wish(self._wish.read_bytes() if self._wish.exists() else None)
                if now is not None and now.generation >= wish.generation:
                    return False
                _write(self._wish, msgspec.json.format(msgspec.json.encode(wish), indent=2))
        except OSError as error:
            raise FleetFault(f"{self._wish}: {error}") from error
        return True

    async def leave(self, replica: str) -> None:
        """See Fleet."""
        try:
            (self._replicas / f"{replica}.json").unlink(missing_ok=True)
        except OSError as error:
            raise FleetFault(f"{self._replicas}: {error}") from error


def replica_name(host: str, port: int) -> str:
    """A replica's word: its host, its port, and its process."""
    return re.sub(r"[^A-Za-z0-9._:-]", "-", f"{host}:{port}:{os.getpid()}")


def _write(path: Path, content: bytes) -> None:
    staged = path.with_suffix(f".{os.getpid()}.part")
    staged.write_bytes(content)
    staged.rename(path)


def _decode_wish(content: bytes | None) -> Wish | None:
    if content is None:
        return None
    try:
        return msgspec.json.decode(content, type=Wish)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FleetFault(f"the wish cannot be read: {error}") from error


def _heard(reports: Iterable[bytes]) -> tuple[tuple[Replica, ...], list[str]]:
    """The replicas heard of lately, by name, and the names of the silent ones."""
    oldest_ms = time.time_ns() // 1_000_000 - int(FORGET_S * 1e3)
    known, silent = [], []
    for content in reports:
        try:
            replica = msgspec.json.decode(content, type=Replica)
        except (msgspec.DecodeError, UnicodeDecodeError):  # of another release
            continue
        if replica.at_ms < oldest_ms:
            silent.append(replica.replica)
        else:
            known.append(replica)
    return tuple(sorted(known, key=lambda replica: replica.replica)), silent
