"""Training: binary cross-entropy of click and long dwell, with early stopping; seeded."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm

from models.dataset import Examples
from models.metrics import SlateFigures
from models.network import ITEM_COLUMNS, MAX_POSITION, Inputs, Network, Scales
from models.partial import Partial
from models.presets import Preset
from service.domain import Int64Array
from service.encoding.history import MASKED
from service.encoding.rows import PADDING_ROW, UNKNOWN_ROW
from service.errors import RankerError


class TrainingFault(RankerError):
    """Training that cannot start here; says why."""


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """How to train."""

    seed: int = 1
    earlier_epochs: int = 0
    """First, on what users did before the log (`earlier.py`)."""
    earlier_table_rate: float = 3e-3
    epochs: int = 3
    patience: int = 2
    slates_per_batch: int = 128
    learning_rate: float = 2e-3
    table_rate: float = 5e-3
    weight_decay: float = 1e-2
    table_decay: float = 1e-2
    id_dropout: float = 0.12
    """Share of item ids replaced by the unknown row."""
    lag_share: float = 0.3
    """Share of histories whose newest events are hidden, as if they had not arrived yet."""
    max_lag_events: int = 5
    scales: Scales = Scales()
    dropout: float = 0.1
    dwell_loss: float = 0.5
    pair_loss: float = 0.0
    """Weight of the in-slate pairwise term (BPR) on clicks."""


DEVICES = ("auto", "cpu", "cuda")


def device_named(name: str) -> str:
    """The device that one of DEVICES means here; raises TrainingFault where there is none."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise TrainingFault("--device cuda: torch sees no CUDA device")
    return name


def fit(
    preset: Preset,
    recipe: Recipe,
    train: Examples,
    validation: Examples | None,
    *,
    device: str = "cpu",
    start: Network | None = None,
    keep: Callable[[Network], None] = lambda _: None,
    partial: Partial | None = None,
) -> tuple[Network, list[dict[str, float]]]:
    """The network of the best epoch on validation slates, and each epoch's loss and figures.

    Without validation slates all epochs are run, and the last one stands. The network comes
    back to the CPU, wherever it was trained. `start` is trained on instead of a new one;
    `keep` restores after each step what must hold of the weights. With `partial` a run that
    was interrupted goes on after its last whole epoch, to the same weights.
    """
    torch.manual_seed(recipe.seed)
    rng = np.random.default_rng(recipe.seed)
    network = (start or Network(preset, recipe.scales)).to(device)
    network.dropout = recipe.dropout
    optimizer = torch.optim.AdamW(_groups(network, recipe))
    steps = recipe.epochs * -(-len(train.at_ms) // recipe.slates_per_batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, [recipe.learning_rate, recipe.table_rate], total_steps=steps, pct_start=0.1
    )
    best, figures = copy.deepcopy(network.state_dict()), []
    first = 0
    if partial is not None and (state := partial.load(rng)) is not None:
        first, best, figures = state["epoch"] + 1, state["best"], state["figures"]
        network.load_state_dict(state["network"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
    done = first * (steps // recipe.epochs)
    progress = tqdm(total=steps, initial=done, desc="train", leave=False, mininterval=1)
    for epoch in range(first, recipe.epochs):
        network.train()
        losses: list[Tensor] = []
        for batch, labels in _batches(train, recipe, rng):
            optimizer.zero_grad(set_to_none=True)
            loss = _loss(network, batch.to(device), labels.to(device), recipe)
            torch.autograd.backward(loss)
            losses.append(loss.detach())
            optimizer.step()
            _zero_padding(network)
            keep(network)
            schedule.step()
            progress.update()
        figures.append({"epoch": epoch, "loss": float(torch.stack(losses).mean())})
        if validation is not None:
            figures[-1] |= click_figures(network, validation).summary()
            progress.set_postfix({name: round(value, 4) for name, value in figures[-1].items()})
            leader = max(range(len(figures)), key=lambda at: _merit(figures[at]))
            if leader == epoch:
                best = copy.deepcopy(network.state_dict())
            elif epoch - leader >= recipe.patience:
                break
        if partial is not None:
            partial.save(
                rng=rng,
                epoch=epoch,
                best=best,
                figures=figures,
                network=network.state_dict(),
                optimizer=optimizer.state_dict(),
                schedule=schedule.state_dict(),
            )
    progress.close()
    if validation is not None:
        network.load_state_dict(best)
    return network.to("cpu").eval(), figures


def _merit(figures: dict[str, float]) -> float:
    """What the best epoch is chosen by."""
    return figures["ndcg10"] + figures["auc"]


def click_figures(network: Network, examples: Examples) -> SlateFigures:
    clicks = score(network, examples)[..., 0].numpy().astype(np.float64)
    return SlateFigures(clicks, examples.click.astype(np.float64), examples.tile_user)


def score(network: Network, examples: Examples, *, slates_per_batch: int = 512) -> Tensor:
    """Logits of all tiles [N, T, 2], without the position bias."""
    network.eval()
    device = network.free_rows.device
    parts = []
    slates = np.arange(len(examples.at_ms))
    with torch.inference_mode():
        for start in range(0, len(slates), slates_per_batch):
            batch, _ = take(examples, slates[start : start + slates_per_batch])
            parts.append(network(batch.to(device)).cpu())
    return torch.cat(parts)


def _groups(network: Network, recipe: Recipe) -> list[dict[str, object]]:
    """The embedding table learns at its own rate: most of its rows are rare."""
    rest = [value for value in network.parameters() if value is not network.free_rows]
    return [
        {"params": rest, "lr": recipe.learning_rate, "weight_decay": recipe.weight_decay},
        {
            "params": [network.free_rows],
            "lr": recipe.table_rate,
            "weight_decay": recipe.table_decay,
        },
    ]


def _zero_padding(network: Network) -> None:
    with torch.no_grad():
        network.free_rows[[start + PADDING_ROW for start in network.starts]] = 0.0


class Labels(NamedTuple):
    """What came of a batch's candidates [N, T]; NaN where padded."""

    click: Tensor
    long_dwell: Tensor
    position: Tensor

    def to(self, device: torch.device | str) -> Labels:
        return Labels(*(column.to(device) for column in self))


def take(examples: Examples, slates: Int64Array) -> tuple[Inputs, Labels]:
    """The batch of some slates, in their order."""
    first = np.searchsorted(examples.tile_user, slates, side="left")
    counts = np.searchsorted(examples.tile_user, slates, side="right") - first
    tiles = np.repeat(first - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
    users = np.repeat(np.arange(len(slates), dtype=np.int32), counts)
    by_slate = (examples.hist_ids, examples.hist_age, examples.hist_mask, examples.ctx_ids)
    arrays = (*(column[slates] for column in by_slate), examples.cand_ids[tiles], users)
    by_tile = (examples.click, examples.long_dwell, examples.position)
    return (
        Inputs(*map(torch.from_numpy, arrays)),
        Labels(*(torch.from_numpy(column[tiles]) for column in by_tile)),
    )


def _batches(
    examples: Examples, recipe: Recipe, rng: np.random.Generator
) -> Iterator[tuple[Inputs, Labels]]:
    order = rng.permutation(len(examples.at_ms))
    for start in range(0, len(order), recipe.slates_per_batch):
        batch, labels = take(examples, order[start : start + recipe.slates_per_batch])
        batch = lag(batch, recipe)
        yield (
            batch._replace(
                hist_ids=drop_ids(batch.hist_ids, recipe),
                cand_ids=drop_ids(batch.cand_ids, recipe),
            ),
            labels,
        )


def lag(batch: Inputs, recipe: Recipe) -> Inputs:
    """Histories without their newest 1 to `max_lag_events` events, for a share of the users."""
    users, length = batch.hist_age.shape
    hidden = torch.randint(1, recipe.max_lag_events + 1, (users, 1))
    hidden *= torch.rand(users, 1) < recipe.lag_share
    source = torch.arange(length) + hidden  # [B, L]
    gone = source >= length
    source = source.clamp(max=length - 1)
    columns = source.unsqueeze(-1).expand(-1, -1, batch.hist_ids.shape[-1])
    return batch._replace(
        hist_ids=batch.hist_ids.gather(1, columns).masked_fill(gone.unsqueeze(-1), PADDING_ROW),
        hist_age=batch.hist_age.gather(1, source).masked_fill(gone, 0),
        hist_mask=batch.hist_mask.gather(1, source).masked_fill(gone, MASKED),
    )


def drop_ids(ids: Tensor, recipe: Recipe) -> Tensor:
    """Some items' ids replaced by the unknown row; padding stays padding."""
    dropped = (torch.rand(ids.shape[:-1]) < recipe.id_dropout).unsqueeze(-1)
    items = ids[..., :ITEM_COLUMNS]
    items = torch.where(dropped & (items != PADDING_ROW), UNKNOWN_ROW, items)
    return torch.cat([items, ids[..., ITEM_COLUMNS:]], -1)


def _loss(network: Network, batch: Inputs, labels: Labels, recipe: Recipe) -> Tensor:
    logits = network(batch) + network.position[labels.position.clamp(max=MAX_POSITION - 1)]
    click, dwell = logits[..., 0], logits[..., 1]
    loss = recipe.dwell_loss * _cross_entropy(dwell, labels.long_dwell)
    if bool(labels.click.isnan().all()):  # from before the log, only dwells are known
        return loss
    loss = loss + _cross_entropy(click, labels.click)
    if recipe.pair_loss:
        wins = labels.click.eq(1).unsqueeze(-1) & labels.click.eq(0).unsqueeze(-2)  # [N, T, T]
        margins = click.unsqueeze(-1) - click.unsqueeze(-2)
        loss = loss - recipe.pair_loss * functional.logsigmoid(margins[wins]).mean()
    return loss


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    known = ~labels.isnan()
    return functional.binary_cross_entropy_with_logits(logits[known], labels[known])
