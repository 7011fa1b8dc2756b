"""A real Prometheus scrapes a live service and evaluates the shipped rules over it."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import yaml

from loadtests.driving.processes import free_port, running
from tests.live import ROOT, client_of, live_service
from tests.programs import needs

SHIPPED = ROOT / "docker" / "observability" / "prometheus"
BODY = {"user_id": "u1", "items": [f"sku-{at:05d}" for at in range(20)]}


def configuration(folder: Path, target: str) -> Path:
    """The shipped configuration, with this target and at a test's pace."""
    config = yaml.safe_load((SHIPPED / "prometheus.yaml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(SHIPPED / name) for name in config["rule_files"]]
    (job,) = config["scrape_configs"]
    job["static_configs"] = [{"targets": [target]}]
    file = folder / "prometheus.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def until(found: Callable[[], list[Any]], process: subprocess.Popen[bytes]) -> list[Any]:
    ends_s = time.monotonic() + 40
    while not (value := found()):
        assert process.poll() is None
        assert time.monotonic() < ends_s, "Prometheus does not show it"
        time.sleep(0.3)
    return value


def test_prometheus_reads_metrics_exemplars_and_rules(valkey_server: str, tmp_path: Path) -> None:
    needs("prometheus", package="prometheus")
    wide = {"timeout_ms": "10000", "signals_budget_ms": "5000", "redis_timeout_ms": "5000"}
    wide |= {"stall_ms": "10000", "max_queue_ms": "5000"}
    # spans go to nobody here: ids alone matter
    traced = {"tracing": "otel", "trace_sample": "1", "otlp_url": "http://127.0.0.1:9"}
    port = free_port()
    with live_service(redis_url=valkey_server, **wide, **traced) as service:
        command = [
            "prometheus",
            f"--config.file={configuration(tmp_path, urlsplit(service.url).netloc)}",
            f"--storage.tsdb.path={tmp_path / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--enable-feature=exemplar-storage",
        ]
        with (
            running(command, log=tmp_path / "prometheus.log") as process,
            client_of(service) as client,
            httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1", timeout=10) as prometheus,
        ):

            def query(expression: str) -> list[Any]:
                client.post("/rank", json=BODY)
                try:
                    answer = prometheus.get("/query", params={"query": expression})
                except httpx.TransportError:
                    return []
                if answer.status_code != 200:  # it starts
                    return []
                found: list[Any] = answer.json()["data"]["result"]
                return found

            (up,) = until(lambda: query('up{job="ranker"} == 1'), process)
            assert up["metric"]["job"] == "ranker"
            ok = 'ranker_requests_total{outcome="ok", framework="ONNXRuntime"} > 3'
            assert until(lambda: query(ok), process)
            p99 = until(lambda: query("ranker:stage_seconds:p99 > 0"), process)
            stages = {sample["metric"]["stage"] for sample in p99}
            assert stages == {"total", "signals", "queue", "inference", "merge"}
            assert until(lambda: query("ranker:engine_busy:ratio > 0"), process)

            def exemplars() -> list[Any]:
                now_s = time.time()
                answer = prometheus.get(
                    "/query_exemplars",
                    params={
                        "query": 'ranker_stage_seconds_bucket{stage="total"}',
                        "start": now_s - 600,
                        "end": now_s,
                    },
                )
                found: list[Any] = answer.json()["data"]
                return found

            (series, *_) = until(exemplars, process)
            assert len(series["exemplars"][0]["labels"]["trace_id"]) == 32
            assert query('ALERTS{alertstate="firing"}') == []
