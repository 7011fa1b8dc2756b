"""Quantized graphs: what is quantized, how small they are, and that a score is a user's own."""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from models.calibrate import Seen, choose_ranges, observe, rounding_error
from models.dataset import Examples
from models.export import to_onnx
from models.network import Inputs
from models.presets import PRESETS, Preset
from models.quantize import (
    CPU_INT8,
    DEVICE_INT8,
    FP8,
    QuantizeFault,
    Range,
    Scheme,
    constant_products,
    quantize_products,
    quantize_table,
    row_wise,
)
from models.session import open_session
from models.variants import KINDS
from service.bundle import BatchSpec
from service.encoding.batch import Batch
from service.inference.backends.openvino import OpenVino
from tests.unit.models.test_network import FOLDED, HEADED, random_batch, trained_looking


def examples_of(batch: Inputs) -> Examples:
    arrays = {name: array.numpy() for name, array in batch._asdict().items()}
    shape = arrays["cand_ids"].shape[:2]
    return Examples(
        **arrays,
        click=np.ones(shape, np.float32),
        long_dwell=np.ones(shape, np.float32),
        position=np.zeros(shape, np.int64),
        at_ms=np.arange(len(arrays["ctx_ids"])),
    )


def quantized(preset: Preset, scheme: Scheme) -> bytes:
    graph = to_onnx(trained_looking(preset))
    seen = observe(graph, examples_of(random_batch(preset, users=20, tiles_each=3)))
    return quantize_products(graph, choose_ranges(seen, scheme), scheme)


def score(graph: bytes, batch: Inputs, *, fused: bool = True) -> np.ndarray:
    inputs = {name: array.numpy() for name, array in batch._asdict().items()}
    logits: np.ndarray = open_session(graph, fused=fused).run(None, inputs)[0]
    return logits


def test_constant_products_are_quantized_and_the_named_ones_are_not() -> None:
    graph = onnx.load_from_string(to_onnx(trained_looking(HEADED)))
    chosen = {node.input[1] for node in constant_products(graph)}
    kinds = ("query", "key", "value", "out", "up", "down")
    blocks = ("encoder0", "encoder1", "cross0", "cross1")
    assert chosen == {
        "head_context.weight",
        *(f"{block}.{kind}.weight" for block in blocks for kind in kinds),
    }


def test_a_norm_that_feeds_three_products_is_quantized_once() -> None:
    model = onnx.load_from_string(quantized(HEADED, DEVICE_INT8))
    products = [node for node in model.graph.node if node.op_type == "MatMul"]
    query, key, value = (
        next(node.input[0] for node in products if node.input[1] == f"encoder0.{kind}.weight.dq")
        for kind in ("query", "key", "value")
    )
    assert query == key == value
    pairs = [node for node in model.graph.node if node.op_type == "QuantizeLinear"]
    assert len({node.input[0] for node in pairs}) == len(pairs)


@pytest.mark.parametrize("scheme", [CPU_INT8, DEVICE_INT8, FP8], ids=["u8s8", "s8s8", "fp8"])
@pytest.mark.parametrize("preset", [FOLDED, HEADED], ids=["folded", "headed"])
def test_a_quantized_graph_scores_nearly_as_before(preset: Preset, scheme: Scheme) -> None:
    batch = random_batch(preset, users=5, tiles_each=2)
    expected = score(to_onnx(trained_looking(preset)), batch)
    found = score(quantized(preset, scheme), batch, fused=scheme is CPU_INT8)
    error = np.abs(found - expected)
    assert 0 < error.max() < 0.25 * expected.std()


@pytest.mark.parametrize("preset", [FOLDED, HEADED], ids=["folded", "headed"])
def test_a_users_score_is_the_same_alone_permuted_and_in_a_crowd(preset: Preset) -> None:
    graph = quantize_table(quantized(preset, CPU_INT8))
    crowd = random_batch(preset, users=6, tiles_each=2)
    together = score(graph, crowd)
    order = np.random.default_rng(3).permutation(12)
    permuted = crowd._replace(cand_ids=crowd.cand_ids[order], tile_user=crowd.tile_user[order])
    np.testing.assert_allclose(score(graph, permuted), together[order], atol=1e-6)
    for user in range(6):
        own = slice(2 * user, 2 * user + 2)
        alone = Inputs(
            hist_ids=crowd.hist_ids[[user]],
            hist_age=crowd.hist_age[[user]],
            hist_mask=crowd.hist_mask[[user]],
            ctx_ids=crowd.ctx_ids[[user]],
            cand_ids=crowd.cand_ids[own],
            tile_user=crowd.tile_user[own] * 0,
        )
        np.testing.assert_allclose(score(graph, alone), together[own], atol=1e-6)


@pytest.mark.parametrize("preset", [FOLDED, HEADED], ids=["folded", "headed"])
def test_openvino_runs_the_graph_and_gives_each_user_the_same_alone(preset: Preset) -> None:
    pytest.importorskip("openvino", reason="the extra openvino is not installed")
    graph = quantize_table(quantized(preset, CPU_INT8))
    limits = BatchSpec(max_users=8, tile_buckets=(2, 16))
    engine = OpenVino(graph, precision="int8", spec=preset.input_spec(), limits=limits)
    crowd = random_batch(preset, users=6, tiles_each=2)
    arrays = Batch(**{name: array.numpy() for name, array in crowd._asdict().items()})
    together = engine.score(arrays)
    expected = score(graph, crowd)
    assert np.abs(together - expected).max() < 0.25 * expected.std()
    for user in range(6):
        own = slice(2 * user, 2 * user + 2)
        alone = Batch(
            arrays.hist_ids[[user]],
            arrays.hist_age[[user]],
            arrays.hist_mask[[user]],
            arrays.ctx_ids[[user]],
            arrays.cand_ids[own],
            arrays.tile_user[own] * 0,
        )
        np.testing.assert_allclose(engine.score(alone), together[own], atol=1e-6)
    # what a bucket holds of a batch before does not show
    np.testing.assert_array_equal(engine.score(arrays), together)
    engine.close()


@pytest.mark.parametrize("name", ["tiny", "base"])
def test_int8_with_int8_tables_is_three_and_a_half_times_smaller(name: str) -> None:
    preset = PRESETS[name]
    graph = to_onnx(trained_looking(preset))
    seen = observe(graph, examples_of(random_batch(preset, users=2, tiles_each=1)))
    assert len(graph) / len(KINDS["int8-cpu"].rewrite(graph, seen)) >= 3.5


def test_rows_keep_their_largest_value_and_err_by_half_a_step_at_most() -> None:
    table = np.random.default_rng(1).normal(0, 0.05, (500, 32)).astype(np.float32)
    table[0] = 0
    table[7] *= 1e4
    rows, scales = row_wise(table)
    assert not rows[0].any()
    assert np.abs(rows).max() == 127
    steps = scales.astype(np.float32)
    assert (np.abs(rows * steps - table) <= steps / 2 * 1.001).all()


def test_a_range_is_cut_where_an_outlier_would_coarsen_every_other_value() -> None:
    sample = np.random.default_rng(2).normal(0, 1, 2_000_000).astype(np.float32)
    sample[0] = 40.0
    chosen = choose_ranges({"x": Seen(sample, float(sample.min()), 40.0)}, CPU_INT8)["x"]
    assert 3.0 < chosen.high < 6.0
    whole = Range(float(sample.min()), 40.0)
    assert rounding_error(sample, chosen, CPU_INT8) < rounding_error(sample, whole, CPU_INT8)


def test_the_fp32_table_is_gone() -> None:
    model = onnx.load_from_string(quantize_table(to_onnx(trained_looking(FOLDED))))
    stored = {entry.name: numpy_helper.to_array(entry) for entry in model.graph.initializer}
    assert stored["table.rows"].dtype == np.int8
    assert "table" not in stored


def test_an_activation_without_a_range_is_named() -> None:
    with pytest.raises(QuantizeFault, match="was not calibrated"):
        quantize_products(to_onnx(trained_looking(FOLDED)), {}, CPU_INT8)


def test_a_graph_without_a_table_is_refused() -> None:
    once = quantize_table(to_onnx(trained_looking(FOLDED)))
    with pytest.raises(QuantizeFault, match="no embedding table"):
        quantize_table(once)
