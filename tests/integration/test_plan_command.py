"""`models plan` with the real builder of TensorRT for RTX: each precision, no GPU needed."""

import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest

from models.calibrate import observe
from models.cli import main
from models.dataset import Examples
from models.plan import build_plans
from models.variants import KINDS
from service.bundle import BatchSpec, Bundle, describe_files, write_manifest
from service.encoding.batch import Batch
from service.errors import PlanFault
from service.inference.parity import read_golden
from tests.bundles import copy_bundle

DEVICE_GRAPHS = ("fp16", "int8", "fp8")
pytestmark = pytest.mark.timeout(600)  # engines are built at the lowest priority


def as_examples(batch: Batch) -> Examples:
    shape = batch.cand_ids.shape[:2]
    labels = np.ones(shape, np.float32)
    return Examples(
        **msgspec.structs.asdict(batch),
        click=labels,
        long_dwell=labels,
        position=np.zeros(shape, np.int64),
        at_ms=np.arange(len(batch.ctx_ids)),
    )


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The shipped network with graphs for devices, and two buckets."""
    pytest.importorskip("tensorrt_rtx_bindings", reason="the extra rtx is not installed")
    folder = copy_bundle(tmp_path_factory.mktemp("store"), "variants")
    plain = Bundle.open(folder)
    graph = plain.read(plain.manifest.graphs["fp32"])
    seen = observe(graph, as_examples(read_golden(plain).batch))
    for name in DEVICE_GRAPHS:
        (folder / f"rank-{name}.onnx").write_bytes(KINDS[name].rewrite(graph, seen))
    files = {name: f"rank-{name}.onnx" for name in DEVICE_GRAPHS}
    manifest = msgspec.structs.replace(
        plain.manifest,
        graphs=plain.manifest.graphs | files,
        batch=BatchSpec(max_users=4, tile_buckets=(1, 5)),
        files=describe_files(folder),
    )
    write_manifest(folder, manifest)
    return Bundle.open(folder)


@pytest.fixture(scope="module")
def cache(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plans")
    command = ["plan", "--bundle", str(bundle.folder), "--out", str(folder), "--sm", "8.0,8.9"]
    assert main(command) == 0
    return folder


def test_every_precision_is_built_for_the_devices_that_have_it(cache: Path) -> None:
    for sm, precisions in (("8.0", ("fp16", "int8")), ("8.9", DEVICE_GRAPHS)):
        plans = sorted(path.name for path in (cache / sm).glob("*.plan"))
        assert plans == sorted(f"shop-variants-{precision}.plan" for precision in precisions)
        assert all((cache / sm / plan).stat().st_size > 100_000 for plan in plans)


def test_a_plan_of_the_same_key_is_not_built_again(bundle: Bundle, cache: Path) -> None:
    lines = list(build_plans(bundle, ["8.0"], cache))
    assert [line.rpartition(", ")[2] for line in lines[:2]] == ["in the cache already"] * 2
    assert lines[2] == "8.0 fp8: no such units before 8.9"


def test_a_plan_of_another_graph_is_built_anew(bundle: Bundle, cache: Path, tmp_path: Path) -> None:
    folder = tmp_path / "plans"
    shutil.copytree(cache, folder)
    other = msgspec.structs.replace(
        bundle.manifest, graphs=bundle.manifest.graphs | {"int8": "rank-fp16.onnx"}
    )
    (line,) = build_plans(Bundle(bundle.folder, other), ["8.0"], folder, precisions=["int8"])
    assert " MB in " in line


def test_a_precision_without_a_graph_is_told(bundle: Bundle, tmp_path: Path) -> None:
    lines = list(build_plans(bundle, ["8.6"], tmp_path, precisions=["int4"]))
    assert lines == ["8.6 int4: the bundle has no such graph"]


def test_a_device_that_the_library_does_not_serve_is_an_error(
    bundle: Bundle, tmp_path: Path
) -> None:
    with pytest.raises(PlanFault, match="builds nothing for SM90"):
        list(build_plans(bundle, ["9.0"], tmp_path, precisions=["fp16"]))
