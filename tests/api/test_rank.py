import asyncio
import json
import time

import httpx
import pytest
from redis.asyncio import Redis

KNOWN = [f"sku-{at:05d}" for at in range(40)]


def rank(api: httpx.Client, **body: object) -> httpx.Response:
    return api.post("/rank", json={"user_id": "u1", "items": KNOWN[:10]} | body)


def order(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [item["id"] for item in answer.json()["items"]]


def test_a_slate_comes_back_whole_in_a_new_order(api: httpx.Client) -> None:
    answer = rank(api, request_id="r-1")
    body = answer.json()
    assert sorted(order(answer)) == KNOWN[:10]
    assert all(KNOWN[item["index"]] == item["id"] for item in body["items"])
    scores = [item["score"] for item in body["items"]]
    assert scores == sorted(scores, reverse=True)
    assert all(0 <= score <= 1 for score in scores)
    assert body["request_id"] == answer.headers["x-request-id"] == "r-1"
    assert body["model"]["name"] == "shop"
    assert body["model"]["backend"] == "onnxruntime"
    assert body["model"]["version"] == answer.headers["x-model-version"]
    assert body["degraded"] == []
    assert "x-degraded" not in answer.headers
    assert body["signals"] == {"source": "redis", "count": 0, "age_ms": None}
    assert body["timing_ms"]["total"] >= body["timing_ms"]["inference"] > 0
    assert [part.split(";")[0] for part in answer.headers["server-timing"].split(", ")] == [
        "signals",
        "queue",
        "inference",
        "total",
    ]


def test_a_click_changes_the_order_of_the_next_slate(api: httpx.Client) -> None:
    before = rank(api, items=KNOWN)
    event = {"type": "click", "user_id": "u1", "item_id": KNOWN[3], "event_id": "e1"}
    written = api.post("/v1/events", json=event)
    assert written.status_code == 202
    after = rank(api, items=KNOWN, min_signal_token=written.json()["signal_token"])
    assert after.json()["signals"]["count"] == 1
    assert after.json()["signals"]["age_ms"] < 60_000
    assert order(before) != order(after)


def test_top_n_shortens_the_answer_and_keeps_its_order(api: httpx.Client) -> None:
    whole = order(rank(api))
    assert order(rank(api, top_n=3)) == whole[:3]
    assert order(rank(api, top_n=99)) == whole


def test_objects_and_strings_mix_and_features_change_scores(api: httpx.Client) -> None:
    plain = {item["id"]: item["score"] for item in rank(api).json()["items"]}
    items = [{"id": KNOWN[0], "features": {"ctr": 0.9}}, *KNOWN[1:10]]
    mixed = {item["id"]: item["score"] for item in rank(api, items=items).json()["items"]}
    assert mixed[KNOWN[0]] != plain[KNOWN[0]]
    assert mixed[KNOWN[1]] == pytest.approx(plain[KNOWN[1]], abs=1e-5)


def test_items_that_the_model_does_not_know_are_ranked_and_named(api: httpx.Client) -> None:
    answer = rank(api, items=["new-a", KNOWN[0], "new-b"])
    assert answer.json()["degraded"] == ["unknown_items"]
    assert answer.headers["x-degraded"] == "unknown_items"
    ranked = order(answer)
    assert ranked.index("new-a") < ranked.index("new-b")  # equal scores keep the input order


async def test_a_profile_written_by_anyone_is_read_with_the_signals(
    api: httpx.Client, valkey: Redis
) -> None:
    plain = [item["score"] for item in rank(api).json()["items"]]
    await valkey.set("profile:{u1}", json.dumps({"segments": ["age=25-34"]}))
    assert [item["score"] for item in rank(api).json()["items"]] != plain


def test_a_session_is_enough(api: httpx.Client) -> None:
    answer = api.post("/rank", json={"session_id": "s1", "items": KNOWN[:3]})
    assert sorted(order(answer)) == KNOWN[:3]


@pytest.mark.parametrize("model", ["shop", "shop@stable"])
def test_the_model_may_be_named(api: httpx.Client, model: str) -> None:
    assert rank(api, model=model).status_code == 200


def test_a_version_may_be_pinned(api: httpx.Client) -> None:
    version = rank(api).json()["model"]["version"]
    assert rank(api, model=f"shop@{version}").json()["model"]["version"] == version


def test_a_request_of_the_past_sees_no_age_from_the_future(api: httpx.Client) -> None:
    at_ms = int(time.time() * 1e3) - 3_600_000
    event = {"type": "click", "user_id": "u1", "item_id": KNOWN[0], "ts": at_ms - 5_000}
    assert api.post("/v1/events", json=event).status_code == 202
    assert rank(api, ts=at_ms).json()["signals"]["age_ms"] == 5_000


@pytest.mark.parametrize(
    ("change", "field", "reason"),
    [
        ({"items": []}, "items", "length >= 1"),
        ({"items": [KNOWN[0], KNOWN[1], KNOWN[0]]}, "items[2].id", "twice"),
        ({"items": [KNOWN[0], {"id": KNOWN[0]}]}, "items[1].id", "twice"),
        ({"items": [f"i{at}" for at in range(1_001)]}, "items", "at most 1000"),
        ({"items": [3]}, "items[0]", "got `int`"),
        ({"items": [{"id": "a", "prior": "high"}]}, "items[0].prior", "got `str`"),
        (
            {"items": [{"id": "a", "features": {"color": "red"}}]},
            "items[0].features.color",
            "unknown",
        ),
        ({"items": [{"id": ""}]}, "items[0].id", "length >= 1"),
        ({"user_id": None}, "user_id", "required"),
        ({"user_id": 7}, "user_id", "got `int`"),
        ({"top_n": 0}, "top_n", ">= 1"),
        ({"timeout_ms": 0}, "timeout_ms", "> 0"),
        ({"priority": "urgent"}, "priority", "urgent"),
        ({"context": {"surfce": "home"}}, "context.surfce", "unknown"),
        ({"request_id": "a\r\nset-cookie: x"}, "request_id", "of the form"),
        ({"request_id": "a\n"}, "request_id", "of the form"),
        ({"min_signal_token": "%%%"}, "min_signal_token", "of the form"),
        ({"colour": "red"}, "colour", "unknown"),
    ],
)
def test_what_does_not_validate_says_which_field_and_why(
    api: httpx.Client, change: dict[str, object], field: str, reason: str
) -> None:
    answer = rank(api, **change)
    assert answer.status_code == 422, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert problem.get("field", "") == field
    assert reason in problem["detail"]
    assert problem["code"] == "invalid_request"
    assert problem["retryable"] is False
    assert problem["request_id"] == answer.headers["x-request-id"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b'{"user_id":"u","items":["a"],"top_n":NaN}',
        b'{"user_id":"u","items":[{"id":"a","prior":NaN}]}',
        b'{"user_id":"\xff","items":["a"]}',
        b'{"user_id":"u","items":["a"],"top_n":1.5',
        b'{"user_id":"u","top_n":1.5,"items":[NaN]}',
        b'{"user_id":"u","top_n":1.5,"x":' + b"[" * 2_000 + b"]" * 2_000 + b"}",
    ],
)
def test_what_is_not_json_is_400(api: httpx.Client, body: bytes) -> None:
    answer = api.post("/rank", content=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["code"] == "malformed_body"


def test_a_number_out_of_range_is_refused(api: httpx.Client) -> None:
    body = b'{"user_id":"u","items":[{"id":"a","prior":1e999}]}'
    assert api.post("/rank", content=body).status_code == 422


def test_a_body_over_the_limit_is_413(api: httpx.Client) -> None:
    answer = api.post("/rank", content=b"x" * (10 << 20))
    assert answer.status_code == 413
    assert answer.json()["code"] == "too_large"
    assert rank(api).status_code == 200


@pytest.mark.parametrize("model", ["news", "shop@v0", "shop@nightly"])
def test_an_unknown_model_is_404(api: httpx.Client, model: str) -> None:
    answer = rank(api, model=model)
    assert answer.status_code == 404
    assert answer.json()["field"] == "model"


def test_a_deadline_that_cannot_be_met_gives_the_prior_order(api: httpx.Client) -> None:
    items = [{"id": "a", "prior": 0.1}, {"id": "b", "prior": 0.9}, "c"]
    answer = rank(api, items=items, timeout_ms=0.001)
    assert order(answer) == ["b", "a", "c"]
    assert answer.json()["degraded"][-1] == "deadline"
    assert answer.json()["model"]["backend"] == "prior"


def test_the_smaller_of_both_timeouts_wins(api: httpx.Client) -> None:
    answer = api.post(
        "/rank",
        json={"user_id": "u1", "items": KNOWN[:3], "timeout_ms": 10_000},
        headers={"X-Request-Timeout-Ms": "0.001"},
    )
    assert answer.json()["degraded"][-1] == "deadline"


def test_a_missed_deadline_is_504_where_degraded_answers_are_not_allowed(
    api: httpx.Client,
) -> None:
    answer = rank(api, timeout_ms=0.001, allow_degraded=False)
    assert answer.status_code == 504
    assert answer.json() | {"request_id": "", "detail": ""} == {
        "title": "Gateway Timeout",
        "status": 504,
        "detail": "",
        "code": "deadline_exceeded",
        "request_id": "",
        "retryable": True,
        "retry_after_s": 1.0,
    }
    assert answer.headers["retry-after"] == "1"


@pytest.mark.parametrize("given", ["soon", "-1", "0", "nan", "inf"])
def test_a_wrong_timeout_header_is_named(api: httpx.Client, given: str) -> None:
    answer = api.post(
        "/rank",
        json={"user_id": "u", "items": ["a"]},
        headers={"X-Request-Timeout-Ms": given},
    )
    assert answer.status_code == 422
    assert answer.json()["field"] == "X-Request-Timeout-Ms"


@pytest.mark.parametrize("given", ["x" * 129, "a b", "\u00e9"])
def test_a_request_id_that_is_none_is_replaced(api: httpx.Client, given: str) -> None:
    answer = api.post(
        "/rank",
        json={"user_id": "u", "items": ["a"]},
        headers=[(b"x-request-id", given.encode("latin-1"))],
    )
    assert answer.status_code == 200
    assert answer.headers["x-request-id"] != given


def test_integral_floats_are_integers(api: httpx.Client) -> None:
    body = b'{"user_id":"u1","items":["a","b"],"top_n":1.0}'
    assert len(order(api.post("/rank", content=body))) == 1


@pytest.mark.parametrize("priority", ["interactive", "batch", "shadow"])
def test_every_priority_is_served(api: httpx.Client, priority: str) -> None:
    assert rank(api, priority=priority).json()["degraded"] == []


async def test_a_score_is_the_same_alone_and_in_a_crowd(api: httpx.Client) -> None:
    alone = {item["id"]: item["score"] for item in rank(api, items=KNOWN[:7]).json()["items"]}
    async with httpx.AsyncClient(base_url=api.base_url, timeout=30) as crowd:
        answers = [
            crowd.post("/rank", json={"user_id": "u1", "items": KNOWN[:size]})
            for size in (7, 40, 1, 13, 7, 33) * 5
        ]
        for answer in await asyncio.gather(*answers):
            for item in answer.json()["items"]:
                if item["id"] in alone:
                    assert item["score"] == pytest.approx(alone[item["id"]], abs=2e-6)


def test_a_large_slate_is_ranked(api: httpx.Client) -> None:
    ids = [f"sku-{at:05d}" for at in range(1_000)]
    assert sorted(order(rank(api, items=ids))) == ids


async def test_a_signal_pushed_by_another_producer_is_used(
    api: httpx.Client, valkey: Redis
) -> None:
    now_ms = int(time.time() * 1e3)
    await valkey.lpush(
        "signals:{u1}", "not json", json.dumps({"i": KNOWN[2], "a": "click", "t": now_ms - 700})
    )
    signals = rank(api).json()["signals"]
    assert signals["count"] == 1
    assert signals["age_ms"] >= 700
