"""The gate: a sound variant passes and is served, a damaged one fails with the numbers."""

from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from models.build import Checkpoint, EvaluatedSlates, gather
from models.cli import main
from models.compress import Subject, with_variants, write_variants
from models.export import to_onnx
from models.gate import LIMITS, GateFault, Limits, judge, kendall_tau
from models.log import Log
from models.pack import pack
from models.session import score_graph
from models.variants import Made
from service.bundle import BatchSpec, Bundle, OutputSpec
from service.domain import Float32Array
from service.errors import ManifestFault
from service.inference.backends.select import open_rungs
from service.inference.parity import read_golden

LOOSE = Limits(max_ndcg_loss=1, min_overlap=0, min_auc_share=0)


def logits(shape: tuple[int, ...], seed: int = 1) -> Float32Array:
    return np.random.default_rng(seed).normal(0, 1, shape).astype(np.float32)


def test_the_same_scores_lose_nothing(slates: EvaluatedSlates) -> None:
    scores = logits((*slates.encoded.click.shape, 2))
    verdict = judge(scores, scores, slates.encoded, OutputSpec(), LIMITS["fp16"])
    assert verdict.passed
    assert (verdict.ndcg_loss.value, verdict.ndcg_loss.high) == (0, 0)
    assert verdict.overlap == verdict.kendall_tau == 1
    assert verdict.max_logit_change == 0


def test_a_monotonous_change_of_scores_is_no_loss(slates: EvaluatedSlates) -> None:
    scores = logits((*slates.encoded.click.shape, 2))
    verdict = judge(
        scores, scores / np.float32(2) - np.float32(1), slates.encoded, OutputSpec(), LIMITS["fp16"]
    )
    assert verdict.passed
    assert verdict.max_logit_change > 0.5


def test_other_scores_fail_and_each_failure_has_its_number(slates: EvaluatedSlates) -> None:
    shape = (*slates.encoded.click.shape, 2)
    clicks = np.nan_to_num(slates.encoded.click)
    perfect = np.stack([clicks, clicks], axis=-1) + logits(shape) / np.float32(50)
    verdict = judge(perfect, logits(shape, 2), slates.encoded, OutputSpec(), LIMITS["int8"])
    assert not verdict.passed
    assert [failure.split(" ")[0] for failure in verdict.failures] == ["NDCG@10", "AUC", "the"]
    assert all("at most" in failure and "%" in failure for failure in verdict.failures)
    assert abs(verdict.kendall_tau) < 0.1


def test_a_loss_is_held_to_the_upper_end_of_its_interval(slates: EvaluatedSlates) -> None:
    scores = logits((*slates.encoded.click.shape, 2))
    noisy = scores + np.float32(0.3) * logits(scores.shape, 2)
    found = judge(scores, noisy, slates.encoded, OutputSpec(), LOOSE)
    between = (found.ndcg_loss.value + found.ndcg_loss.high) / 2
    assert found.ndcg_loss.low < found.ndcg_loss.value < between < found.ndcg_loss.high
    strict = msgspec.structs.replace(LOOSE, max_ndcg_loss=between)
    assert not judge(scores, noisy, slates.encoded, OutputSpec(), strict).passed


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_scores_that_are_no_numbers_fail(slates: EvaluatedSlates, number: float) -> None:
    scores = logits((*slates.encoded.click.shape, 2))
    spoilt = scores.copy()
    spoilt[0, 0, 1] = number
    verdict = judge(scores, spoilt, slates.encoded, OutputSpec(), LOOSE)
    assert not verdict.passed
    assert verdict.failures[0].startswith("1 of ")
    assert "no finite score" in verdict.failures[0]
    padding = np.argwhere(np.isnan(slates.encoded.click))[0]
    spoilt = scores.copy()
    spoilt[tuple(padding)] = number
    assert judge(scores, spoilt, slates.encoded, OutputSpec(), LOOSE).passed


def test_kendall_tau_counts_pairs() -> None:
    ascending = np.arange(4.0)
    assert kendall_tau(ascending, ascending) == 1
    assert kendall_tau(ascending, -ascending) == -1
    assert kendall_tau(ascending, np.array([0.0, 1, 3, 2])) == pytest.approx(4 / 6)


def test_every_variant_of_a_trained_network_passes(made: Made) -> None:
    made.check()
    assert {entry.name for entry in made.variants} == {"fp16", "int8", "int8-cpu", "fp8"}


def test_a_wrong_scale_fails_the_gate(
    checkpoint: Checkpoint, slates: EvaluatedSlates, made: Made
) -> None:
    graph = next(entry.graph for entry in made.variants if entry.name == "int8-cpu")
    model = onnx.load_from_string(graph)
    scale = next(t for t in model.graph.initializer if t.name == "cross0.up.weight.scale")
    scale.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(scale) * 8, scale.name))
    reference = score_graph(to_onnx(checkpoint.network), slates.encoded)
    damaged = score_graph(model.SerializeToString(), slates.encoded)
    verdict = judge(reference, damaged, slates.encoded, OutputSpec(), LIMITS["int8"])
    assert not verdict.passed
    assert any("the first ten differ by" in failure for failure in verdict.failures)


def test_a_variant_that_fails_is_told_and_not_packed(
    log: Log, checkpoint: Checkpoint, made: Made, tmp_path: Path
) -> None:
    good, bad = made.variants[:2]
    failed = msgspec.structs.replace(bad.verdict, failures=("NDCG@10 loses up to 7%",))
    mixed = msgspec.structs.replace(
        made, variants=[good, msgspec.structs.replace(bad, verdict=failed)]
    )
    with pytest.raises(GateFault, match=f"{bad.name}: NDCG@10 loses up to 7%"):
        mixed.check()
    bundle = pack(with_variants(gather(log, checkpoint, command=""), mixed), tmp_path)
    assert set(bundle.manifest.graphs) == {"fp32", good.name}
    told = bundle.manifest.metrics["variants"]
    assert (told[good.name]["passed"], told[bad.name]["passed"]) == (True, False)
    assert told[bad.name]["failures"] == ["NDCG@10 loses up to 7%"]
    assert told[good.name]["limits"]["max_ndcg_loss"] == 0.001
    assert (
        told[good.name]["size_bytes"] == bundle.manifest.files[f"rank-{good.name}.onnx"].size_bytes
    )


@pytest.fixture(scope="module")
def bundle(
    log: Log, checkpoint: Checkpoint, made: Made, tmp_path_factory: pytest.TempPathFactory
) -> Bundle:
    parts = with_variants(gather(log, checkpoint, command=""), made)
    parts = msgspec.structs.replace(parts, batch=BatchSpec(max_users=4, tile_buckets=(4,)))
    return pack(parts, tmp_path_factory.mktemp("store"))


def test_the_service_serves_the_precision_that_is_asked_for(bundle: Bundle) -> None:
    golden = read_golden(bundle)
    for precision in ("int8", "fp32"):
        (rung,) = open_rungs(bundle, golden, choice="onnx-cpu", precision=precision)
        assert rung.precision == precision
        assert np.abs(rung.score(golden.batch) - golden.logits).max() < 0.25
        rung.close()
    (rung,) = open_rungs(bundle, golden, choice="onnx-cpu")
    assert rung.precision == "fp32"
    rung.close()
    with pytest.raises(ManifestFault, match=r"no graph for onnx-cpu .* precision fp8"):
        open_rungs(bundle, golden, choice="onnx-cpu", precision="fp8")


def test_openvino_serves_the_int8_graph_too(bundle: Bundle) -> None:
    pytest.importorskip("openvino", reason="the extra openvino is not installed")
    rungs = open_rungs(bundle, read_golden(bundle), choice="openvino", precision="int8")
    assert [(rung.kind, rung.precision) for rung in rungs] == [
        ("openvino", "int8"),
        ("onnx-cpu", "int8"),
    ]
    for rung in rungs:
        rung.close()


def test_a_packed_version_can_be_quantized_as_well(bundle: Bundle, checkpoint: Checkpoint) -> None:
    found, expected = Subject.of_bundle(bundle.folder), Subject.of_checkpoint(checkpoint)
    assert found == expected


def test_graphs_verdicts_and_ranges_are_written(made: Made, tmp_path: Path) -> None:
    write_variants(made, tmp_path)
    told = msgspec.json.decode((tmp_path / "gate.json").read_bytes())
    assert set(told["variants"]) == {"fp16", "int8", "int8-cpu", "fp8"}
    for name, seen in told["ranges"].items():
        assert seen["seen"]["low"] <= seen["u8"]["low"] <= 0 <= seen["u8"]["high"], name
    assert (tmp_path / "rank-int8-cpu.onnx").stat().st_size == told["variants"]["int8-cpu"][
        "size_bytes"
    ]


def test_an_unknown_variant_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["quantize", "--checkpoint", "x.pt", "--out", "x", "--variants", "int7"])
    assert "no variant int7" in capsys.readouterr().err
