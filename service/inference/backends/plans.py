"""The plan cache: engine plans on disk, each beside the key of what it was built from.

A plan is executable and bound to its host: only what this service built itself is read,
from a folder that nobody else may write to, and only if every part of its key is the same.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from service.errors import PlanFault

SCHEMA = 1


class Profile(msgspec.Struct, frozen=True):
    """Which sizes an optimization profile serves: 1 to `users` users, and just so many tiles."""

    users: int
    tiles: int


class PlanKey(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a plan depends on."""

    product: str
    """tensorrt or tensorrt_rtx."""
    version: str
    sm: str
    device: str
    """The device's name for TensorRT, whose tactics are chosen on it; empty for RTX."""
    platform: str
    graph_sha256: str
    precision: str
    profiles: tuple[Profile, ...]
    schema: int = SCHEMA

    def differences(self, other: PlanKey) -> list[str]:
        """The parts that are not the same, with both values: `sm is 8.6, not 8.0`."""
        return [
            f"{part} is {_short(getattr(other, part))}, not {_short(getattr(self, part))}"
            for part in self.__struct_fields__
            if getattr(self, part) != getattr(other, part)
        ]


class _Entry(msgspec.Struct, frozen=True):
    """What lies beside a plan."""

    key: PlanKey
    size_bytes: int
    sha256: str


class PlanCache:
    """A folder of plans, one a bundle and precision."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, name: str, precision: str) -> Path:
        """Where the plan of a bundle's graph lies."""
        return self.folder / f"{name}-{precision}.plan"

    def read(self, name: str, wanted: PlanKey) -> bytes:
        """The plan of this key; raises PlanFault, which says what is missing or differs."""
        path = self.path(name, wanted.precision)
        try:
            entry = msgspec.json.decode(path.with_suffix(".json").read_bytes(), type=_Entry)
            _check_private(self.folder)
            _check_private(path)
            plan = path.read_bytes()
        except FileNotFoundError as error:
            raise PlanFault(f"no plan {path.name} in the cache") from error
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise PlanFault(f"{path.name} cannot be read: {error}") from error
        if differences := wanted.differences(entry.key):
            raise PlanFault(f"{path.name}: {'; '.join(differences)}")
        if len(plan) != entry.size_bytes or hashlib.sha256(plan).hexdigest() != entry.sha256:
            raise PlanFault(f"{path.name} does not have the digest of its entry")
        return plan

    @contextmanager
    def only_writer(self, name: str, precision: str) -> Iterator[None]:
        """Keep other processes of this host from building the same plan; waits for them."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self.path(name, precision).with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def write(self, name: str, key: PlanKey, plan: bytes) -> Path:
        """Keep a plan; the entry that makes it exist comes last."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self.path(name, key.precision)
        entry = _Entry(key, len(plan), hashlib.sha256(plan).hexdigest())
        path.with_suffix(".json").unlink(missing_ok=True)
        _replace(path, plan)
        _replace(path.with_suffix(".json"), msgspec.json.encode(entry))
        return path


def _short(value: object) -> str:
    if isinstance(value, tuple):
        return f"{len(value)} profiles {[tuple(msgspec.structs.astuple(p)) for p in value]}"
    return str(value)


def _check_private(path: Path) -> None:
    """Raise PlanFault where another user could have put something else there."""
    found = path.stat(follow_symlinks=False)
    if stat.S_ISLNK(found.st_mode):
        raise PlanFault(f"{path.name} is a symbolic link")
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PlanFault(f"{path.name} can be written by others")


def _replace(path: Path, content: bytes) -> None:
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    staged.replace(path)
