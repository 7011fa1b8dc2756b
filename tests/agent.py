"""Datadog's own test agent: receives what ddtrace and OTLP send, and lets a test read it back.

It has a virtual environment of its own, `.venv-agent`, made on first use (or by `make agent`).
"""

from __future__ import annotations

import base64
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans

from loadtests.driving.processes import free_port
from tests.live import ROOT, START_S

VERSION = "1.69.1"
_FOLDER = ROOT / ".venv-agent"
_COMMAND = _FOLDER / "bin" / "ddapm-test-agent"


def installed_agent() -> Path:
    """The agent's command; made if it is missing, which takes half a minute once."""
    if not _COMMAND.exists():
        subprocess.run([sys.executable, "-m", "venv", str(_FOLDER)], check=True)
        pip = str(_FOLDER / "bin" / "pip")
        subprocess.run([pip, "install", "--quiet", f"ddapm-test-agent=={VERSION}"], check=True)
    return _COMMAND


class Agent:
    """A running test agent."""

    def __init__(self, url: str, otlp_url: str, http: httpx.Client) -> None:
        self.url = url
        self.otlp_url = otlp_url
        self._http = http

    def clear(self) -> None:
        """Forget what came so far."""
        self._http.get("/test/session/clear").raise_for_status()

    def datadog_spans(self, enough: Callable[[list[Any]], bool]) -> list[Any]:
        """All spans that ddtrace sent, once there are enough."""
        return self._until(enough, self._read_datadog)

    def otlp_resources(self, enough: Callable[[list[Any]], bool]) -> list[ResourceSpans]:
        """What came by OTLP, once there is enough."""
        return self._until(enough, self._read_otlp)

    def _read_datadog(self) -> list[Any]:
        return [span for trace in self._get("/test/session/traces") for span in trace]

    def _read_otlp(self) -> list[ResourceSpans]:
        found: list[ResourceSpans] = []
        for sent in self._get("/test/session/requests"):
            if sent["url"].endswith("/v1/traces"):
                body = base64.b64decode(sent["body"])
                found.extend(ExportTraceServiceRequest.FromString(body).resource_spans)
        return found

    def _get(self, path: str) -> list[Any]:
        answer: list[Any] = self._http.get(path).raise_for_status().json()
        return answer

    @staticmethod
    def _until(enough: Callable[[list[Any]], bool], read: Callable[[], list[Any]]) -> list[Any]:
        ends_s = time.monotonic() + 30
        while not enough(found := read()):
            assert time.monotonic() < ends_s, f"the agent has only {found}"
            time.sleep(0.2)
        return found


@contextmanager
def running_agent(log: Path) -> Iterator[Agent]:
    """An agent on free ports for the block."""
    port, http_port, grpc_port = free_port(), free_port(), free_port()
    ports = {"port": port, "otlp-http-port": http_port, "otlp-grpc-port": grpc_port}
    options = [word for name, value in ports.items() for word in (f"--{name}", str(value))]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(installed_agent()), *options], stdout=output, stderr=subprocess.STDOUT
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_for(url, process, log)
            with httpx.Client(base_url=url, timeout=10) as http:
                yield Agent(url, f"http://127.0.0.1:{http_port}", http)
        finally:
            process.terminate()
            process.wait(15)


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    ends_s = time.monotonic() + START_S
    while time.monotonic() < ends_s and process.poll() is None:
        try:
            httpx.get(f"{url}/info").raise_for_status()
        except httpx.HTTPError:
            time.sleep(0.1)
        else:
            return
    raise AssertionError(f"the test agent did not start:\n{log.read_text()[-2000:]}")
