"""The item table is replaced while the service runs, without a model swap."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import numpy as np

from service.bundle import MANIFEST, Bundle
from service.encoding.items import ItemTable
from service.encoding.rows import RowSpace
from tests.live import ROOT, client_of, live_service

ITEMS = [f"sku-{at:05d}" for at in range(6)]


def scores(client: httpx.Client) -> dict[str, float]:
    answer = client.post("/rank", json={"user_id": "u", "items": ITEMS, "timeout_ms": 10_000})
    return {item["id"]: item["score"] for item in answer.json()["items"]}


def comes_true(client: httpx.Client, wanted: dict[str, float]) -> bool:
    for _ in range(100):
        if scores(client) == wanted:
            return True
        time.sleep(0.1)
    return False


def test_a_newer_table_is_taken_and_a_broken_one_is_not(tmp_path: Path, valkey_url: str) -> None:
    (manifest,) = (ROOT / "models" / "store").glob(f"shop/*/{MANIFEST}")
    bundle = Bundle.open(manifest.parent)
    space = RowSpace(bundle.manifest.input)
    table = ItemTable.from_bytes(bundle.read(bundle.manifest.item_table), space)
    path = tmp_path / "items.npz"
    path.write_bytes(table.to_bytes(space))
    changed = ItemTable(
        id_hash=table.id_hash,
        rows=table.rows,
        ctr=np.roll(table.ctr, 7, axis=1),
        created_ms=table.created_ms,
        surfaces=table.surfaces,
    )
    with (
        live_service(
            redis_url=valkey_url,
            items_file=str(path),
            items_poll_ms="100",
            signals_budget_ms="5000",
            max_queue_ms="5000",
            stall_ms="5000",
        ) as service,
        client_of(service) as client,
    ):
        before = scores(client)
        version = client.get("/readyz").json()["version"]

        staged = tmp_path / "next"
        staged.write_bytes(changed.to_bytes(space))
        staged.rename(path)
        for _ in range(100):
            if (after := scores(client)) != before:
                break
            time.sleep(0.1)
        assert after != before

        staged.write_bytes(b"broken")
        staged.rename(path)
        time.sleep(0.5)
        assert scores(client) == after
        assert any("item table refused" in line for line in service.lines)

        staged.write_bytes(table.to_bytes(space))
        staged.rename(path)
        assert comes_true(client, before)
        assert client.get("/readyz").json()["version"] == version
