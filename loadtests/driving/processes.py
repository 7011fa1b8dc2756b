"""Processes under test: starting, pinning to a core, and the CPU time that they use."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from urllib.parse import urlsplit

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class StartFault(Exception):
    """A process under test did not become ready."""


@contextmanager
def pinned(core: int) -> Iterator[None]:
    """Run the block, and everything started in it, on one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def cores() -> tuple[int, int]:
    """A core for what is measured and a core for who measures; the same one if there is one."""
    available = sorted(os.sched_getaffinity(0))
    return available[0], available[-1]


def tree(pid: int) -> list[int]:
    """`pid` and all its living descendants."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(word) for task in tasks for word in (task / "children").read_text().split()]
    except OSError:
        return []
    return [pid, *(found for child in children for found in tree(child))]


def cpu_s(pids: Iterable[int]) -> float:
    """User and system CPU time of `pids` and their descendants, in steps of one tick."""
    ticks = 0
    for pid in {found for root in pids for found in tree(root)}:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks * _TICK_S


def free_port() -> int:
    """A TCP port of the loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _born(pid: int) -> str:
    """When a process started, which tells it from a later one of the same number."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


@contextmanager
def running(
    command: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command for the block with its output in `log`; SIGTERM, then SIGKILL, ends it.

    Children that outlive it are killed.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 - the command is the caller's own
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **(env or {})}
        )
        try:
            yield process
        finally:
            children = {pid: _born(pid) for pid in tree(process.pid)[1:]}
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for pid, born in children.items():
                if born and _born(pid) == born:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)


def get(url: str, *, timeout_s: float) -> tuple[int, str]:
    """Status and body of one GET on a connection of its own; http alone."""
    parts = urlsplit(url)
    with closing(HTTPConnection(parts.netloc, timeout=timeout_s)) as connection:
        connection.request("GET", parts.path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace")


def wait_until_ready(
    url: str, process: subprocess.Popen[bytes], *, log: Path, within_s: float = 60
) -> None:
    """Return once GET `url` is 200; raises StartFault with the log's end."""
    ends_s = time.monotonic() + within_s
    while time.monotonic() < ends_s and process.poll() is None:
        try:
            if get(url, timeout_s=1)[0] == HTTPStatus.OK:
                return
        except (OSError, HTTPException):
            pass
        time.sleep(0.05)
    tail = log.read_text(errors="replace")[-2000:]
    what = "was not ready in time" if process.poll() is None else f"ended ({process.returncode})"
    raise StartFault(f"{url}: the server {what}; the end of {log}:\n{tail}")
