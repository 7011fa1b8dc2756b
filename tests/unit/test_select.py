"""Which rungs a host gets: what it can run, what the bundle has, and what scores well enough."""

import os
import sys
import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest

from service.bundle import Bundle
from service.domain import BackendKind, Float32Array
from service.encoding.batch import Batch
from service.errors import (
    BackendLost,
    BackendRecoverable,
    GoldenFault,
    ManifestFault,
    PlanFault,
)
from service.inference.backends import cuda, openvino, select, tensorrt
from service.inference.backends.base import Backend
from service.inference.backends.select import Source, build_later, open_backend, open_rungs
from service.inference.parity import Golden, check_parity, read_golden
from service.versions import hotswap
from tests.unit.engines import ScriptedEngine

SHOP = Bundle.open(next((Path(__file__).parents[2] / "models" / "store" / "shop").iterdir()))


@pytest.fixture(scope="module")
def golden() -> Golden:
    return read_golden(SHOP)


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def probe() -> cuda.Device:
        raise cuda.Unavailable("no CUDA device: error 35")

    monkeypatch.setattr(cuda, "probe", probe)
    monkeypatch.setattr(openvino, "has_bf16", lambda: False)


def kinds(backends: list[Backend]) -> list[BackendKind]:
    found = [backend.kind for backend in backends]
    for backend in backends:
        backend.close()
    return found


@pytest.mark.usefixtures("no_device")
def test_a_host_without_a_device_serves_from_the_cpu(golden: Golden, tmp_path: Path) -> None:
    assert kinds(open_rungs(SHOP, golden, plans=tmp_path)) == ["onnx-cpu"]
    assert build_later(SHOP, golden, tmp_path, lambda _: None) is None


@pytest.mark.usefixtures("no_device")
@pytest.mark.parametrize("choice", ["tensorrt", "onnx-cuda"])
def test_a_named_engine_that_is_not_at_hand_says_why(
    golden: Golden, choice: BackendKind, tmp_path: Path
) -> None:
    with pytest.raises(ManifestFault, match=f"{choice} is not at hand"):
        open_rungs(SHOP, golden, choice=choice, plans=tmp_path)


@pytest.mark.usefixtures("no_device")
def test_a_missing_library_is_no_error(golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openvino, "has_bf16", lambda: True)
    monkeypatch.setitem(sys.modules, "openvino", None)
    assert kinds(open_rungs(SHOP, golden)) == ["onnx-cpu"]
    with pytest.raises(ManifestFault, match="openvino is not installed"):
        open_rungs(SHOP, golden, choice="openvino")


@pytest.mark.parametrize("fault", [BackendRecoverable("out of memory"), BackendLost("error 700")])
def test_a_device_that_is_full_or_broken_leaves_the_cpu_to_serve(
    golden: Golden, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    def full(*_: object) -> Backend:
        raise fault

    monkeypatch.setattr(openvino, "has_bf16", lambda: False)
    monkeypatch.setitem(select._OPENERS, "onnx-cuda", full)
    assert kinds(open_rungs(SHOP, golden)) == ["onnx-cpu"]
    with pytest.raises(ManifestFault, match=f"onnx-cuda does not open: {fault}"):
        open_rungs(SHOP, golden, choice="onnx-cuda")


def test_a_rung_that_fails_while_warmed_does_not_keep_the_version_away(
    golden: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: Batch) -> Float32Array:
        raise BackendRecoverable("out of memory")

    def opened(*_: object, **__: object) -> list[Backend]:
        return [ScriptedEngine(fails, kind="onnx-cuda"), *rungs]

    rungs = open_rungs(SHOP, golden, choice="onnx-cpu")
    monkeypatch.setattr(hotswap, "open_rungs", opened)
    version = hotswap.open_version(SHOP, threads=1, max_queue_s=1)
    ladder = version.batcher.ladder
    assert [lane.usable() for lane in ladder.lanes] == [False, True]
    version.executor.close()
    rungs = []
    with pytest.raises(ManifestFault, match="no engine scored the batches that warm it"):
        hotswap.open_version(SHOP, threads=1, max_queue_s=1)


def test_no_bindings_of_tensorrt_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tensorrt", "tensorrt_rtx", "tensorrt_rtx_bindings"):
        monkeypatch.setitem(sys.modules, name, None)
    tensorrt.library.cache_clear()
    with pytest.raises(cuda.Unavailable, match="none of tensorrt"):
        tensorrt.library()
    tensorrt.library.cache_clear()


def test_openvino_scores_the_golden_requests(golden: Golden) -> None:
    pytest.importorskip("openvino", reason="the extra openvino is not installed")
    rungs = open_rungs(SHOP, golden, choice="openvino")
    assert check_parity(rungs[0], golden) < 0.1
    assert kinds(rungs) == ["openvino", "onnx-cpu"]


def test_openvino_leaves_its_caller_on_any_core(golden: Golden) -> None:
    pytest.importorskip("openvino", reason="the extra openvino is not installed")
    engine = open_rungs(SHOP, golden, choice="openvino")[0]
    before, thread = os.sched_getaffinity(0), threading.get_native_id()
    seen: list[set[int]] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            seen.append(os.sched_getaffinity(thread))

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(50):
        engine.score(golden.batch)
    done.set()
    watcher.join()
    engine.close()
    assert all(cores == before for cores in seen)


def test_an_engine_that_scores_otherwise_is_refused_with_the_numbers(golden: Golden) -> None:
    other = msgspec.structs.replace(golden, logits=golden.logits + np.float32(0.5))
    with pytest.raises(GoldenFault, match=r"onnx-cpu in fp32: .* off by 0\.5, at most 0\.001"):
        open_rungs(SHOP, other)


def test_coarser_precisions_may_be_farther_off(golden: Golden) -> None:
    logits = golden.logits + np.float32(0.005)
    engine = ScriptedEngine(lambda _: logits)
    with pytest.raises(GoldenFault):
        check_parity(engine, golden)
    engine.precision = "fp16"
    assert check_parity(engine, golden) == pytest.approx(0.005, rel=1e-3)


def test_a_plan_is_built_while_others_serve_and_is_handed_over(
    golden: Golden, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = open_backend(
        "onnx-cpu",
        Source(
            name="shop",
            graph=SHOP.read(SHOP.manifest.graphs["fp32"]),
            precision="fp32",
            spec=SHOP.manifest.input,
            limits=SHOP.manifest.batch,
        ),
    )
    builds: list[bool] = []

    def open_plan(*_: object, build: bool, **__: object) -> Backend:
        builds.append(build)
        if not build:
            raise PlanFault("no plan in the cache")
        return ScriptedEngine(reference.score, kind="tensorrt")

    monkeypatch.setattr(tensorrt, "find_host", lambda: None)
    monkeypatch.setattr(tensorrt, "open_plan", open_plan)
    monkeypatch.setattr(select, "_capture", lambda *_: None)
    served = kinds(open_rungs(SHOP, golden, plans=tmp_path))
    assert "tensorrt" not in served
    ready: list[Backend] = []
    thread = build_later(SHOP, golden, tmp_path, ready.append)
    assert thread is not None
    thread.join(30)
    assert [backend.kind for backend in ready] == ["tensorrt"]
    assert builds == [False, True]
