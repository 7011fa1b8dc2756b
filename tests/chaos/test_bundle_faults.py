"""A bundle that must not be served: the service says why, and callers still get an order."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from service.bundle import MANIFEST, Bundle, describe_files, write_manifest
from tests.live import ROOT, client_of, live_service

SHIPPED = ROOT / "models" / "store"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the shipped bundle in a store of its own."""
    shutil.copytree(SHIPPED, tmp_path / "store")
    (manifest,) = (tmp_path / "store").glob(f"shop/*/{MANIFEST}")
    return manifest.parent


def no_manifest(folder: Path) -> None:
    (folder / MANIFEST).unlink()


def half_copied(folder: Path) -> None:
    content = (folder / "rank.onnx").read_bytes()
    (folder / "rank.onnx").write_bytes(content[: len(content) // 2])


def bit_flip(folder: Path) -> None:
    content = bytearray((folder / "rank.onnx").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "rank.onnx").write_bytes(content)


def foreign_manifest(folder: Path) -> None:
    fields = json.loads((folder / MANIFEST).read_text("utf-8"))
    (folder / MANIFEST).write_text(json.dumps(fields | {"schema": 2}), "utf-8")


def repacked(folder: Path) -> None:
    """Write digests anew, so that the content itself is what is wrong."""
    manifest = Bundle.open(folder).manifest
    (folder / MANIFEST).unlink()
    write_manifest(folder, msgspec.structs.replace(manifest, files=describe_files(folder)))


def foreign_graph(folder: Path) -> None:
    (folder / "rank.onnx").write_bytes(b"this is no graph")
    repacked(folder)


def other_weights(folder: Path) -> None:
    content = bytearray((folder / "rank.onnx").read_bytes())
    middle = len(content) // 2  # inside the embedding tables
    content[middle : middle + 40_000] = bytes(40_000)
    (folder / "rank.onnx").write_bytes(content)
    repacked(folder)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (no_manifest, "no readable version"),
        (half_copied, "DigestFault"),
        (bit_flip, "DigestFault"),
        (foreign_manifest, "schema 2 is not 1"),
        (foreign_graph, "ManifestFault"),
        (other_weights, "GoldenFault"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_damaged_bundle_is_refused_with_its_reason(
    folder: Path, damage: Callable[[Path], None], reason: str, valkey_url: str
) -> None:
    damage(folder)
    store = str(folder.parent.parent)
    with live_service(store=store, redis_url=valkey_url) as service, client_of(service) as client:
        assert "is not ready" in "\n".join(service.lines)
        ready = client.get("/readyz")
        assert ready.status_code == 503
        assert reason in ready.json()["reason"]
        assert client.get("/livez").status_code == 200
        body = {"user_id": "u", "items": [{"id": "a", "prior": 1}, {"id": "b", "prior": 2}]}
        answer = client.post("/rank", json=body)
        assert answer.status_code == 200
        assert answer.json()["degraded"] == ["warming"]
        assert [item["id"] for item in answer.json()["items"]] == ["b", "a"]
        strict = client.post("/rank", json=body | {"allow_degraded": False})
        assert strict.status_code == 503
        assert strict.json()["code"] == "not_ready"
        assert reason in strict.json()["detail"]
