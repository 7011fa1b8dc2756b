"""A packed bundle can be read by the service's own reader, and says what it was made of."""

import io
import json
import shutil
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from models.build import Checkpoint, gather
from models.log import Log
from models.pack import Ingredients, check_golden, pack
from service.bundle import MANIFEST, Bundle
from service.encoding.batch import Batch
from service.encoding.history import MASKED
from service.encoding.items import ITEM1, ItemTable
from service.encoding.rows import PADDING_ROW, UNKNOWN_ROW, RowSpace
from service.errors import GoldenFault, ManifestFault
from service.inference.backends.select import open_rungs
from service.inference.backends.ways import ON_CPU, cpu_model
from service.inference.parity import read_golden


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def parts(log: Log, checkpoint: Checkpoint) -> Ingredients:
    return gather(log, checkpoint, command="python -m models pack")


@pytest.fixture(scope="module")
def bundle(parts: Ingredients, store: Path) -> Bundle:
    return pack(parts, store)


@pytest.fixture(scope="module")
def golden(bundle: Bundle) -> dict[str, np.ndarray]:
    with np.load(io.BytesIO(bundle.read(bundle.manifest.golden.file)), allow_pickle=False) as file:
        return dict(file)


def test_every_file_is_listed_and_reads_back(bundle: Bundle, store: Path) -> None:
    on_disk = {path.name for path in bundle.folder.iterdir()}
    assert on_disk == {MANIFEST, *bundle.manifest.files}
    for file in bundle.manifest.files:
        assert bundle.read(file)
    assert bundle.folder == store / "shop" / bundle.manifest.version
    assert [path.name for path in (store / "shop").iterdir()] == [bundle.manifest.version]


def test_a_tuned_bundle_is_served_as_it_was_tuned(
    parts: Ingredients, bundle: Bundle, tmp_path: Path
) -> None:
    tuned = pack(parts, tmp_path, tune_s=1e-3)
    assert tuned.manifest.version == bundle.manifest.version
    assert bundle.manifest.tuning is None
    tuning = tuned.manifest.tuning
    assert tuning is not None
    assert tuning.cpu == cpu_model()
    rungs = open_rungs(tuned, read_golden(tuned))
    kinds = [rung.kind for rung in rungs if rung.kind in ON_CPU]
    for rung in rungs:
        rung.close()
    assert kinds == list(dict.fromkeys([tuning.timings[0].backend, "onnx-cpu"]))


def test_the_item_table_and_the_titles_hold_the_logs_items(bundle: Bundle, log: Log) -> None:
    space = RowSpace(bundle.manifest.input)
    table = ItemTable.from_bytes(bundle.read(bundle.manifest.item_table), space)
    titles = json.loads(bundle.read("titles.json"))
    assert len(table) == len(log.items) == len(titles)
    assert (table.locate(list(titles), space) < len(table)).all()
    assert set(bundle.manifest.sample_items) <= set(titles)


def test_golden_requests_hold_the_awkward_cases(golden: dict[str, np.ndarray]) -> None:
    batch = Batch(**{name: golden[name] for name in Batch.__struct_fields__})
    events = (batch.hist_mask == 0).sum(axis=1)
    assert (batch.hist_mask[0] == MASKED).all()
    assert events[1] == events.max() > 0
    unknown = batch.cand_ids[batch.tile_user == 2][..., ITEM1]
    assert np.isin(unknown, (PADDING_ROW, UNKNOWN_ROW)).all()
    assert (unknown == UNKNOWN_ROW).any()
    assert (batch.cand_ids == PADDING_ROW).all(axis=-1).any(), "no padded candidate"
    assert golden["logits"].dtype == np.float32
    assert golden["logits"].shape == (*batch.cand_ids.shape[:2], 2)


def test_onnx_runtime_gives_the_golden_logits(
    bundle: Bundle, golden: dict[str, np.ndarray]
) -> None:
    session = onnxruntime.InferenceSession(
        bundle.read(bundle.manifest.graphs["fp32"]), providers=["CPUExecutionProvider"]
    )
    logits = golden.pop("logits")
    np.testing.assert_allclose(session.run(None, golden)[0], logits, atol=1e-4)
    assert logits.std() > 0.1


def test_another_graph_fails_the_golden_check(bundle: Bundle, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(bundle.folder, folder)
    with np.load(folder / "golden.npz") as file:
        arrays = dict(file)
    arrays["logits"][0, 0, 0] += 0.01
    np.savez(folder / "golden.npz", **arrays)
    with pytest.raises(GoldenFault, match=r"rank\.onnx differs from PyTorch by 0\.0"):
        check_golden(folder / "rank.onnx", folder / "golden.npz")


def test_the_version_tells_of_the_content_and_is_never_overwritten(
    parts: Ingredients, bundle: Bundle, store: Path, tmp_path: Path
) -> None:
    again = pack(parts, tmp_path)
    assert again.manifest.version == bundle.manifest.version
    assert again.manifest.files == bundle.manifest.files
    with pytest.raises(ManifestFault, match="exists already"):
        pack(parts, store)
    named = pack(parts, tmp_path, version="v2")
    assert named.folder == tmp_path / "shop" / "v2"


def test_the_manifest_says_how_the_bundle_came_to_be(
    bundle: Bundle, log: Log, checkpoint: Checkpoint
) -> None:
    provenance = bundle.manifest.provenance
    assert provenance["log_sha256"] == log.digest() == checkpoint.log_sha256
    assert provenance["recipe"]["seed"] == checkpoint.recipe.seed
    assert provenance["command"] == "python -m models pack"
    figure = bundle.manifest.metrics["test"]["network"]["click"]["ndcg10"]
    assert figure["low"] < figure["value"] < figure["high"]
