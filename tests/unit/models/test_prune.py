"""Pruning: what is cut is gone and no more, and two of four weights are zero to the end."""

from __future__ import annotations

import copy

import msgspec
import pytest
import torch

from models import prune
from models.blocks import FoldedAttention, HeadedAttention
from models.build import Checkpoint, EvaluatedSlates
from models.export import to_onnx
from models.log import Log
from models.network import Inputs, Network
from models.presets import PRESETS
from models.prune import (
    cut_columns,
    cut_heads,
    linear_weights,
    paired_blocks,
    zero_two_of_four,
)

SMALL = {"item1_rows": 256, "item2_rows": 128, "feature_rows": 2_048}
SIZES = {
    "folded": msgspec.structs.replace(PRESETS["tiny"], **SMALL),
    "headed": msgspec.structs.replace(
        PRESETS["base"], **SMALL, width=32, heads=4, ffn=64, embedding=32
    ),
}


@pytest.fixture(params=SIZES)
def network(request: pytest.FixtureRequest) -> Network:
    torch.manual_seed(1)
    return Network(SIZES[request.param]).eval()


def emptied(network: Network, pruned: Network, part: str) -> Network:
    """The whole network with zeros where the pruned one has nothing."""
    twin = copy.deepcopy(network)
    blocks = zip(paired_blocks(network, pruned), paired_blocks(network, twin), strict=True)
    with torch.no_grad():
        for (old, new), (_, same) in blocks:
            if part == "columns":
                same.down.weight[:, ~found_in(old.up.weight, new.up.weight)] = 0.0
            elif isinstance(old.attention, FoldedAttention):
                assert isinstance(new.attention, FoldedAttention)
                assert isinstance(same.attention, FoldedAttention)
                kept = found_in(old.attention.value.flatten(1), new.attention.value.flatten(1))
                same.attention.value[~kept] = 0.0
            else:
                assert isinstance(new.attention, HeadedAttention)
                assert isinstance(same.attention, HeadedAttention)
                kept = found_in(old.attention.value.weight, new.attention.value.weight)
                assert int(kept.sum()) == network.preset.inner_width
                same.attention.out.weight[:, ~kept] = 0.0
    return twin


def found_in(rows: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Which rows are among the others."""
    return torch.isclose(rows.unsqueeze(1), others.unsqueeze(0), atol=0, rtol=0).all(-1).any(-1)


@pytest.mark.parametrize("part", ["columns", "heads"])
def test_a_pruned_network_is_the_whole_one_without_what_was_cut(
    network: Network, part: str
) -> None:
    pruned = cut_columns(network, 48) if part == "columns" else cut_heads(network, 1)
    twin = emptied(network, pruned, part)
    users, tiles, width = 3, 4, network.preset.tile_width
    chance = torch.Generator().manual_seed(2)

    def ids(*shape: int) -> torch.Tensor:
        return torch.randint(2, 100, shape, generator=chance, dtype=torch.int32)

    length = network.preset.history_len
    batch = Inputs(
        ids(users, length, 6),
        torch.randint(0, 10, (users, length), generator=chance, dtype=torch.int32),
        torch.zeros(users, length),
        ids(users, 16),
        ids(tiles, width, 9),
        torch.tensor([0, 1, 2, 2], dtype=torch.int32),
    )
    with torch.inference_mode():
        found, expected = pruned(batch), twin(batch)
        whole = network(batch)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(found, whole, atol=1e-4)
    assert len(to_onnx(pruned)) < len(to_onnx(network))


def test_two_of_four_weights_are_zero_and_the_larger_two_stay(network: Network) -> None:
    before = {name: value.clone() for name, value in network.state_dict().items()}
    zero_two_of_four(network)
    for block, _ in paired_blocks(network, network):
        for weight in linear_weights(block):
            groups = weight.detach().reshape(len(weight), -1, 4)
            assert ((groups == 0).sum(-1) == 2).all()
    for name, value in network.state_dict().items():
        stayed = value != 0
        assert torch.equal(value[stayed], before[name][stayed])


def test_each_experiment_is_trained_on_and_judged(
    log: Log, checkpoint: Checkpoint, slates: EvaluatedSlates, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, *_, halved, _, _ = every = prune.experiments(checkpoint.network)
    assert len(every) == 5
    monkeypatch.setattr(prune, "experiments", lambda _: [whole, halved])
    outcomes = prune.run(log, checkpoint, epochs=1)
    names = [outcome.name for outcome in outcomes]
    assert names == ["whole", "whole, trained on", "32 of 64 columns"]
    assert outcomes[0].verdict.ndcg_loss.value == 0
    assert min(outcome.size_bytes for outcome in outcomes) < outcomes[0].size_bytes
    assert {outcome.verdict.slates for outcome in outcomes} == {len(slates.shown)}
    table = prune.as_markdown(outcomes)
    assert all(f"| {name} |" in table for name in names)
