import time
from threading import Thread

import httpx
import pytest

from service.errors import NotReady
from service.http.wire import problem_of
from service.telemetry.profile import flame_graph
from tests.live import LiveService, client_of, live_service

TOKEN = "a-token-of-the-tests-alone"
BEARER = {"authorization": f"Bearer {TOKEN}"}


def busy(service: LiveService, until_s: float) -> None:
    body = {"user_id": "u", "items": [f"sku-{at:05d}" for at in range(50)]}
    with client_of(service) as client:
        while time.monotonic() < until_s:
            client.post("/rank", json=body)


def test_a_flame_graph_shows_what_the_process_does(valkey_server: str) -> None:
    with (
        live_service(redis_url=valkey_server, admin_token=TOKEN) as service,
        client_of(service) as client,
    ):
        load = Thread(target=busy, args=(service, time.monotonic() + 4))
        load.start()
        answer = client.get("/v1/profile", params={"seconds": 2}, headers=BEARER)
        load.join()
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"] == "image/svg+xml"
        assert "<svg" in answer.text
        assert "service/http/routes.py" in answer.text
        assert client.get("/v1/profile").status_code == 401
        wrong = {"authorization": f"Bearer {TOKEN}!"}
        assert client.get("/v1/profile", headers=wrong).status_code == 403
        assert client.get("/v1/profile?seconds=0", headers=BEARER).status_code == 422


def test_without_a_token_nobody_profiles(api: httpx.Client) -> None:
    answer = api.get("/v1/profile", headers=BEARER)
    assert answer.status_code == 403
    assert "RANKER_ADMIN_TOKEN" in answer.json()["detail"]


async def test_a_process_that_cannot_be_sampled_says_so_and_that_waiting_is_no_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    with pytest.raises(NotReady, match="extra `profile`") as raised:
        await flame_graph(1)
    problem = problem_of(raised.value, "r")
    assert (problem.status, problem.retryable, problem.retry_after_s) == (503, False, 0.0)
