"""Bundles of a store elsewhere: listed by their manifests, copied whole or not at all."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fsspec
import pytest

from service.bundle import MANIFEST
from service.errors import ManifestFault, NotFound, StoreFault
from service.versions.catalog import Catalog
from service.versions.remote import RemoteStore
from tests.bundles import SHIPPED, copy_bundle


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A store with v1 and v2, in a folder and in fsspec's memory."""
    for version in ("v1", "v2"):
        copy_bundle(tmp_path / "origin", version)
    if request.param == "file":
        yield f"file://{tmp_path}/origin"
        return
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path / "origin"), "/models", recursive=True)
    yield "memory://models"
    memory.rm("/models", recursive=True)


@pytest.fixture
def catalog(url: str, tmp_path: Path) -> Catalog:
    copies = tmp_path / "copies"
    return Catalog(copies, RemoteStore(url, copies))


def test_versions_are_listed_without_copying(catalog: Catalog) -> None:
    assert catalog.names() == ["shop"]
    assert catalog.versions("shop") == ["v2", "v1"]
    assert not catalog.store.exists()


def test_a_copy_holds_the_bytes_of_the_store(catalog: Catalog) -> None:
    bundle = catalog.open("shop", "v2")
    assert bundle.folder == catalog.store / "shop" / "v2"
    assert bundle.read("rank.onnx") == (SHIPPED / "rank.onnx").read_bytes()
    assert [path.name for path in (catalog.store / "shop").iterdir()] == ["v2"]


def test_what_is_not_there_is_not_found(catalog: Catalog) -> None:
    with pytest.raises(NotFound):
        catalog.open("shop", "v9")


@contextmanager
def full_disk(most_bytes: int) -> Iterator[None]:
    """The kernel refuses to let any file grow past a size."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_no_half_copy(catalog: Catalog) -> None:
    with full_disk(100_000), pytest.raises(StoreFault, match="cannot be copied"):
        catalog.open("shop", "v2")
    assert list((catalog.store / "shop").iterdir()) == []
    assert catalog.open("shop", "v2").read("items.npz")


def test_a_store_that_is_away_is_a_fault(tmp_path: Path) -> None:
    copy_bundle(tmp_path / "origin", "v1")
    catalog = Catalog(tmp_path / "copies", RemoteStore(f"file://{tmp_path}/origin", tmp_path))
    (tmp_path / "origin/shop/v1" / MANIFEST).write_bytes(b"{")
    assert catalog.versions("shop") == []
    with pytest.raises(ManifestFault):
        catalog.open("shop", "v1")
    with pytest.raises(StoreFault, match="nowhere"):
        RemoteStore("nowhere://models", tmp_path)


def test_a_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    copy_bundle(tmp_path / "elsewhere", "v1")
    (tmp_path / "store/shop").mkdir(parents=True)
    (tmp_path / "store/shop/v1").symlink_to(tmp_path / "elsewhere/shop/v1")
    with pytest.raises(ManifestFault, match="link"):
        Catalog(tmp_path / "store").open("shop", "v1")
    shutil.rmtree(tmp_path / "elsewhere")
