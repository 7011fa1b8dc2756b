"""Versions of a live service are changed over HTTP while callers keep asking."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from service import cli
from tests.bundles import copy_bundle
from tests.live import ROOT, LiveService, client_of, live_service
from tests.operating import BEARER, TOKEN, WIDE, Caller, act, eventually, roles

pytestmark = pytest.mark.alone


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("store")
    for version in ("v1", "v2", "v3"):
        copy_bundle(store, version)
    return store


@pytest.fixture(scope="module")
def service(store: Path) -> Iterator[LiveService]:
    with live_service(store=str(store), version="v1", admin_token=TOKEN, **WIDE) as service:
        yield service


@pytest.fixture
def client(service: LiveService) -> Iterator[httpx.Client]:
    """A client of a service whose primary is v1 and which has no other roles to give."""
    with client_of(service) as client:
        for name in ("canary", "shadow", "load"):
            act(client, name)
        if client.get("/v1/models").json()["wish"]["primary"] != "v1":
            act(client, "promote", version="v1")
        eventually(lambda: roles(client).keys() <= {"primary", "previous"})
        eventually(lambda: roles(client)["primary"] == "v1")
        yield client


def test_a_promotion_and_a_rollback_lose_nothing(
    service: LiveService, client: httpx.Client
) -> None:
    with Caller(service) as caller:
        assert act(client, "promote", version="v2").status_code == 202
        eventually(lambda: "v2" in caller.versions[-1:])
        assert roles(client) == {"primary": "v2", "previous": "v1"}
        started = time.monotonic()
        act(client, "rollback")
        eventually(lambda: caller.versions[-1] == "v1")
        assert time.monotonic() - started < 5  # no load: v1 was still hot
    assert set(caller.statuses) == {200}
    changes = [
        one for at, one in enumerate(caller.versions) if caller.versions[at - 1 : at] != [one]
    ]
    assert changes == ["v1", "v2", "v1"]


def test_labels_and_versions_are_pinned_in_the_request(client: httpx.Client) -> None:
    act(client, "canary", version="v2", percent=5)
    eventually(lambda: roles(client).get("canary") == "v2")

    def ranked_by(model: str | None, user: str = "u") -> str:
        body = {"user_id": user, "items": ["a"]} | ({"model": model} if model else {})
        return str(client.post("/rank", json=body).headers.get("x-model-version"))

    assert ranked_by("shop@canary") == ranked_by("shop@v2") == "v2"
    assert ranked_by("shop@stable") == ranked_by("shop@v1") == "v1"
    users = [f"user-{number}" for number in range(100)]
    drawn = {user for user in users if ranked_by(None, user) == "v2"}
    assert 0 < len(drawn) < 20
    assert drawn == {user for user in users if ranked_by("shop", user) == "v2"}
    missing = client.post("/rank", json={"user_id": "u", "items": ["a"], "model": "shop@v9"})
    assert missing.status_code == 404


def test_a_shadow_is_compared_and_never_seen(client: httpx.Client) -> None:
    act(client, "shadow", version="v2", percent=100)
    eventually(lambda: roles(client).get("shadow") == "v2")

    def compared() -> bool:
        body = {"user_id": "u", "items": [f"sku-{number:05}" for number in range(30)]}
        assert client.post("/rank", json=body).headers["x-model-version"] == "v1"
        return bool(client.get("/v1/models").json()["shadow"]["compared"] >= 5)

    eventually(compared)
    totals = client.get("/v1/models").json()["shadow"]
    assert totals["kendall_tau"] == 1  # the same weights
    assert totals["top_10_overlap"] == 1
    assert totals["failed"] == 0


def test_a_loaded_version_waits_until_it_is_promoted(client: httpx.Client) -> None:
    act(client, "load", version="v3")
    eventually(lambda: roles(client).get("standby") == "v3")
    act(client, "promote", version="v3")
    eventually(lambda: roles(client) == {"primary": "v3", "previous": "v1"}, within_s=5)


@pytest.mark.parametrize(
    ("headers", "status"),
    [({}, 401), ({"authorization": "Basic eA=="}, 401), ({"authorization": "Bearer no"}, 403)],
)
def test_acts_need_the_token(client: httpx.Client, headers: dict[str, str], status: int) -> None:
    answer = client.post("/v1/models/shop/promote", json={"version": "v2"}, headers=headers)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"


def test_without_a_token_the_acts_are_off(api: httpx.Client) -> None:
    answer = api.post("/v1/models/shop/rollback", headers=BEARER)
    assert answer.status_code == 403
    assert "RANKER_ADMIN_TOKEN" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("name", "order", "status", "field"),
    [
        ("promote", {"version": "v9"}, 404, "version"),
        ("promote", {"version": "../v1"}, 404, "version"),
        ("promote", {"version": "/etc"}, 404, "version"),
        ("promote", {}, 422, "version"),
        ("promote", {"version": "v1"}, 422, "version"),
        ("canary", {"version": "v2", "steps": [5, 1]}, 422, "steps"),
        ("canary", {"version": "v2", "percent": 101}, 422, "steps"),
        ("shadow", {"version": "v2", "percent": 0}, 422, "percent"),
        ("canary", {"version": "v2", "gates": {"max_psy": 1}}, 422, "gates.max_psy"),
    ],
)
def test_wrong_orders_name_the_field(
    client: httpx.Client, name: str, order: dict[str, Any], status: int, field: str
) -> None:
    answer = act(client, name, **order)
    assert (answer.status_code, answer.json().get("field")) == (status, field)


def test_every_act_is_in_the_audit_log(service: LiveService, client: httpx.Client) -> None:
    act(client, "load", version="v2", by="the person on call")
    eventually(lambda: any("the person on call" in line for line in service.lines))
    (line,) = [line for line in service.lines if "the person on call" in line and "audit" in line]
    assert '"act":"load"' in line
    assert '"version":"v2"' in line
    assert TOKEN not in "\n".join(service.lines)


def test_the_command_line_waits_and_shows_progress(
    service: LiveService, client: httpx.Client, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-m", "service", "models", "promote", "v2", "--wait"]
    done = subprocess.run(
        [*command, "--url", service.url],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"RANKER_ADMIN_TOKEN": TOKEN},
    )
    assert done.returncode == 0, done.stderr
    assert "1 of 1 replicas" in done.stderr
    assert roles(client)["primary"] == "v2"
    here = ["--url", service.url]
    assert cli.run(["models", "list", *here]) == 0
    assert "primary v2" in capsys.readouterr().out
    assert cli.run(["models", "promote", "v9", *here, "--token", TOKEN]) == 1
    assert "no version 'v9'" in capsys.readouterr().err
