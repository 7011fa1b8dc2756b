from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request

from loadtests.traces import trace
from loadtests.traces.tap import Pseudonyms, Tap

KEY = b"a key of enough bytes"


def app() -> FastAPI:
    application = FastAPI()

    @application.post("/{path:path}")
    async def echo(path: str, request: Request) -> dict[str, Any]:
        return {"path": path, "bytes": len(await request.body())}

    return application


async def recorded(out: Path, bodies: list[tuple[str, Any]], **options: Any) -> list[trace.Record]:
    pseudonyms = Pseudonyms(KEY, keep_items=options.pop("keep_items", False))
    tap = Tap(app(), out=out, pseudonyms=pseudonyms, **options)
    transport = httpx.ASGITransport(app=tap)
    async with httpx.AsyncClient(transport=transport, base_url="http://tapped") as client:
        for path, body in bodies:
            content = body if isinstance(body, bytes) else None
            answer = await client.post(path, content=content, json=None if content else body)
            assert answer.status_code == 200
            assert answer.json()["bytes"] > 0
    tap.close()
    return list(trace.read(out))


def rank(user: str) -> tuple[str, Any]:
    body = {
        "user_id": user,
        "items": ["sku-1", {"id": "sku-2", "prior": 0.5}],
        "context": {"surface": "home", "device": "phone"},
        "timeout_ms": 40,
    }
    return "/rank", body


async def test_rankings_and_events_of_a_user_keep_one_pseudonym(tmp_path: Path) -> None:
    click = {"event_id": "1", "type": "click", "user_id": "ann", "item_id": "sku-2", "ts": 1}
    dwell = b'{"type":"dwell","user_id":"ann","item_id":"sku-2","dwell_ms":900}\n' * 2

    records = await recorded(
        tmp_path / "t.jsonl.zst",
        [rank("ann"), ("/v1/events", {"events": [click]}), ("/v1/events", dwell), rank("bob")],
    )

    ranked, clicked, *dwelt, other = records
    assert ranked.items is not None
    assert (len(ranked.items), ranked.surface, ranked.deadline_ms) == (2, "home", 40)
    assert {clicked.user, *(record.user for record in dwelt)} == {ranked.user}
    assert clicked.item == ranked.items[1]
    assert [record.dwell_ms for record in dwelt] == [900, 900]
    assert other.user != ranked.user
    content = (tmp_path / "t.jsonl.zst").read_bytes()
    assert b"ann" not in content
    assert not any("ann" in str(record) or "sku" in str(record) for record in records)


async def test_items_stay_as_they_are_if_asked(tmp_path: Path) -> None:
    (record,) = await recorded(tmp_path / "t.jsonl", [rank("ann")], keep_items=True)

    assert record.items == ["sku-1", "sku-2"]


async def test_a_share_keeps_whole_users(tmp_path: Path) -> None:
    requests = [rank(f"user-{at % 200}") for at in range(600)]

    records = await recorded(tmp_path / "t.jsonl", requests, share=0.3)

    users = [record.user for record in records]
    assert {users.count(user) for user in users} == {3}
    assert 30 < len(set(users)) < 90


async def test_what_is_no_request_passes_and_is_not_recorded(tmp_path: Path) -> None:
    records = await recorded(
        tmp_path / "t.jsonl", [("/rank", b"{"), ("/other", b"x"), ("/v1/events", b"[1]")]
    )

    assert records == []


def test_a_short_key_is_refused() -> None:
    with pytest.raises(ValueError, match="fewer than 16 bytes"):
        Pseudonyms(b"short", keep_items=True)


def test_another_key_gives_other_pseudonyms() -> None:
    one, other = Pseudonyms(KEY, keep_items=False), Pseudonyms(KEY[::-1], keep_items=False)

    assert one.user("ann") == one.user("ann")
    assert one.user("ann") != other.user("ann")
