"""Training: binary cross-entropy of click and long dwell, with early stopping; seeded."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm

from models.dataset import Examples
from models.metrics import slate_report
from models.network import ITEM_COLUMNS, MAX_POSITION, Network, Preset
from service.domain import Int64Array
from service.encoding.history import MASKED
from service.encoding.rows import PADDING_ROW, UNKNOWN_ROW


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """How to train."""

    seed: int = 1
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
    dwell_loss: float = 0.5
    pair_loss: float = 0.0
    """Weight of the in-slate pairwise term (BPR) on clicks."""


def fit(
    preset: Preset, recipe: Recipe, train: Examples, validation: Examples
) -> tuple[Network, list[dict[str, float]]]:
    """The network of the best epoch by validation click GAUC, and each epoch's figures."""
    torch.manual_seed(recipe.seed)
    rng = np.random.default_rng(recipe.seed)
    network = Network(preset)
    optimizer = torch.optim.AdamW(_groups(network, recipe))
    steps = recipe.epochs * -(-len(train.at_ms) // recipe.slates_per_batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, [recipe.learning_rate, recipe.table_rate], total_steps=steps, pct_start=0.1
    )
    best, figures = copy.deepcopy(network.state_dict()), []
    progress = tqdm(total=steps, desc="train", leave=False, mininterval=1)
    for epoch in range(recipe.epochs):
        network.train()
        for batch in _batches(train, recipe, rng):
            optimizer.zero_grad(set_to_none=True)
            value = _loss(network, batch, recipe)
            value.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            _zero_padding(network)
            schedule.step()
            progress.update()
        report = slate_report(score(network, validation), validation)
        figures.append({"epoch": epoch, **report})
        progress.set_postfix(gauc=report["click_gauc"], auc=report["click_auc"])
        leader = max(range(len(figures)), key=lambda at: figures[at]["click_gauc"])
        if leader == epoch:
            best = copy.deepcopy(network.state_dict())
        elif epoch - leader >= recipe.patience:
            break
    progress.close()
    network.load_state_dict(best)
    return network.eval(), figures


def score(network: Network, examples: Examples, *, slates_per_batch: int = 512) -> Tensor:
    """Logits of all tiles [N, T, 2], without the position bias."""
    network.eval()
    parts = []
    with torch.inference_mode():
        for start in range(0, len(examples.at_ms), slates_per_batch):
            batch = take(
                examples, np.arange(start, min(start + slates_per_batch, len(examples.at_ms)))
            )
            parts.append(network(*batch[:6]))
    return torch.cat(parts)


def _groups(network: Network, recipe: Recipe) -> list[dict[str, object]]:
    """The embedding table learns at its own rate: most of its rows are rare."""
    rest = [value for value in network.parameters() if value is not network.table]
    return [
        {"params": rest, "lr": recipe.learning_rate, "weight_decay": recipe.weight_decay},
        {"params": [network.table], "lr": recipe.table_rate, "weight_decay": recipe.table_decay},
    ]


def _zero_padding(network: Network) -> None:
    with torch.no_grad():
        network.table[[start + PADDING_ROW for start in network.starts]] = 0.0


def take(examples: Examples, slates: Int64Array) -> list[Tensor]:
    """A batch's arrays in the order of the network's inputs, then click, long dwell, position."""
    first = np.searchsorted(examples.tile_user, slates, side="left")
    last = np.searchsorted(examples.tile_user, slates, side="right")
    counts = last - first
    tiles = np.concatenate([np.arange(a, b) for a, b in zip(first, last, strict=True)])
    users = np.repeat(np.arange(len(slates), dtype=np.int32), counts)
    arrays = (
        *(
            column[slates]
            for column in (
                examples.hist_ids,
                examples.hist_age,
                examples.hist_mask,
                examples.ctx_ids,
            )
        ),
        examples.cand_ids[tiles],
        users,
        examples.click[tiles],
        examples.long_dwell[tiles],
        examples.position[tiles],
    )
    return [torch.from_numpy(array) for array in arrays]


def _batches(
    examples: Examples, recipe: Recipe, rng: np.random.Generator
) -> Iterator[list[Tensor]]:
    order = rng.permutation(len(examples.at_ms))
    for start in range(0, len(order), recipe.slates_per_batch):
        batch = take(examples, order[start : start + recipe.slates_per_batch])
        hist_ids, hist_age, hist_mask = batch[:3]
        if recipe.lag_share:
            hist_ids, hist_age, hist_mask = _lag(hist_ids, hist_age, hist_mask, recipe)
        batch[:3] = _drop_ids(hist_ids, recipe), hist_age, hist_mask
        batch[4] = _drop_ids(batch[4], recipe)
        yield batch


def _lag(
    hist_ids: Tensor, hist_age: Tensor, hist_mask: Tensor, recipe: Recipe
) -> tuple[Tensor, Tensor, Tensor]:
    """Histories without their newest 1 to `max_lag_events` events, for a share of the users."""
    users, length = hist_age.shape
    hidden = torch.randint(1, recipe.max_lag_events + 1, (users, 1))
    hidden = hidden * (torch.rand(users, 1) < recipe.lag_share)
    source = torch.arange(length) + hidden  # [B, L]
    gone = source >= length
    source = source.clamp(max=length - 1)
    age = hist_age.gather(1, source).masked_fill(gone, PADDING_ROW)
    mask = hist_mask.gather(1, source).masked_fill(gone, MASKED)
    columns = source.unsqueeze(-1).expand(-1, -1, hist_ids.shape[-1])
    ids = hist_ids.gather(1, columns).masked_fill(gone.unsqueeze(-1), PADDING_ROW)
    return ids, age, mask


def _drop_ids(ids: Tensor, recipe: Recipe) -> Tensor:
    """Some items' ids replaced by the unknown row; padding stays padding."""
    dropped = (torch.rand(ids.shape[:-1]) < recipe.id_dropout).unsqueeze(-1)
    items = ids[..., :ITEM_COLUMNS]
    items = torch.where(dropped & (items != PADDING_ROW), UNKNOWN_ROW, items)
    return torch.cat([items, ids[..., ITEM_COLUMNS:]], -1)


def _loss(network: Network, batch: list[Tensor], recipe: Recipe) -> Tensor:
    *inputs, click, long_dwell, position = batch
    logits = network(*inputs) + network.position[position.clamp(max=MAX_POSITION - 1)]
    real = ~click.isnan()
    clicks, dwells = logits[..., 0], logits[..., 1]
    total = functional.binary_cross_entropy_with_logits(clicks[real], click[real])
    total = total + recipe.dwell_loss * functional.binary_cross_entropy_with_logits(
        dwells[real], long_dwell[real]
    )
    if recipe.pair_loss:
        wins = click.eq(1).unsqueeze(-1) & click.eq(0).unsqueeze(-2)  # [N, T, T]
        margins = clicks.unsqueeze(-1) - clicks.unsqueeze(-2)
        total = total - recipe.pair_loss * functional.logsigmoid(margins[wins]).mean()
    return total
