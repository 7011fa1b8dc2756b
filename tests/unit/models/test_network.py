from typing import Any

import msgspec
import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from models.export import to_onnx
from models.export_split import to_pair
from models.network import Inputs, Network
from models.presets import PRESETS, Preset
from service.encoding.history import MASKED

FOLDED = msgspec.structs.replace(
    PRESETS["tiny"], item1_rows=600, item2_rows=500, history_len=7, tile_width=4
)
HEADED = msgspec.structs.replace(
    FOLDED, folded=False, heads=4, encoder_layers=2, cross_layers=2, embedding=16, activation="gelu"
)


def random_batch(preset: Preset, *, users: int, tiles_each: int) -> Inputs:
    rng = np.random.default_rng(5)
    tiles, length = users * tiles_each, preset.history_len
    shown = rng.integers(0, length + 1, users)
    shown[0] = 0  # an empty history
    mask = np.where(np.arange(length) < shown[:, None], 0.0, MASKED)
    arrays = (
        rng.integers(0, 500, (users, length, 6), np.int32),
        rng.integers(0, 32, (users, length), np.int32),
        mask.astype(np.float32),
        rng.integers(0, 2_048, (users, 16), np.int32),
        rng.integers(0, 500, (tiles, preset.tile_width, 9), np.int32),
        np.repeat(np.arange(users, dtype=np.int32), tiles_each),
    )
    return Inputs(*map(torch.from_numpy, arrays))


def trained_looking(preset: Preset) -> Network:
    """A network with every parameter away from its start, as training would leave it."""
    torch.manual_seed(11)
    network = Network(preset)
    with torch.no_grad():
        for value in network.parameters():
            value.add_(0.1 * torch.randn_like(value))
    return network.eval()


@pytest.mark.parametrize("preset", [FOLDED, HEADED], ids=["folded", "headed"])
def test_onnx_runtime_gives_the_logits_of_pytorch(preset: Preset) -> None:
    network = trained_looking(preset)
    session = onnxruntime.InferenceSession(to_onnx(network), providers=["CPUExecutionProvider"])
    for users in (1, 5):
        batch = random_batch(preset, users=users, tiles_each=3)
        with torch.inference_mode():
            expected = network(batch).numpy()
        inputs = {name: array.numpy() for name, array in batch._asdict().items()}
        np.testing.assert_allclose(session.run(None, inputs)[0], expected, atol=2e-5)
        assert np.isfinite(expected).all()


@pytest.mark.parametrize("preset", [FOLDED, HEADED], ids=["folded", "headed"])
def test_a_score_does_not_depend_on_what_shares_the_batch(preset: Preset) -> None:
    network = trained_looking(preset)
    batch = random_batch(preset, users=4, tiles_each=2)
    with torch.inference_mode():
        together = network(batch)
        for user in range(4):
            tiles = batch.tile_user == user
            alone = Inputs(
                hist_ids=batch.hist_ids[user : user + 1],
                hist_age=batch.hist_age[user : user + 1],
                hist_mask=batch.hist_mask[user : user + 1],
                ctx_ids=batch.ctx_ids[user : user + 1],
                cand_ids=batch.cand_ids[tiles].flip(1),
                tile_user=torch.zeros(2, dtype=torch.int32),
            )
            np.testing.assert_allclose(network(alone).flip(1), together[tiles], atol=1e-5)


def test_the_graph_asks_for_no_shape_and_copies_nothing_to_widen_it() -> None:
    graph = onnx.load_from_string(to_onnx(trained_looking(FOLDED))).graph
    kinds = {node.op_type for node in graph.node}
    assert kinds.isdisjoint({"Shape", "ConstantOfShape", "Expand", "Tile", "Cast", "If", "Loop"})


def test_the_position_bias_is_not_exported() -> None:
    network = trained_looking(FOLDED)
    before = to_onnx(network)
    with torch.no_grad():
        network.position.add_(3.0)
    assert to_onnx(network) == before


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_has_the_parameters_that_its_page_promises(name: str) -> None:
    with torch.device("meta"):
        network = Network(PRESETS[name])
    millions = sum(value.numel() for value in network.parameters()) / 1e6
    promised = {"tiny": 0.48, "base": 7.8, "large": 306}[name]
    assert millions == pytest.approx(promised, rel=0.05)


@pytest.mark.parametrize("preset", [FOLDED, HEADED], ids=["folded", "headed"])
def test_encoding_and_scoring_apart_give_the_logits_of_pytorch(preset: Preset) -> None:
    network = trained_looking(preset)
    batch = random_batch(preset, users=4, tiles_each=2)
    pair = to_pair(network)
    encode, score = (
        onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"]) for graph in pair
    )
    inputs = {name: array.numpy() for name, array in batch._asdict().items()}
    names = [entry.name for entry in encode.get_outputs()]
    encoded = dict(zip(names, encode.run(None, _fed(encode, inputs)), strict=True))
    with torch.inference_mode():
        expected = network(batch).numpy()
    found = score.run(None, _fed(score, inputs | encoded))[0]
    np.testing.assert_allclose(found, expected, atol=2e-5)
    operators = {node.op_type for graph in pair for node in onnx.load_from_string(graph).graph.node}
    assert not operators & {"Shape", "Expand", "Cast"}


def _fed(session: Any, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {entry.name: arrays[entry.name] for entry in session.get_inputs()}
