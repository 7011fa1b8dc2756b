"""The retrieval model learns planted sequences, with figures known by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from models import beauty
from models.log import LogFault
from models.train import device_named

ITEMS = 40
CHANCE = 10 / ITEMS


@pytest.fixture(scope="module")
def sequences() -> list[list[int]]:
    """Shoppers who buy the items in their order around a ring, each from a start of their own."""
    starts = np.random.default_rng(0).integers(ITEMS, size=300)
    return [[int(start + step) % ITEMS + 1 for step in range(6)] for start in starts]


def recipe(loss: str) -> beauty.Recipe:
    return beauty.Recipe(
        loss=loss,
        width=16,
        length=8,
        dropout=0.1,
        negatives=8,
        temperature=beauty.RECIPES[loss].temperature,
        users_per_batch=64,
        learning_rate=1e-2,
        epochs=8,
    )


@pytest.mark.parametrize("loss", sorted(beauty.RECIPES))
def test_every_loss_learns_what_comes_next(loss: str, sequences: list[list[int]]) -> None:
    model, figures = beauty.fit(sequences, recipe(loss))
    test = beauty.rank(model, sequences, held_out=1)
    assert figures[0] < max(figures)
    assert test.recall.mean() > 2 * CHANCE
    assert test.ndcg.mean() > 0.7


def test_the_same_seed_gives_the_same_model(sequences: list[list[int]]) -> None:
    brief = beauty.Recipe(width=16, length=8, epochs=1)
    one, other = (beauty.fit(sequences, brief)[0].state_dict() for _ in range(2))
    for name, value in one.items():
        assert torch.equal(value, other[name])


def test_the_last_item_is_never_trained_on(sequences: list[list[int]]) -> None:
    """Another last item changes nothing of the model, nor of the epoch's choice."""
    brief = beauty.Recipe(width=16, length=8, epochs=2)
    swapped = [[*items[:-1], 1 + items[-1] % ITEMS] for items in sequences]
    one, figures = beauty.fit(sequences, brief)
    other, figures_swapped = beauty.fit(swapped, brief)
    assert figures == figures_swapped
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name])


class Fixed(beauty.Retrieval):
    """Item 1 scores best, then 2, and so on, whatever came before."""

    def scores(self, states: torch.Tensor) -> torch.Tensor:
        return -torch.arange(len(self.items.weight)).float().repeat(len(states), 1)


@pytest.mark.parametrize(
    ("items", "ndcg", "recall"),
    [
        ([5, 6, 1], 1.0, 1.0),
        ([1, 2, 3], 1.0, 1.0),  # items had before make way
        ([5, 6, 3], 1 / np.log2(4), 1.0),
        ([5, 6, 12], 1 / np.log2(11), 1.0),
        ([5, 6, 13], 0.0, 0.0),
    ],
)
def test_an_item_is_ranked_among_all_new_ones(items: list[int], ndcg: float, recall: float) -> None:
    model = Fixed(20, beauty.Recipe(width=4, length=4))
    ranked = beauty.rank(model, [items], held_out=1)
    assert ranked.ndcg == pytest.approx([ndcg])
    assert ranked.recall == pytest.approx([recall])


def test_long_sequences_keep_their_newest() -> None:
    assert beauty.padded([[1, 2, 3], [4]], 2).tolist() == [[2, 3], [4, 0]]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "no rows"),
        ("1 2 3 4\n1 2 x 3\n", "line 2: not a user and item numbers"),
        ("1 2 3\n", "line 1: fewer than 3 items"),
        ("1 2 0 3\n", "line 1: fewer than 3 items, or one below 1"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / beauty.SEQUENCES).write_text(content)
    with pytest.raises(LogFault, match=said):
        beauty.read_sequences(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(LogFault, match=r"sequences\.txt cannot be read"):
        beauty.read_sequences(tmp_path)


def test_auto_is_a_device_that_is_there() -> None:
    assert device_named("auto") == ("cuda" if torch.cuda.is_available() else "cpu")
    assert device_named("cpu") == "cpu"
