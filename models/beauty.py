"""Track B: purchase sequences without times, leave one out, ranked against all items.

A causal transformer retrieves the next item. It shares no weights with the ranking network and
is never served: it shows what the kind of history encoder used here reaches on a public set.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, cast

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

from models.log import LogFault
from service.domain import Int64Array

SEQUENCES = "sequences.txt"
LEAST_PURCHASES = 3
"""One to train on, one to validate on, one to test."""
TOP = 10
PADDING = 0
BOOTSTRAPS = 200


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """How to train the retrieval model."""

    loss: str = "full"
    """full: softmax over all items. sampled: over `negatives` uniform ones. pair: BCE with one."""
    seed: int = 1
    width: int = 128
    heads: int = 2
    layers: int = 2
    length: int = 50
    dropout: float = 0.5
    negatives: int = 512
    temperature: float = 0.07
    """Of cosine scores; 0 means plain dot products."""
    users_per_batch: int = 256
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    epochs: int = 60
    patience: int = 8
    """Epochs without a better validation NDCG@10 before training stops."""


RECIPES = {
    "full": Recipe(loss="full"),
    "sampled": Recipe(loss="sampled"),
    "pair": Recipe(loss="pair", temperature=0.0),
}


class Retrieval(nn.Module):
    """Scores of all items as the next one, from a sequence of items."""

    def __init__(self, items: int, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        width = recipe.width
        self.items = nn.Embedding(items + 1, width, padding_idx=PADDING)
        self.place = nn.Parameter(torch.randn(recipe.length, width) * 0.02)
        nn.init.normal_(self.items.weight, std=0.02)
        self.dropout = nn.Dropout(recipe.dropout)
        layer = nn.TransformerEncoderLayer(
            width,
            recipe.heads,
            dim_feedforward=4 * width,
            dropout=recipe.dropout,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.encoder = nn.TransformerEncoder(
            layer, recipe.layers, norm=nn.LayerNorm(width), enable_nested_tensor=False
        )
        causal = torch.full((recipe.length, recipe.length), float("-inf")).triu(1)
        self.causal: Tensor
        self.register_buffer("causal", causal, persistent=False)

    def forward(self, items: Tensor) -> Tensor:
        """States [users, L, D] after each of `items` [users, L], padded on the right."""
        x = self.dropout(self.items(items) * self.recipe.width**0.5 + self.place)
        return cast(Tensor, self.encoder(x, mask=self.causal, is_causal=True))

    def ready(self, rows: Tensor) -> Tensor:
        """States or embeddings, of unit length where scores are cosines."""
        if not self.recipe.temperature:
            return rows
        return functional.normalize(rows, dim=-1).div(self.recipe.temperature**0.5)

    def scores(self, states: Tensor) -> Tensor:
        """Scores [n, items + 1] of every item after `states` [n, D]."""
        return self.ready(states) @ self.ready(self.items.weight).mT


class Ranked(NamedTuple):
    """Each user's figures for the one item that was held out."""

    ndcg: NDArray[np.float64]  # [users]
    recall: NDArray[np.float64]  # [users]

    def interval(self, name: str, *, seed: int) -> str:
        """A metric's mean and its 95% interval over resampled users."""
        values = self._asdict()[name]
        rng = np.random.default_rng(seed)
        means = [
            values[rng.integers(len(values), size=len(values))].mean() for _ in range(BOOTSTRAPS)
        ]
        low, high = np.percentile(means, (2.5, 97.5))
        return f"{values.mean():.4f} ({low:.4f} to {high:.4f})"


def read_sequences(folder: Path) -> list[list[int]]:
    """Each user's items, oldest first; raises LogFault naming the file and line at fault."""
    path = folder / SEQUENCES
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LogFault(f"{path} cannot be read: {error}") from error
    sequences = []
    for number, line in enumerate(lines, 1):
        try:
            _user, *items = map(int, line.split())
        except ValueError as error:
            raise LogFault(f"{SEQUENCES}, line {number}: not a user and item numbers") from error
        if len(items) < LEAST_PURCHASES or min(items) <= PADDING:
            raise LogFault(f"{SEQUENCES}, line {number}: fewer than 3 items, or one below 1")
        sequences.append(items)
    if not sequences:
        raise LogFault(f"{path}: no rows")
    return sequences


def fit(
    sequences: list[list[int]], recipe: Recipe, *, device: str = "cpu"
) -> tuple[Retrieval, list[float]]:
    """Train on all but each user's last two items: the model, each epoch's validation NDCG@10.

    The epoch is chosen on the last item but one; the last item is never seen.
    """
    assert recipe.loss in RECIPES
    torch.manual_seed(recipe.seed)
    rng = np.random.default_rng(recipe.seed)
    model = Retrieval(max(map(max, sequences)), recipe).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), recipe.learning_rate, weight_decay=recipe.weight_decay
    )
    inputs = padded([items[:-3] for items in sequences], recipe.length)
    targets = padded([items[1:-2] for items in sequences], recipe.length)
    trained = np.flatnonzero(targets.any(1))
    best, figures = model.state_dict(), []
    progress = tqdm(range(recipe.epochs), desc=f"train, {recipe.loss}", leave=False)
    for epoch in progress:
        model.train()
        order = rng.permutation(trained)
        for start in range(0, len(order), recipe.users_per_batch):
            users = order[start : start + recipe.users_per_batch]
            optimizer.zero_grad(set_to_none=True)
            batch = (torch.from_numpy(rows[users]).to(device) for rows in (inputs, targets))
            torch.autograd.backward(_loss(model, *batch))
            optimizer.step()
        figures.append(float(rank(model, sequences, held_out=2).ndcg.mean()))
        progress.set_postfix(ndcg10=round(figures[-1], 4))
        leader = int(np.argmax(figures))
        if leader == epoch:
            best = {name: value.clone() for name, value in model.state_dict().items()}
        elif epoch - leader >= recipe.patience:
            break
    model.load_state_dict(best)
    return model.eval(), figures


def rank(model: Retrieval, sequences: list[list[int]], *, held_out: int) -> Ranked:
    """Figures of the item `held_out` from the end, given all before it.

    Ranked against all items but those that the user had before; ties count against it.
    """
    model.eval()
    length, device = model.recipe.length, model.place.device
    places = []
    with torch.inference_mode():
        for start in range(0, len(sequences), 512):
            some = sequences[start : start + 512]
            known = padded([items[:-held_out] for items in some], length)
            states = model(torch.from_numpy(known).to(device))
            last = torch.from_numpy((known > PADDING).sum(1) - 1).to(device)
            scores = model.scores(states[torch.arange(len(some), device=device), last])
            wanted = torch.tensor([[items[-held_out]] for items in some], device=device)
            target = scores.gather(1, wanted)
            had = [np.unique([PADDING, *items[:-held_out], items[-held_out]]) for items in some]
            rows = np.repeat(np.arange(len(some)), [len(items) for items in had])
            gone = torch.from_numpy(np.stack([rows, np.concatenate(had)])).to(device)
            scores[gone[0], gone[1]] = -torch.inf
            places.append((scores >= target).sum(1).cpu())
    place = torch.cat(places).numpy()
    hit = place < TOP
    return Ranked(np.where(hit, 1 / np.log2(place + 2), 0.0), hit.astype(np.float64))


def padded(sequences: list[list[int]], length: int) -> Int64Array:
    """The newest `length` items of each, padded on the right: [users, length]."""
    rows = np.full((len(sequences), length), PADDING, np.int64)
    for row, items in zip(rows, sequences, strict=True):
        newest = items[-length:]
        row[: len(newest)] = newest
    return rows


def _loss(model: Retrieval, inputs: Tensor, targets: Tensor) -> Tensor:
    recipe = model.recipe
    real = targets > PADDING
    states, wanted = model(inputs)[real], targets[real]  # [n, D], [n]
    if recipe.loss == "full":
        scores = model.scores(states)
        scores[:, PADDING] = -torch.inf
        return functional.cross_entropy(scores, wanted)
    count = recipe.negatives if recipe.loss == "sampled" else 1
    others = torch.randint(
        1, len(model.items.weight), (len(wanted), count), device=wanted.device
    )  # [n, negatives]
    chosen = model.ready(model.items(torch.cat([wanted.unsqueeze(1), others], 1)))
    scores = (chosen @ model.ready(states).unsqueeze(-1)).squeeze(-1)
    if recipe.loss == "sampled":
        chance = (others == wanted.unsqueeze(1)).nonzero(as_tuple=True)
        scores[chance[0], chance[1] + 1] = -torch.inf
        return functional.cross_entropy(scores, torch.zeros_like(wanted))
    labels = torch.zeros_like(scores)
    labels[:, 0] = 1.0
    return functional.binary_cross_entropy_with_logits(scores, labels)
