"""Pruning as an experiment: fewer heads or feed-forward columns, or two of four weights zero.

What is left is trained on for a while and judged by the gate that quantized graphs pass.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor, nn
from tqdm import tqdm

from models import speed
from models.blocks import Block, FoldedAttention, HeadedAttention
from models.build import Checkpoint, choose_slates
from models.dataset import encode_log, slates_before_test
from models.export import to_onnx
from models.gate import LIMITS, Verdict, judge
from models.log import Log
from models.network import Network
from models.session import score_graph
from models.tables import markdown
from models.train import fit
from service.bundle import OutputSpec
from service.encoding.rows import RowSpace

RATE_SHARE = 0.05
"""Of the recipe's learning rate, for training on."""
GROUP, KEPT = 4, 2
Cut = Callable[[Network], Network]


class Experiment(NamedTuple):
    """One way to prune, and what must hold of the weights while training goes on."""

    name: str
    cut: Cut
    keep: Callable[[Network], None] = lambda _: None


class Outcome(msgspec.Struct, frozen=True):
    """What came of an experiment."""

    name: str
    size_bytes: int
    times_ms: dict[int, float]
    verdict: Verdict


def experiments(network: Network) -> list[Experiment]:
    """Those that make sense for a network; the first only trains on, to compare with."""
    preset, fewer = network.preset, network.preset.heads - 1
    return [
        Experiment("whole, trained on", copy.deepcopy),
        *(
            Experiment(f"{kept} of {preset.ffn} columns", partial(cut_columns, kept=kept))
            for kept in (preset.ffn * 3 // 4, preset.ffn // 2)
        ),
        Experiment(f"{fewer} of {preset.heads} heads", partial(cut_heads, kept=fewer)),
        Experiment("2 of 4 weights", copy.deepcopy, keep=zero_two_of_four),
    ]


def run(log: Log, checkpoint: Checkpoint, *, epochs: int, device: str = "cpu") -> list[Outcome]:
    """Every experiment, after training on for so many epochs; shows progress."""
    network, output = checkpoint.network, OutputSpec()
    train = encode_log(log, RowSpace(network.preset.input_spec()), slates_before_test(log))
    test = choose_slates(log, network.preset).encoded
    recipe = msgspec.structs.replace(
        checkpoint.recipe,
        epochs=epochs,
        learning_rate=checkpoint.recipe.learning_rate * RATE_SHARE,
        table_rate=checkpoint.recipe.table_rate * RATE_SHARE,
    )
    graphs = {"whole": to_onnx(network)}
    for experiment in tqdm(experiments(network), desc="prune", leave=False):
        cut = experiment.cut(network)
        experiment.keep(cut)
        trained, _ = fit(
            cut.preset, recipe, train, None, device=device, start=cut, keep=experiment.keep
        )
        graphs[experiment.name] = to_onnx(trained)
    logits = {name: score_graph(graph, test) for name, graph in graphs.items()}
    times_ms = speed.compare(graphs, test)
    return [
        Outcome(
            name,
            len(graph),
            times_ms[name],
            judge(logits["whole"], logits[name], test, output, LIMITS["int8"]),
        )
        for name, graph in graphs.items()
    ]


def cut_columns(network: Network, kept: int) -> Network:
    """A network with the feed-forward columns of each block whose weights are largest."""
    pruned = Network(msgspec.structs.replace(network.preset, ffn=kept))
    for old, new in paired_blocks(network, pruned):
        size = old.up.weight.norm(dim=1) * old.down.weight.norm(dim=0)
        chosen = _largest(size, kept)
        _set(new.up.weight, old.up.weight[chosen])
        _set(new.up.bias, old.up.bias[chosen])
        _set(new.down.weight, old.down.weight[:, chosen])
    return _with_the_rest(network, pruned, {"up.weight", "up.bias", "down.weight"})


def cut_heads(network: Network, kept: int) -> Network:
    """A network with the heads of each block whose value weights are largest."""
    preset = network.preset
    head_width = None if preset.folded else preset.inner_width
    pruned = Network(msgspec.structs.replace(preset, heads=kept, head_width=head_width))
    for old, new in paired_blocks(network, pruned):
        if isinstance(old.attention, FoldedAttention):
            assert isinstance(new.attention, FoldedAttention)
            chosen = _largest(old.attention.value.norm(dim=(1, 2)), kept)
            _set(new.attention.key, old.attention.key[chosen])
            _set(new.attention.value, old.attention.value[chosen])
        else:
            assert head_width is not None
            assert isinstance(old.attention, HeadedAttention)
            _copy_heads(old.attention, new.attention, kept, head_width)
    return _with_the_rest(
        network,
        pruned,
        {f"attention.{name}" for name in ("key", "value")}
        | {f"attention.{name}.weight" for name in ("query", "key", "value", "out")},
    )


def _copy_heads(old: HeadedAttention, new: nn.Module, kept: int, width: int) -> None:
    size = old.value.weight.reshape(-1, width, old.value.in_features).norm(dim=(1, 2))
    size = size * old.out.weight.reshape(old.out.out_features, -1, width).norm(dim=(0, 2))
    rows = (_largest(size, kept)[:, None] * width + torch.arange(width)).flatten()
    for name in ("query", "key", "value"):
        _set(getattr(new, name).weight, getattr(old, name).weight[rows])
    assert isinstance(new, HeadedAttention)
    _set(new.out.weight, old.out.weight[:, rows])


def zero_two_of_four(network: Network) -> None:
    """Zero the smaller two of every four weights that meet in a sum, in place.

    As TensorRT's sparse kernels want them: along the inputs of each linear layer of the blocks.
    """
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, Block):
                for weight in linear_weights(module):
                    groups = weight.view(-1, weight.shape[-1] // GROUP, GROUP)
                    smaller = groups.abs().topk(GROUP - KEPT, dim=-1, largest=False).indices
                    groups.scatter_(-1, smaller, 0.0)


def linear_weights(block: Block) -> list[Tensor]:
    """The weights [outputs, inputs] of a block's linear layers."""
    return [each.weight for each in block.modules() if isinstance(each, nn.Linear)]


def as_markdown(outcomes: list[Outcome]) -> str:
    users = list(outcomes[0].times_ms)
    head = ["network", "MB", *(f"ms, users {count}" for count in users), "NDCG@10 lost", "gate"]
    rows = [
        [
            outcome.name,
            f"{outcome.size_bytes / 1e6:.2f}",
            *(f"{took:.2f}" for took in outcome.times_ms.values()),
            str(outcome.verdict.ndcg_loss),
            "passes" if outcome.verdict.passed else "; ".join(outcome.verdict.failures),
        ]
        for outcome in outcomes
    ]
    return markdown(head, rows)


def paired_blocks(old: Network, new: Network) -> list[tuple[Block, Block]]:
    """The blocks of two networks of the same depth."""
    pairs = zip(old.modules(), new.modules(), strict=True)
    return [(a, b) for a, b in pairs if isinstance(a, Block) and isinstance(b, Block)]


def _with_the_rest(old: Network, new: Network, cut: set[str]) -> Network:
    """The new network with every weight of the old one that was not cut."""
    known = {
        name: value
        for name, value in old.state_dict().items()
        if not any(name.endswith(f".{part}") for part in cut)
    }
    new.load_state_dict(known, strict=False)
    return new.eval()


def _largest(size: Tensor, kept: int) -> Tensor:
    return size.topk(kept).indices.sort().values


def _set(parameter: Tensor, value: Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(value)
