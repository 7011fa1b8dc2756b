import json
import os
import shlex
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import httpx
import pytest

from service.__main__ import DEVICE_LOST
from tests.live import LiveService, client_of, live_service


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/v2/health/live", "/v2/health/ready"])
def test_health_answers(api: httpx.Client, path: str) -> None:
    assert api.get(path).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/nowhere", 404), ("GET", "/rank", 405)]
)
def test_the_frameworks_own_errors_are_problems_too(
    api: httpx.Client, method: str, path: str, status: int
) -> None:
    answer = api.request(method, path)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["request_id"] == answer.headers["x-request-id"]
    assert path in answer.json()["detail"]


def test_the_settings_are_logged_once_with_secrets_masked() -> None:
    with live_service(api_keys="hunter2") as service:
        pass
    (line,) = [line for line in service.lines if '"effective settings"' in line]
    assert json.loads(line)["timeout_ms"] == 100
    assert "hunter2" not in "\n".join(service.lines)


def test_the_models_page_names_what_is_served(api: httpx.Client) -> None:
    page = api.get("/v1/models").json()
    assert page["primary"]["name"] == "shop"
    assert page["primary"]["version"] in page["store"]["shop"]


def test_metrics_count_requests_and_name_no_user(api: httpx.Client) -> None:
    api.post("/rank", json={"user_id": "somebody-7", "items": ["sku-00001"]})
    page = api.get("/metrics").text
    assert 'ranker_requests_total{framework="ONNXRuntime",model_version="' in page
    assert "ranker_batch_requests_bucket" in page
    assert "somebody-7" not in page
    assert "sku-00001" not in page


def test_the_log_of_a_wrong_request_names_no_item() -> None:
    body = {"user_id": "u", "items": ["secret-9", "secret-9"], "request_id": "wrong-1"}
    with live_service(access_log="true") as service, client_of(service) as client:
        answer = client.post("/rank", json=body)
        assert "secret-9" in answer.json()["detail"]
    assert any("wrong-1" in line for line in service.lines)
    assert not any("secret-9" in line for line in service.lines)


def test_the_openapi_page_shows_the_types_that_decode(api: httpx.Client) -> None:
    page = api.get("/openapi.json").json()
    query = page["components"]["schemas"]["Query"]
    assert query["properties"]["items"]["maxItems"] == 1_000
    assert set(query["required"]) == {"items"}
    assert page["paths"]["/rank"]["post"]["responses"].keys() >= {"200", "422", "503", "504"}
    assert "200" not in page["paths"]["/v1/events"]["post"]["responses"]


def test_the_announced_curl_line_works_when_pasted(shared_service: LiveService) -> None:
    (line,) = [line for line in shared_service.lines if line.startswith("try ")]
    answer = subprocess.run(
        shlex.split(line.removeprefix("try")), check=True, capture_output=True, text=True
    ).stdout
    assert len(json.loads(answer)["items"]) == 5


def test_api_keys_close_the_data_routes_and_quotas_hold() -> None:
    body = {"user_id": "u", "items": ["a"]}
    with live_service(api_keys="k1,k2", quota_rps="2") as service, client_of(service) as client:
        assert client.post("/rank", json=body).status_code == 401
        assert client.post("/rank", json=body, headers={"x-api-key": "no"}).status_code == 403
        assert client.post("/v1/events", json={}).status_code == 401
        assert client.delete("/v1/users/u").status_code == 401
        assert client.get("/readyz").status_code == 200
        bearer = {"authorization": "Bearer k1"}
        answers = [client.post("/rank", json=body, headers=bearer) for _ in range(12)]
        refused = [answer for answer in answers if answer.status_code == 429]
        assert answers[0].status_code == 200
        assert refused
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
        assert client.post("/rank", json=body, headers={"x-api-key": "k2"}).status_code == 200


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_leaves_no_process(sig: signal.Signals) -> None:
    with live_service(drain_ms="300") as service:
        with urllib.request.urlopen(f"{service.url}/readyz") as answer:
            assert answer.status == 200
        children = _children(service.process.pid)
        assert children  # the embedded Valkey
        assert service.stop(sig) == 0
        assert not [pid for pid in children if _alive(pid)]


_LOSES_ITS_DEVICE = """
import sys
from pathlib import Path
from service.__main__ import main
from service.errors import BackendLost
from service.inference.backends.onnx import OnnxCpu

score, flag = OnnxCpu.score, Path(sys.argv.pop())

def score_or_be_lost(self, batch):
    if flag.exists():
        raise BackendLost("CUDA error 700")
    return score(self, batch)

OnnxCpu.score = score_or_be_lost
sys.exit(main())
"""


def test_a_process_whose_device_is_lost_ends_with_a_status_of_its_own(tmp_path: Path) -> None:
    flag = tmp_path / "lost"
    process = subprocess.Popen(
        [sys.executable, "-c", _LOSES_ITS_DEVICE, str(flag)],
        env=os.environ
        | {"RANKER_PORT": "0", "RANKER_DRAIN_MS": "100", "RANKER_BACKEND": "onnx-cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    service = LiveService(process)
    assert process.stdout is not None
    with process.stdout, client_of(service) as client:
        body = {"user_id": "u", "items": ["a", "b"], "timeout_ms": 5_000}
        assert client.post("/rank", json=body).json()["degraded"] == ["unknown_items"]
        flag.touch()
        answer = client.post("/rank", json=body)
        assert (answer.status_code, answer.json()["degraded"]) == (200, ["fallback_backend"])
        assert service.stop() == DEVICE_LOST


def _children(pid: int) -> list[int]:
    found = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False
    )
    return [int(word) for word in found.stdout.split()]


def _alive(pid: int) -> bool:
    state = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False
    ).stdout
    return bool(state.strip()) and not state.startswith("Z")


def test_wrong_settings_stop_the_start_and_are_all_named() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "service"],
        env=os.environ | {"RANKER_PORT": "x", "RANKER_COLOUR": "red"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "RANKER_PORT" in done.stderr
    assert "RANKER_COLOUR: no such setting" in done.stderr
