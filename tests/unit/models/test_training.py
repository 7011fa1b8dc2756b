"""A small shop's planted preferences are found again, the same ones for the same seed."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from models.build import Checkpoint, EvaluatedSlates, report, train
from models.dataset import Examples
from models.evaluate import Report, without_history
from models.log import Log, LogFault
from models.network import Inputs
from models.partial import Partial
from models.presets import Preset
from models.synthetic import Size, generate
from models.train import Recipe, drop_ids, fit, lag, score, take
from service.bundle import OutputSpec
from service.encoding.history import MASKED
from service.encoding.rows import PADDING_ROW, UNKNOWN_ROW


@pytest.fixture(scope="module")
def figures(log: Log, checkpoint: Checkpoint, slates: EvaluatedSlates) -> Report:
    return report(log, checkpoint, slates, OutputSpec())


def test_the_planted_preference_is_found(figures: Report) -> None:
    network, popularity = figures["network"]["click"], figures["surface and item CTR"]["click"]
    assert network["ndcg10"].low > popularity["ndcg10"].high
    assert network["auc"].low > popularity["auc"].high
    assert popularity["ndcg10"].low > figures["random"]["click"]["ndcg10"].high


def test_it_is_the_history_that_shows_it(figures: Report) -> None:
    blind = figures["network without history"]["click"]
    assert figures["network"]["click"]["ndcg10"].low > blind["ndcg10"].high


def test_long_dwell_has_a_logit_of_its_own(figures: Report) -> None:
    assert figures["network"]["long_dwell"]["auc"].low > 0.6


def test_the_best_epoch_on_validation_slates_stands(checkpoint: Checkpoint) -> None:
    assert 1 <= len(checkpoint.epochs) <= checkpoint.recipe.epochs
    assert all(0.5 < epoch["auc"] < 1 for epoch in checkpoint.epochs)


def test_the_same_seed_trains_the_same_network(preset: Preset, slates: EvaluatedSlates) -> None:
    few = slates.encoded.slates(np.arange(len(slates.shown)) < 64)
    recipe = Recipe(epochs=1, slates_per_batch=16)
    first, second = (score(fit(preset, recipe, few, None)[0], few) for _ in range(2))
    other = score(fit(preset, msgspec.structs.replace(recipe, seed=2), few, None)[0], few)
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_an_interrupted_run_goes_on_to_the_same_weights(
    preset: Preset, slates: EvaluatedSlates, tmp_path: Path
) -> None:
    few = slates.encoded.slates(np.arange(len(slates.shown)) < 64)
    held_out = slates.encoded.slates(np.arange(len(slates.shown)) >= len(slates.shown) - 64)
    recipe = Recipe(epochs=3, slates_per_batch=16)
    whole, figures = fit(preset, recipe, few, held_out)
    path = tmp_path / "own.partial"

    class Interrupted(Partial):
        def save(self, **parts: Any) -> None:
            super().save(**parts)
            if parts["epoch"] == 1:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(preset, recipe, few, held_out, partial=Interrupted(path, "mine"))
    assert path.exists()
    assert Partial(path, "another's").load(np.random.default_rng(0)) is None
    resumed, told = fit(preset, recipe, few, held_out, partial=Partial(path, "mine"))
    assert told == figures
    assert torch.equal(score(resumed, few), score(whole, few))


def batch_of(examples: Examples) -> Inputs:
    inputs, _ = take(examples, np.arange(len(examples.at_ms)))
    return inputs


def test_a_lagging_history_is_the_older_part_of_the_whole_one(slates: EvaluatedSlates) -> None:
    batch = batch_of(slates.encoded)
    late = lag(batch, Recipe(lag_share=1.0, max_lag_events=1))
    assert torch.equal(late.hist_ids[:, :-1], batch.hist_ids[:, 1:])
    assert torch.equal(late.hist_age[:, :-1], batch.hist_age[:, 1:])
    assert (late.hist_mask[:, -1] == MASKED).all()
    assert (late.hist_ids[:, -1] == PADDING_ROW).all()
    assert torch.equal(late.cand_ids, batch.cand_ids)


def test_dropped_ids_become_unknown_and_padding_stays(slates: EvaluatedSlates) -> None:
    ids = batch_of(slates.encoded).cand_ids
    dropped = drop_ids(ids, Recipe(id_dropout=0.25))
    changed = (dropped != ids).any(-1)
    assert 0.2 < changed.sum() / (ids[..., 0] > UNKNOWN_ROW).sum() < 0.3
    assert (dropped[changed][:, :2] == UNKNOWN_ROW).all()
    assert torch.equal(dropped[..., 2:], ids[..., 2:])
    assert (dropped[ids == PADDING_ROW] == PADDING_ROW).all()


def test_without_history_nothing_of_it_is_left(slates: EvaluatedSlates) -> None:
    blind = without_history(slates.encoded)
    assert not blind.hist_ids.any()
    assert (blind.hist_mask == MASKED).all()
    assert (slates.encoded.hist_mask == 0).any()


def test_a_log_that_cannot_train_is_refused(log: Log, preset: Preset) -> None:
    late = msgspec.structs.replace(log, validate_from_ms=0)
    with pytest.raises(LogFault, match=r"impressions\.at_ms: nothing before the validation days"):
        train(late, preset, Recipe(epochs=1))
    with pytest.raises(LogFault, match="a shop needs 12 items"):
        generate(1, Size(items=3))


def test_a_file_that_is_no_checkpoint_is_refused(
    checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("checkpoints") / "tiny.pt"
    checkpoint.save(path)
    again = Checkpoint.load(path)
    assert again.recipe == checkpoint.recipe
    for name, value in checkpoint.network.state_dict().items():
        assert torch.equal(value, again.network.state_dict()[name])
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(LogFault, match=r"tiny\.pt is not a checkpoint"):
        Checkpoint.load(path)
