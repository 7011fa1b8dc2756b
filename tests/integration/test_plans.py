"""The real builder of TensorRT for RTX, on a machine without a GPU, as far as it goes there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from service.bundle import Bundle
from service.errors import PlanFault
from service.inference.backends import cuda, side_process, tensorrt
from service.inference.backends.plans import Profile

SHOP = Bundle.open(next((Path(__file__).parents[2] / "models" / "store" / "shop").iterdir()))
SPEC = SHOP.manifest.input
GRAPH = SHOP.read(SHOP.manifest.graphs["fp32"])
PROFILES = (Profile(1, 1), Profile(4, 8))


@pytest.fixture(scope="module")
def plan() -> bytes:
    pytest.importorskip("tensorrt_rtx_bindings", reason="the extra rtx is not installed")
    return side_process.build(GRAPH, spec=SPEC, profiles=PROFILES, sm="8.6")


def has_device() -> bool:
    try:
        cuda.probe()
    except cuda.Unavailable:
        return False
    return True


without_device = pytest.mark.skipif(has_device(), reason="tells what happens without a GPU")


def test_the_shipped_graph_becomes_a_plan(plan: bytes) -> None:
    assert len(plan) > 100_000


def test_a_plan_for_a_device_that_rtx_does_not_serve_is_refused() -> None:
    pytest.importorskip("tensorrt_rtx_bindings", reason="the extra rtx is not installed")
    with pytest.raises(PlanFault, match="nothing for SM90"):
        side_process.build(GRAPH, spec=SPEC, profiles=PROFILES, sm="9.0")


def test_a_file_that_is_no_graph_is_refused_with_the_parsers_words() -> None:
    pytest.importorskip("tensorrt_rtx_bindings", reason="the extra rtx is not installed")
    with pytest.raises(PlanFault, match="cannot read the graph"):
        side_process.build(b"no graph", spec=SPEC, profiles=PROFILES, sm="8.6")


@without_device
def test_without_a_device_nothing_of_the_library_is_called(plan: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.plan"
    path.write_bytes(plan)
    with pytest.raises(PlanFault, match="Unavailable: no CUDA device: error 35"):
        side_process.check(path)


@without_device
def test_a_process_that_a_library_takes_down_is_a_reason_and_no_crash() -> None:
    """The lean runtime crashes without a driver; only its own process ends."""
    pytest.importorskip("tensorrt_lean_bindings", reason="tensorrt-lean is not installed")
    code = (
        "import tensorrt_lean_bindings as trt\n"
        "runtime = trt.Runtime(trt.Logger())\n"
        "runtime.deserialize_cuda_engine(bytes(64))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)
    assert done.returncode < 0


def test_a_side_process_that_is_ended_by_a_signal_is_a_plan_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\nkill -SEGV $$\n")
    fake.chmod(0o700)
    monkeypatch.setattr(sys, "executable", os.fspath(fake))
    with pytest.raises(PlanFault, match="ended by signal 11"):
        side_process.check(tmp_path / "a.plan")


def test_the_logger_is_one_for_the_whole_process() -> None:
    pytest.importorskip("tensorrt_rtx_bindings", reason="the extra rtx is not installed")
    lib = tensorrt.library()
    assert lib is tensorrt.library()
    assert lib.product == tensorrt.RTX
    lib.logger.log(lib.module.ILogger.Severity.ERROR, "a complaint")
    assert lib.why() == "a complaint"
