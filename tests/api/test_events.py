import json
import time
from urllib.parse import quote

import httpx
import pytest
from redis.asyncio import Redis

CLICK = {"type": "click", "user_id": "u1", "item_id": "sku-00001"}


def count_signals(api: httpx.Client, user: str = "u1") -> int:
    answer = api.post("/rank", json={"user_id": user, "items": ["sku-00001"]})
    count: int = answer.json()["signals"]["count"]
    return count


def test_an_event_is_in_redis_when_it_is_acknowledged(api: httpx.Client) -> None:
    answer = api.post("/v1/events", json=CLICK)
    assert answer.status_code == 202
    body = answer.json()
    assert (body["accepted"], body["duplicates"], body["rejected"]) == (1, 0, [])
    assert body["signal_token"]
    assert count_signals(api) == 1


async def test_the_record_in_redis_is_the_documented_one(api: httpx.Client, valkey: Redis) -> None:
    ts = int(time.time() * 1e3) - 10
    dwell = {"type": "dwell", "user_id": "u1", "item_id": "a", "dwell_ms": 5_400, "ts": ts}
    api.post("/v1/events", json=dwell)
    (record,) = await valkey.lrange("signals:{u1}", 0, -1)
    assert json.loads(record) == {"i": "a", "a": "dwell", "t": ts, "d": 5_400}
    assert 0 < await valkey.ttl("signals:{u1}") <= 30 * 86_400


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("text/plain;charset=UTF-8", json.dumps(CLICK)),
        ("text/plain", json.dumps({"events": [CLICK]})),
        ("application/x-ndjson", json.dumps(CLICK) + "\n"),
        ("", json.dumps(CLICK)),
    ],
    ids=["sendBeacon", "sendBeacon list", "NDJSON", "no type"],
)
def test_every_way_of_sending_is_taken(api: httpx.Client, content_type: str, body: str) -> None:
    answer = api.post("/v1/events", content=body, headers={"content-type": content_type})
    assert answer.status_code == 202, answer.text
    assert answer.json()["accepted"] == 1


def test_the_same_event_id_is_counted_once(api: httpx.Client) -> None:
    event = CLICK | {"event_id": "e1"}
    first = api.post("/v1/events", json=event).json()
    again = api.post("/v1/events", json={"events": [event, event]}).json()
    assert (first["accepted"], again["accepted"], again["duplicates"]) == (1, 0, 2)
    assert count_signals(api) == 1


async def test_repeated_dwell_keeps_the_largest(api: httpx.Client, valkey: Redis) -> None:
    dwell = {"type": "dwell", "user_id": "u1", "item_id": "a"}
    for dwell_ms in (100, 9_000, 4_000):
        assert api.post("/v1/events", json=dwell | {"dwell_ms": dwell_ms}).status_code == 202
    (record,) = await valkey.lrange("signals:{u1}", 0, -1)
    assert json.loads(record)["d"] == 9_000


def test_one_bad_event_does_not_lose_the_others(api: httpx.Client) -> None:
    bad = {"type": "dwell", "user_id": "u1", "item_id": "b"}
    answer = api.post("/v1/events", json={"events": [CLICK, bad]})
    assert answer.status_code == 202
    assert answer.json()["accepted"] == 1
    assert answer.json()["rejected"] == [
        {
            "index": 1,
            "code": "invalid_request",
            "detail": "Object missing required field `dwell_ms`",
            "field": "dwell_ms",
        }
    ]


def test_a_body_without_a_good_event_is_422(api: httpx.Client) -> None:
    answer = api.post("/v1/events", json={"type": "like", "user_id": "u1", "item_id": "b"})
    assert answer.status_code == 422
    assert answer.json()["field"] == "type"
    assert [entry["index"] for entry in answer.json()["rejected"]] == [0]


def test_future_times_are_clamped_and_counted(api: httpx.Client) -> None:
    future = CLICK | {"ts": int(time.time() * 1e3) + 3_600_000}
    assert api.post("/v1/events", json=future).json()["clamped"] == 1
    answer = api.post("/rank", json={"user_id": "u1", "items": ["a"]})
    assert answer.json()["signals"]["age_ms"] < 60_000


def test_impressions_are_accepted_and_are_no_signals(api: httpx.Client) -> None:
    seen = CLICK | {"type": "impression", "position": 1, "ranking_id": "r"}
    assert api.post("/v1/events", json=seen).json()["accepted"] == 1
    assert count_signals(api) == 0


@pytest.mark.parametrize("body", [b"{", b"", b"\xff"])
def test_what_is_not_json_is_400(api: httpx.Client, body: bytes) -> None:
    assert api.post("/v1/events", content=body).status_code == 400


def test_forgetting_a_user_removes_signals_and_profile(api: httpx.Client) -> None:
    api.post("/v1/events", json=CLICK)
    assert count_signals(api) == 1
    answer = api.delete("/v1/users/u1")
    assert answer.status_code == 204
    assert answer.content == b""
    assert count_signals(api) == 0
    assert api.delete("/v1/users/u1").status_code == 204


async def test_nothing_is_left_of_a_forgotten_user(api: httpx.Client, valkey: Redis) -> None:
    api.post("/v1/events", json=CLICK | {"event_id": "e1"})
    await valkey.set("profile:{u1}", '{"segments":["a"]}')
    api.delete("/v1/users/u1")
    assert await valkey.keys("*u1*") == []


@pytest.mark.parametrize("user", ["a{b}c", "a/b", "../a", "ü☂", "with space", "}", "a" * 256])
def test_any_user_id_is_kept_apart(api: httpx.Client, user: str) -> None:
    assert api.post("/v1/events", json=CLICK | {"user_id": user}).status_code == 202
    assert count_signals(api, user) == 1
    assert count_signals(api, user[:-1] + "x") == 0
    assert api.delete(f"/v1/users/{quote(user, safe='')}").status_code == 204
    assert count_signals(api, user) == 0


def test_a_session_never_passes_for_a_user(api: httpx.Client) -> None:
    api.post("/v1/events", json=CLICK | {"user_id": "alice"})
    answer = api.post("/rank", json={"session_id": "alice", "items": ["sku-00001"]})
    assert answer.json()["signals"]["count"] == 0


@pytest.mark.parametrize(
    "body", [b'{"a":' + b"[" * 100_000, b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"]
)
def test_a_body_nested_too_deeply_is_400(api: httpx.Client, body: bytes) -> None:
    assert api.post("/v1/events", content=body).status_code == 400


def test_a_line_cut_short_does_not_take_the_good_one_with_it(api: httpx.Client) -> None:
    good = json.dumps(CLICK)
    cut = '{"type":"click","user_id":"u1","item_id":"b","position":1.5'
    answer = api.post(
        "/v1/events",
        content=f"{good}\n{cut}\n",
        headers={"content-type": "application/x-ndjson"},
    )
    assert answer.status_code == 202
    assert answer.json()["accepted"] == 1
    assert answer.json()["rejected"][0]["code"] == "malformed_body"
