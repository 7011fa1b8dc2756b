"""Faults on schedule: HTTP calls, signals, stalls and slow-downs of named processes.

Owns the schedule and its doing. What was done, and how it went, is part of the run.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec

from loadtests.driving.client import Client
from loadtests.driving.samples import AppliedFault
from loadtests.driving.target import Target

_SLICE_S = 0.02


class ScheduleFault(Exception):
    """A schedule that cannot be run: says which entry, and why."""


class _Entry(msgspec.Struct, frozen=True, kw_only=True, tag_field="do", forbid_unknown_fields=True):
    at_s: float
    """Seconds from the run's start."""


class Http(_Entry, frozen=True, kw_only=True, tag="http"):
    """One request, such as a swap of the model through an admin route."""

    path: str
    method: str = "POST"
    url: str = ""
    """Base URL; the replay's target without one."""
    body: Any = None
    token_env: str = ""
    """Environment variable that holds a bearer token."""

    @property
    def what(self) -> str:
        return f"{self.method} {self.path}"


class Stop(_Entry, frozen=True, kw_only=True, tag="stop"):
    """A process frozen for a while, as if its machine stalled."""

    process: str
    for_s: float

    @property
    def what(self) -> str:
        return f"stop {self.process} for {self.for_s:g} s"


class Slow(_Entry, frozen=True, kw_only=True, tag="slow"):
    """A process that gets only `share` of its time for a while, in slices of 20 ms."""

    process: str
    for_s: float
    share: float

    @property
    def what(self) -> str:
        return f"slow {self.process} to {self.share:g} for {self.for_s:g} s"


class Signal(_Entry, frozen=True, kw_only=True, tag="signal"):
    """A signal to a process, such as TERM or KILL."""

    process: str
    signal: str = "TERM"

    @property
    def what(self) -> str:
        return f"SIG{self.signal} to {self.process}"


class Command(_Entry, frozen=True, kw_only=True, tag="run"):
    """A command that is started and waited for, such as the start of a fresh replica."""

    command: list[str]

    @property
    def what(self) -> str:
        return " ".join(self.command)


Entry = Http | Stop | Slow | Signal | Command


def read_schedule(path: Path, processes: Mapping[str, int]) -> list[Entry]:
    """A JSON list of entries; raises ScheduleFault, also for a process that nobody named."""
    try:
        entries = msgspec.json.decode(path.read_bytes(), type=list[Entry])
    except (OSError, msgspec.DecodeError) as error:
        raise ScheduleFault(f"{path}: {error}") from error
    for number, entry in enumerate(entries):
        if isinstance(entry, Stop | Slow | Signal) and entry.process not in processes:
            known = ", ".join(processes) or "none"
            raise ScheduleFault(
                f"{path}: [{number}].process is {entry.process!r}; named processes: {known}"
            )
        if isinstance(entry, Signal) and not hasattr(signal, f"SIG{entry.signal}"):
            raise ScheduleFault(f"{path}: [{number}].signal: no signal SIG{entry.signal}")
        if isinstance(entry, Http) and entry.token_env and entry.token_env not in os.environ:
            raise ScheduleFault(f"{path}: [{number}].token_env: {entry.token_env} is not set")
        if isinstance(entry, Slow) and not 0 < entry.share < 1:
            raise ScheduleFault(f"{path}: [{number}].share is not between 0 and 1")
    return entries


async def apply(
    entry: Entry, *, start_s: float, target: Target, processes: Mapping[str, int]
) -> AppliedFault:
    """Wait for the entry's time and do it; a failure is a result, not an exception."""
    await asyncio.sleep(start_s + entry.at_s - perf_counter())
    at_s = perf_counter() - start_s
    done = True
    try:
        match entry:
            case Http():
                result = await call(entry, target)
                done = result.startswith("2")
            case Signal():
                os.kill(processes[entry.process], getattr(signal, f"SIG{entry.signal}"))
                result = "sent"
            case Stop():
                await _hold(processes[entry.process], entry.for_s)
                result = "stopped and continued"
            case Slow():
                ends_s = perf_counter() + entry.for_s
                while perf_counter() < ends_s:
                    await _hold(processes[entry.process], _SLICE_S * (1 - entry.share))
                    await asyncio.sleep(_SLICE_S * entry.share)
                result = "slowed and let go"
            case Command():
                process = await asyncio.create_subprocess_exec(*entry.command)
                code = await process.wait()
                result, done = f"exit code {code}", code == 0
    except OSError as error:
        result, done = f"failed: {error}", False
    return AppliedFault(round(at_s, 3), entry.what, result, done)


async def _hold(pid: int, for_s: float) -> None:
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(for_s)
    finally:
        os.kill(pid, signal.SIGCONT)


async def call(entry: Http, target: Target) -> str:
    """Do one HTTP entry now; what came of it, in words."""
    client = Client(
        Target.parse(entry.url) if entry.url else target, max_connections=1, timeout_s=60
    )
    headers = {}
    if entry.token_env:
        headers["authorization"] = f"Bearer {os.environ[entry.token_env]}"
    body = b"" if entry.body is None else msgspec.json.encode(entry.body)
    reply = await client.request(entry.method, entry.path, body, headers)
    await client.close()
    took_s = reply.received_s - reply.sent_s
    if reply.fault:
        return f"failed: {reply.fault}"
    return f"{reply.status} after {took_s:.2f} s" + (
        "" if reply.ok else f": {reply.body[:200].decode(errors='replace')}"
    )
