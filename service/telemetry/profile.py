"""A flame graph of this process, sampled from outside by py-spy: no cost while nobody asks."""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from service.errors import NotReady

MOST_S = 60
_RATE_HZ = 100
_PR_SET_PTRACER = 0x59616D61
_ANYBODY = ctypes.c_ulong(-1)
_NOBODY = ctypes.c_ulong(0)

_one_at_a_time = asyncio.Lock()


async def flame_graph(seconds: int) -> bytes:
    """An SVG of where all threads spent `seconds`; raises NotReady where sampling is impossible."""
    assert 1 <= seconds <= MOST_S
    found = shutil.which("py-spy", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if found is None:
        raise NotReady(
            "py-spy is not installed: it comes with the extra `profile`", retry_after_s=0
        )
    async with _one_at_a_time:
        with tempfile.TemporaryDirectory(prefix="ranker-profile-") as folder, _traceable():
            picture = Path(folder, "flame.svg")
            process = await asyncio.create_subprocess_exec(
                *(found, "record", "--pid", str(os.getpid()), "--output", str(picture)),
                *("--duration", str(seconds), "--rate", str(_RATE_HZ)),
                # pausing the process for each sample would show in every answer's time
                *("--nonblocking", "--threads", "--format", "flamegraph"),
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
            )
            _, words = await process.communicate()
            if process.returncode:
                told = words.decode(errors="replace").strip()
                raise NotReady(f"py-spy cannot sample: {told}", retry_after_s=0)
            return await asyncio.to_thread(picture.read_bytes)


@contextmanager
def _traceable() -> Iterator[None]:
    """Let a child look into this process, where the kernel asks for consent (Yama)."""
    if sys.platform != "linux":
        yield
        return
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PTRACER, _ANYBODY, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_PTRACER, _NOBODY, 0, 0, 0)
