"""An operator flips the engine of a live service while callers keep asking."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

from service import cli
from tests.live import LiveService, client_of, live_service
from tests.operating import BEARER, TOKEN, WIDE, Caller, act, eventually

KNOWN = ("sku-00001", "sku-00002")
ENGINES = {"openvino": "openvino", "onnx-cpu": "onnxruntime"}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveService]:
    """Two engines on the processor: OpenVINO, and ONNX Runtime behind it."""
    folder = str(tmp_path_factory.mktemp("fleet"))
    with live_service(
        backend="openvino", fleet_folder=folder, admin_token=TOKEN, **WIDE
    ) as service:
        yield service


@pytest.fixture
def client(service: LiveService) -> Iterator[httpx.Client]:
    with client_of(service) as client:
        act(client, "backend", backend="auto")
        wait_until_serving(client, "openvino")
        yield client


def rungs(client: httpx.Client) -> list[dict[str, object]]:
    (found,) = client.get("/v1/models").json()["rungs"].values()
    return list(found)


def serving(client: httpx.Client) -> object:
    (kind,) = [rung["backend"] for rung in rungs(client) if rung["serves"]]
    return kind


def wait_until_serving(client: httpx.Client, kind: str) -> None:
    eventually(lambda: serving(client) == kind)


def wait_for_answers(caller: Caller, more: int) -> None:
    wanted = len(caller.backends) + more
    eventually(lambda: len(caller.backends) >= wanted)


def test_flipping_back_and_forth_fails_and_degrades_nobody(
    service: LiveService, client: httpx.Client
) -> None:
    with Caller(service, KNOWN) as one, Caller(service, KNOWN) as other:
        for kind in ["onnx-cpu", "openvino"] * 4:
            assert act(client, "backend", backend=kind).status_code == 202
            wait_until_serving(client, kind)
            wait_for_answers(one, 6)
            assert one.backends[-1] == ENGINES[kind]
    for caller in (one, other):
        assert set(caller.statuses) == {200}
        assert set(caller.degraded) == {""}
        assert set(caller.backends) == set(ENGINES.values())
    assert {rung["backend"] for rung in rungs(client)} == set(ENGINES), "both stay warm"


def test_what_is_not_there_is_refused_and_what_is_there_is_named(client: httpx.Client) -> None:
    answer = act(client, "backend", backend="tensorrt")
    assert answer.status_code == 404
    problem = answer.json()
    assert problem["field"] == "backend"
    assert problem["detail"] == "no backend 'tensorrt' is loaded, only openvino, onnx-cpu"
    assert act(client, "backend").json()["detail"] == "a backend is required"
    assert act(client, "backend", backend="abacus").status_code == 422
    assert client.get("/v1/models").json()["wish"]["backend"] is None


def test_it_needs_the_token_and_is_in_the_audit_log(
    service: LiveService, client: httpx.Client
) -> None:
    order = {"backend": "onnx-cpu", "by": "on-call"}
    assert client.post("/v1/models/shop/backend", json=order).status_code == 401
    answer = client.post("/v1/models/shop/backend", json=order, headers=BEARER)
    assert answer.json()["backend"] == "onnx-cpu"

    def audited(outcome: str) -> bool:
        lines = [json.loads(line) for line in service.lines if '"admin act"' in line]
        return any(
            (line["act"], line["backend"], line["by"]) == ("backend", "onnx-cpu", "on-call")
            and line["outcome"].startswith(outcome)
            for line in lines
        )

    eventually(lambda: audited("generation"))
    eventually(lambda: any('"message":"backend"' in line for line in service.lines))


def test_the_command_line_flips_and_shows(
    service: LiveService, client: httpx.Client, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--url", service.url, "--token", TOKEN]
    assert cli.run(["models", "backend", "onnx-cpu", "--wait", *words]) == 0
    assert "onnx-cpu first" in capsys.readouterr().out
    assert serving(client) == "onnx-cpu"
    assert cli.run(["models", "list", "--url", service.url]) == 0
    assert "onnx-cpu fp32 serves, openvino" in capsys.readouterr().out
    assert cli.run(["models", "backend", "tensorrt", *words]) == 1
    assert "only openvino, onnx-cpu" in capsys.readouterr().err
