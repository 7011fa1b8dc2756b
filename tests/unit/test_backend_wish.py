"""The engine that a fleet wishes to be tried first, as one replica makes it so."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.bundle import Bundle
from service.domain import BackendKind
from service.versions.catalog import Catalog
from service.versions.loaded import LoadedVersion
from service.versions.roles import Versions
from service.versions.rollout import Wish, promoted, rolled_back, with_backend
from service.versions.swaps import Swaps
from tests.bundles import copy_bundle
from tests.unit.engines import ScriptedEngine
from tests.unit.test_roles_stateful import loaded

RUNGS: dict[str, tuple[BackendKind, ...]] = {
    "v1": ("onnx-cuda", "onnx-cpu"),
    "v2": ("onnx-cuda", "openvino", "onnx-cpu"),
    "v3": ("onnx-cpu",),
}


class Here:
    """Swaps over versions whose engines are scripted."""

    def __init__(self, store: Path) -> None:
        self.versions = Versions()
        self.swaps = Swaps(
            model="shop",
            versions=self.versions,
            catalog=Catalog(store),
            open_version=self._open,
            headroom=lambda: 1 << 40,
        )

    @staticmethod
    def _open(bundle: Bundle) -> LoadedVersion:
        version = bundle.manifest.version
        *others, last = RUNGS[version]
        opened = loaded(version, ScriptedEngine(kind=last))
        for kind in reversed(others):
            opened.add_rung(ScriptedEngine(kind=kind))
        return opened

    def first(self, version: str) -> BackendKind:
        found = self.versions.find(version)
        assert found is not None
        return found.batcher.ladder.lanes[0].kind


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("store")
    for version in RUNGS:
        copy_bundle(store, version)
    return store


async def test_every_version_tries_it_first_also_one_that_is_loaded_later(store: Path) -> None:
    here = Here(store)
    wish = Wish(primary="v1")
    await here.swaps.apply(wish)
    assert here.first("v1") == "onnx-cuda"
    wish = with_backend(wish, "onnx-cpu")
    await here.swaps.apply(wish)
    assert here.first("v1") == "onnx-cpu"
    wish = promoted(wish, "v2")
    await here.swaps.apply(wish)
    assert (here.first("v1"), here.first("v2")) == ("onnx-cpu", "onnx-cpu")
    wish = with_backend(rolled_back(wish), None)
    await here.swaps.apply(wish)
    assert (here.first("v1"), here.first("v2")) == ("onnx-cuda", "onnx-cuda")
    assert here.swaps.faults == {}
    await here.swaps.close()


async def test_a_version_without_it_serves_as_before_and_says_so(store: Path) -> None:
    here = Here(store)
    await here.swaps.apply(Wish(primary="v3", backend="openvino"))
    assert here.first("v3") == "onnx-cpu"
    fault = here.swaps.faults["backend"]
    assert (fault.version, fault.reason) == (
        "v3",
        "v3: no backend 'openvino' is loaded, only onnx-cpu",
    )
    version = here.versions.primary
    assert version is not None
    version.add_rung(ScriptedEngine(kind="openvino"))
    await here.swaps.apply(Wish(primary="v3", backend="openvino"))  # tried again
    assert here.first("v3") == "openvino"
    assert here.swaps.faults == {}
    await here.swaps.close()
