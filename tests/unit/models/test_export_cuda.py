"""The graph with ONNX Runtime's own operators scores as the plain one, here on the CPU."""

from __future__ import annotations

from collections import Counter

import msgspec
import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from loadtests.engine_subjects import random_batch
from models.export import to_onnx
from models.export_cuda import to_fused_onnx
from models.network import Network
from models.presets import PRESETS

SMALL = msgspec.structs.replace(
    PRESETS["base"], width=32, heads=2, ffn=64, item1_rows=512, item2_rows=512, feature_rows=2048
)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("history_len", [16, 23])
@pytest.mark.parametrize("layers", [(1, 1), (2, 3)])
def test_fused_is_plain(layers: tuple[int, int], history_len: int, activation: str) -> None:
    encoder, cross = layers
    preset = msgspec.structs.replace(
        SMALL,
        history_len=history_len,
        encoder_layers=encoder,
        cross_layers=cross,
        activation=activation,
        tile_width=24,
    )
    torch.manual_seed(3)
    network = Network(preset).eval()
    batch = random_batch(preset.input_spec(), users=4)  # the first has no history
    feeds = {name: getattr(batch, name) for name in batch.__struct_fields__}
    plain, fused = to_onnx(network), to_fused_onnx(network)
    scores = [
        onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"]).run(None, feeds)[0]
        for graph in (plain, fused)
    ]
    np.testing.assert_allclose(scores[0], scores[1], rtol=0, atol=1e-5)
    assert np.ptp(scores[0]) > 0.01
    kinds = Counter(node.op_type for node in onnx.load_from_string(fused).graph.node)
    assert kinds["MultiHeadAttention"] == encoder + cross
    assert kinds["SkipLayerNormalization"] >= 2 * (encoder + cross) - 2
    assert kinds["LayerNormalization"] <= 3
