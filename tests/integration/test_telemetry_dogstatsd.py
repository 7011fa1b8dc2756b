"""Latencies as a DogStatsD agent receives them, over UDP and over a Unix socket."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from service.settings import SettingsFault, load
from service.telemetry.distributions import Distributions
from service.telemetry.dogstatsd import sender
from service.telemetry.providers import Tags
from tests.live import LiveService, client_of, live_service
from tests.operating import WIDE

BODY = {"user_id": "u1", "items": ["sku-00001", "sku-00002"]}
STAGES = ("total", "signals", "queue", "inference", "merge")
LINE = re.compile(r"(ranker\.\w+):([\d.:]+)\|d\|#([^|]+)(\|.*)?")


@contextmanager
def receiver(kind: str, folder: Path) -> Iterator[tuple[str, socket.socket]]:
    """A bound datagram socket, and the URL by which the service finds it."""
    if kind == "udp":
        with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as bound:
            bound.bind(("127.0.0.1", 0))
            yield f"udp://127.0.0.1:{bound.getsockname()[1]}", bound
    else:
        path = folder / "dsd.socket"
        with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as bound:
            bound.bind(str(path))
            yield f"unix://{path}", bound


def received(
    bound: socket.socket, enough: Callable[[dict[str, list[float]]], bool]
) -> dict[str, list[float]]:
    """Values by name and tags, read until there are enough."""
    bound.settimeout(20)
    found: dict[str, list[float]] = {}
    while not enough(found):
        datagram = bound.recv(65_536)
        assert len(datagram) <= 1_432
        for line in datagram.decode().splitlines():
            match = LINE.fullmatch(line)
            assert match is not None, line
            tags = ",".join(sorted(match[3].split(",")))
            found.setdefault(f"{match[1]} {tags}", []).extend(map(float, match[2].split(":")))
    return found


def settings(valkey_server: str, tmp_path: Path, url: str) -> dict[str, str]:
    fleet = str(tmp_path / "fleet")
    chosen = {"service": "shop-ranker", "env": "test", "dogstatsd_url": url}
    return {"redis_url": valkey_server, "fleet_folder": fleet, **chosen, **WIDE}


@pytest.mark.parametrize("kind", ["udp", "unix"])
def test_each_request_and_batch_is_told_once(kind: str, valkey_server: str, tmp_path: Path) -> None:
    requests = 120

    def all_told(found: dict[str, list[float]]) -> bool:
        series = [key for key in found if "stage:" in key or "batch_seconds" in key]
        return len(series) == len(STAGES) + 1 and all(len(found[key]) == requests for key in series)

    with (
        receiver(kind, tmp_path) as (url, bound),
        live_service(**settings(valkey_server, tmp_path, url)) as service,
        client_of(service) as client,
    ):
        for _ in range(requests):
            assert client.post("/rank", json=BODY).status_code == 200
        found = received(bound, all_told)
        assert service.stop() == 0
    unified = "env:test", "framework:ONNXRuntime", "service:shop-ranker"
    for stage in STAGES:
        (key,) = [key for key in found if f"stage:{stage}," in key]
        assert key.startswith("ranker.stage_seconds ")
        assert set(unified) < set(key.split(" ")[1].split(","))
        assert len(found[key]) == requests
    # one caller, so each request is a batch
    (batches,) = [values for key, values in found.items() if "batch_seconds" in key]
    (totals,) = [values for key, values in found.items() if "stage:total" in key]
    assert 0 < sum(batches) < sum(totals)


def test_an_agent_that_is_away_changes_nothing(valkey_server: str, tmp_path: Path) -> None:
    url = f"unix://{tmp_path}/nobody.socket"
    with live_service(**settings(valkey_server, tmp_path, url)) as service:
        rank_many(service, 220)
        assert service.stop() == 0
    assert not [line for line in service.lines if "Traceback" in line]


def test_a_name_that_is_looked_up_for_long_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked_up, answered = threading.Event(), threading.Event()
    threads: list[str] = []

    def look_up(*_: object, **__: object) -> list[object]:
        threads.append(threading.current_thread().name)
        looked_up.set()
        answered.wait(30)
        raise socket.gaierror("no such host")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    tags = Tags(service="s", env="e", version="v")
    send, close = sender("udp://agent.example:8125", tags)
    for _ in range(3):
        send("ranker.stage_seconds", [0.001], ["stage:total"])
    assert looked_up.wait(30)
    assert threading.main_thread().name not in threads
    answered.set()
    close()


def rank_many(service: LiveService, count: int) -> None:
    with client_of(service) as client:
        for _ in range(count):
            answer = client.post("/rank", json=BODY)
            assert (answer.status_code, answer.json()["degraded"]) == (200, [])


def test_nothing_is_sent_before_a_line_is_full_or_a_second_is_over() -> None:
    sent: list[tuple[str, int]] = []
    kept = Distributions(lambda name, values, _: sent.append((name, len(values))))
    for _ in range(250):
        kept._age.add(1.0)
    assert sent == [("ranker.signal_age_seconds", 100)] * 2
    kept.flush()
    kept.flush()
    assert sent[2:] == [("ranker.signal_age_seconds", 50)]


@pytest.mark.parametrize("url", ["tcp://127.0.0.1:8125", "udp://127.0.0.1", "/var/run/dsd"])
def test_a_wrong_url_stops_the_start(url: str) -> None:
    with pytest.raises(SettingsFault, match="RANKER_DOGSTATSD_URL"):
        load({"RANKER_DOGSTATSD_URL": url})
