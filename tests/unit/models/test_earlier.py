"""What users did before the log, as slates: labels, histories, and nothing that tells them."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from models import build
from models.dataset import Tables
from models.earlier import LEAST_HISTORY, MOST_SLATES, SHOWN, earlier_examples
from models.log import Log
from models.partial import Partial
from models.presets import PRESETS
from models.synthetic import Size, generate
from models.train import Recipe, fit, score
from service.domain import Signal
from service.encoding.items import CTR
from service.encoding.rows import UNKNOWN_ROW, RowSpace

TINY = PRESETS["tiny"]
SPACE = RowSpace(TINY.input_spec())
LONG_MS = 30_000


def _log(seeds: dict[str, tuple[Signal, ...]]) -> Log:
    log = generate(1, Size(shoppers=60))
    return msgspec.structs.replace(log, seeds=seeds, long_seed_ms=LONG_MS)


def _signals(log: Log, count: int, *, long: int = 2) -> tuple[Signal, ...]:
    """Newest first, an hour apart, every `long`-th one long."""
    ids = log.items["id"].to_list()
    newest_ms = log.impressions["at_ms"][0] - 3_600_000
    return tuple(
        Signal(ids[at], "dwell", newest_ms - at * 3_600_000, LONG_MS if at % long == 0 else 1_000)
        for at in range(count)
    )


@pytest.fixture(scope="module")
def base() -> Log:
    return generate(1, Size(shoppers=60))


def test_a_long_history_becomes_slates_of_its_newest_signals(base: Log) -> None:
    log = _log({"u1": _signals(base, 50), "u2": _signals(base, SHOWN + LEAST_HISTORY - 1)})
    examples = earlier_examples(log, SPACE, Tables(log, SPACE))
    assert examples is not None
    assert len(examples.at_ms) == MOST_SLATES, "a user with too short a history has none"
    known = ~np.isnan(examples.long_dwell)
    assert known.sum() == MOST_SLATES * SHOWN
    assert np.nanmean(examples.long_dwell) == pytest.approx(0.5)
    assert np.isnan(examples.click).all()
    assert (np.diff(examples.at_ms) > 0).all()
    kept = (examples.hist_mask == 0).sum(axis=1)
    assert kept.tolist() == [10, 20, 30, 31], "what is older than the slate, at most the network's"


def test_the_rate_that_was_counted_from_the_labels_is_hidden(base: Log) -> None:
    log = _log({"u1": _signals(base, 50)})
    examples = earlier_examples(log, SPACE, Tables(log, SPACE))
    assert examples is not None
    real = ~np.isnan(examples.long_dwell)
    assert (examples.cand_ids[real][:, CTR] == UNKNOWN_ROW).all()
    assert (examples.cand_ids[~real] == 0).all()


def test_seeds_that_are_no_labels_give_none(base: Log) -> None:
    log = msgspec.structs.replace(_log({"u1": _signals(base, 50)}), long_seed_ms=None)
    assert earlier_examples(log, SPACE, Tables(log, SPACE)) is None


def test_long_dwells_are_learnt_from_them_alone(base: Log) -> None:
    """Users dwell on one of two categories: the network finds out which, without a click."""
    categories = dict(base.items.select("id", "category").iter_rows())
    liked, other = sorted(set(categories.values()))[:2]
    ids = {word: [item for item, of in categories.items() if of == word] for word in (liked, other)}
    rng = np.random.default_rng(3)
    seeds = {}
    for number in range(120):
        words = rng.choice([liked, other], 50)
        mine = (liked, other)[number % 2]
        seeds[f"u{number}"] = tuple(
            Signal(
                str(rng.choice(ids[word])),
                "dwell",
                int(base.impressions["at_ms"][0]) - (at + 1) * 3_600_000,
                LONG_MS if word == mine else 1_000,
            )
            for at, word in enumerate(words)
        )
    log = _log(seeds)
    examples = earlier_examples(log, SPACE, Tables(log, SPACE))
    assert examples is not None
    network, figures = fit(TINY, Recipe(epochs=6, dwell_loss=1.0), examples, None)
    logits = score(network, examples)[..., 1].numpy()
    known = ~np.isnan(examples.long_dwell)
    long = examples.long_dwell[known] == 1
    assert figures[-1]["loss"] < 0.6
    assert (logits[known][long].mean() - logits[known][~long].mean()) > 1.0


@pytest.mark.parametrize("part", [".partial-earlier", ".partial"])
def test_an_interrupted_run_learns_nothing_again(
    base: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    log = _log({f"u{number}": _signals(base, 30, long=2 + number % 2) for number in range(20)})
    recipe = Recipe(epochs=2, earlier_epochs=2)
    whole = build.train(log, TINY, recipe).network
    without = build.train(log, TINY, Recipe(epochs=2)).network
    assert not torch.equal(whole.free_rows, without.free_rows)
    real, saved, left = Partial.save, list[str](), [part]

    def save(partial: Partial, **parts: Any) -> None:
        if left == [partial._path.suffix] and saved:
            left.clear()
            saved.clear()
            raise KeyboardInterrupt
        real(partial, **parts)
        saved.append(partial._path.suffix)

    monkeypatch.setattr(Partial, "save", save)
    file = tmp_path / "own.partial"
    with pytest.raises(KeyboardInterrupt):
        build.train(log, TINY, recipe, resume=file)
    resumed = build.train(log, TINY, recipe, resume=file).network
    again = {".partial-earlier": 1, ".partial": 0}  # epochs that had not been kept
    assert saved.count(".partial-earlier") == again[part]
    assert torch.equal(resumed.free_rows, whole.free_rows)
    assert list(tmp_path.iterdir()) == []
