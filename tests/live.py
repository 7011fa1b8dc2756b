"""A real service in a process of its own, as `make serve` starts it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parent.parent
START_S = 60


class LiveService:
    """A running service: its URL, its process, and what it has printed."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._announced = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._announced.wait(START_S), "\n".join(self.lines)
        found = re.search(r"ranker at (http://\S+)", "\n".join(self.lines))
        assert found is not None, "\n".join(self.lines)
        self.url = found[1]

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if line.startswith("ranker at"):
                self._announced.set()
        self._announced.set()

    def stop(self, sig: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal, and the exit status."""
        self.process.send_signal(sig)
        status = self.process.wait(30)
        self._reader.join(10)
        return status


@contextmanager
def live_service(**settings: str) -> Iterator[LiveService]:
    """A service with these settings (without the prefix) on a free port."""
    environment = {key: value for key, value in os.environ.items() if "RANKER_" not in key}
    environment |= {f"RANKER_{key.upper()}": value for key, value in settings.items()}
    environment.setdefault("RANKER_PORT", "0")
    # what `auto` takes depends on the host: OpenVINO where the cores multiply bf16
    environment.setdefault("RANKER_BACKEND", "onnx-cpu")
    process = subprocess.Popen(
        [sys.executable, "-m", "service"],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield LiveService(process)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if process.stdout is not None:
            process.stdout.close()


def client_of(service: LiveService) -> httpx.Client:
    """A client with time enough for a busy machine."""
    return httpx.Client(base_url=service.url, timeout=30)
