"""What telemetry costs a request, in µs of CPU of the whole process, senders' threads included.

Each variant runs in a process of its own, finishes the same requests at the same pace, and
sends to a server that throws everything away. Variants are interleaved over the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from statistics import median

import msgspec
import numpy as np

from loadtests.driving.processes import StartFault
from service.domain import StageTimes
from service.inference.batcher import BatchReport
from service.ranking.query import Report
from service.telemetry.distributions import Distributions
from service.telemetry.dogstatsd import sender
from service.telemetry.log import start_logging
from service.telemetry.providers import Tags, Tracing, provider
from service.telemetry.record import Telemetry
from service.telemetry.spans import SpanWriter

_METRICS_AIM_US = 15
_TRACING_AIM_US = 60
_IN_A_BATCH = 8
_CHUNK = 96
_HEADERS = tuple(
    (name.encode(), b"some value of a usual length")
    for name in ("host", "user-agent", "accept", "content-type", "content-length", "x-request-id")
)
_REFERENCE = {
    "reference": {
        name: {"edges": [float(edge) for edge in range(1, 10)], "shares": [0.1] * 10}
        for name in ("score", "history", "slate")
    }
}


class Variant(msgspec.Struct, frozen=True):
    """One way to run the service's telemetry."""

    name: str
    tracing: Tracing = "off"
    sample: float = 0.0
    record: bool = True
    distributions: bool = False


_VARIANTS = (
    Variant("nothing recorded", record=False),
    Variant("metrics, tracing off"),
    Variant("metrics, DogStatsD", distributions=True),
    Variant("metrics, otel 1%", "otel", 0.01),
    Variant("metrics, otel 100%", "otel", 1.0),
    Variant("metrics, datadog 1%", "datadog", 0.01),
    Variant("metrics, datadog 100%", "datadog", 1.0),
)


class _Sink(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _take(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def __getattr__(self, name: str) -> object:
        """Take every method alike."""
        if name.startswith("do_"):
            return self._take
        raise AttributeError(name)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def _sink() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Sink) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def _reports(version: str) -> tuple[BatchReport, list[Report]]:
    """A batch of fast, healthy requests, of 100 candidates each."""
    now_s = time.monotonic()
    batch = BatchReport(
        requests=_IN_A_BATCH,
        tiles=5 * _IN_A_BATCH,
        candidates=100 * _IN_A_BATCH,
        slots=100 * _IN_A_BATCH,
        started_s=now_s - 0.004,
        seconds=0.003,
        backend="onnxruntime",
        precision="fp32",
        scores=np.linspace(0, 10, 100),
    )
    requests = [
        Report(
            route="/rank",
            outcome="ok",
            status=200,
            request_id=f"request-{at}",
            started_s=now_s - 0.008,
            headers=_HEADERS,
            model_name="shop",
            model_version=version,
            backend="onnxruntime",
            precision="fp32",
            candidates=100,
            signal_source="redis",
            signal_count=31,
            signal_age_ms=820,
            times=StageTimes(
                total_s=0.008,
                signals_s=0.001,
                queue_s=0.002,
                inference_s=0.003,
                signals_at_s=now_s - 0.0075,
            ),
            batch=batch,
        )
        for at in range(_IN_A_BATCH)
    ]
    return batch, requests


async def _measure(variant: Variant, url: str, requests: int) -> float:
    """CPU µs a request of one variant in this process."""
    start_logging("warning")
    tags = Tags("ranker", "bench", "0")
    chosen = provider(variant.tracing, tags=tags, otlp_url=url, agent_url=url)
    unread = socket.socket(type=socket.SOCK_DGRAM)
    unread.bind(("127.0.0.1", 0))
    distributions = None
    if variant.distributions:
        url = f"udp://127.0.0.1:{unread.getsockname()[1]}"
        distributions = Distributions(*sender(url, tags))
    telemetry = Telemetry(
        spans=None if chosen is None else SpanWriter(chosen.tracer, sample=variant.sample),
        distributions=distributions,
        slow_s=0.05,
        notable_rps=20,
        access_log=False,
        tags={},
    )
    take_batch = telemetry.batches_of("v1", _REFERENCE)

    async def finish(count: int) -> None:
        for start in range(0, count, _IN_A_BATCH):
            batch, reports = _reports("v1")
            if variant.record:
                take_batch(batch)
                for report in reports:
                    telemetry.record(report)
            if start % _CHUNK == 0:
                await asyncio.sleep(0.02)  # a pace at which no sender drops spans

    await finish(requests // 10)
    before_s = time.process_time()
    await finish(requests)
    telemetry.flush()
    if chosen is not None:
        chosen.close()
    unread.close()
    return (time.process_time() - before_s) / requests * 1e6


def _in_its_own_process(variant: Variant, url: str, requests: int) -> float:
    command = [sys.executable, "-m", "loadtests", "telemetry", "--url", url]
    command += ["--variant", variant.name, "--requests", str(requests)]
    environment = {name: value for name, value in os.environ.items() if name[:3] != "DD_"}
    done = subprocess.run(  # noqa: S603 - our interpreter, our words
        command, capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode:
        raise StartFault(f"{variant.name}: {done.stderr[-1000:]}")
    return float(json.loads(done.stdout.splitlines()[-1]))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=4_000, help="that each variant finishes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--variant", choices=[each.name for each in _VARIANTS])
    parser.add_argument("--url", help="where the named variant sends to")


def run(args: argparse.Namespace) -> int:
    if args.variant is not None:
        logging.captureWarnings(capture=True)
        (variant,) = [each for each in _VARIANTS if each.name == args.variant]
        print(asyncio.run(_measure(variant, args.url or "http://127.0.0.1:9", args.requests)))
        return 0
    found: dict[str, list[float]] = {variant.name: [] for variant in _VARIANTS}
    with _sink() as url:
        for turn in range(args.rounds):
            for variant in _VARIANTS:
                print(
                    f"\rround {turn + 1} of {args.rounds}: {variant.name:<24}", end="", flush=True
                )
                found[variant.name].append(_in_its_own_process(variant, url, args.requests))
    print("\r" + " " * 60)
    _show({name: median(each) for name, each in found.items()}, args)
    return 0


def _show(cpu_us: dict[str, float], args: argparse.Namespace) -> None:
    nothing, metrics, *_ = cpu_us.values()
    print(f"CPU µs a request, median of {args.rounds} rounds of {args.requests} requests")
    print(f"{'':<24}{'in all':>10}{'of metrics':>12}{'of sending':>12}")
    for name, each in cpu_us.items():
        of_metrics = "" if each == nothing else f"{metrics - nothing:.1f}"
        of_sending = f"{each - metrics:.1f}" if each not in {nothing, metrics} else ""
        print(f"{name:<24}{each:>10.1f}{of_metrics:>12}{of_sending:>12}")
    print(
        f"aims: metrics at most {_METRICS_AIM_US}, tracing at most {_TRACING_AIM_US} "
        "at the default sampling of 1%"
    )
