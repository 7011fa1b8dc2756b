"""The steps from a log to what a bundle is made of, and checkpoints between them."""

from __future__ import annotations

import hashlib
import pickle
from pathlib import Path
from typing import Any

import msgspec
import torch
from tqdm import tqdm

from models.dataset import Examples, Shown, Tables, encode_log, slates_before_test
from models.earlier import earlier_examples
from models.evaluate import Report, as_markdown, evaluate, plain_baselines
from models.leaks import check_no_leak
from models.log import Log, LogFault
from models.network import Network
from models.pack import Ingredients
from models.partial import Partial
from models.presets import Preset
from models.reference import reference_of
from models.replay import mixed_slates
from models.train import Recipe, fit, score
from service.bundle import BatchSpec, OutputSpec
from service.encoding.rows import RowSpace

MAX_USERS = 32
TILE_BUCKETS = (1, 2, 5, 10, 20, 40, 80, 160)


class Checkpoint(msgspec.Struct, frozen=True):
    """A trained network and how it came to be."""

    network: Network
    recipe: Recipe
    epochs: list[dict[str, float]]
    """Validation figures of each epoch."""
    log_sha256: str

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(
            {
                "preset": msgspec.to_builtins(self.network.preset),
                "recipe": msgspec.to_builtins(self.recipe),
                "epochs": self.epochs,
                "log_sha256": self.log_sha256,
                "weights": self.network.state_dict(),
            },
            path,
        )

    @classmethod
    def load(cls, path: Path) -> Checkpoint:
        """Read `save`; raises LogFault if the file is not a checkpoint."""
        try:
            saved: dict[str, Any] = torch.load(path, weights_only=True)
            network = Network(msgspec.convert(saved["preset"], Preset))
            network.load_state_dict(saved["weights"])
            recipe = msgspec.convert(saved["recipe"], Recipe)
            return cls(network.eval(), recipe, saved["epochs"], saved["log_sha256"])
        except (
            OSError,
            KeyError,
            RuntimeError,
            pickle.UnpicklingError,
            msgspec.ValidationError,
        ) as error:
            raise LogFault(f"{path} is not a checkpoint that can be read: {error}") from error


class EvaluatedSlates(msgspec.Struct, frozen=True):
    """The slates that figures are told of, as shown and as encoded."""

    shown: list[Shown]
    encoded: Examples


def train(
    log: Log, preset: Preset, recipe: Recipe, *, device: str = "cpu", resume: Path | None = None
) -> Checkpoint:
    """Train on slates before the validation days, or on all before the test if there are none.

    `resume` is the file from which an interrupted run goes on.
    """
    log.check()
    space = RowSpace(preset.input_spec())
    tables = Tables(log, space)
    examples = encode_log(log, space, slates_before_test(log), tables)
    held_out = examples.at_ms >= log.validate_from_ms
    if held_out.all():
        raise LogFault("impressions.at_ms: nothing before the validation days")
    validation = examples.slates(held_out) if held_out.any() else None
    digest = log.digest()
    before = partial = None  # what is kept of each of two runs, until both have ended
    if resume is not None:
        told = (log.validate_from_ms, log.test_from_ms, log.seeds, log.long_seed_ms, log.profiles)
        identity = msgspec.json.encode([preset, recipe, device, digest, told])
        sha256 = hashlib.sha256(identity).hexdigest()
        before = Partial(resume.with_suffix(f"{resume.suffix}-earlier"), sha256)
        partial = Partial(resume, sha256)
    start = None
    if recipe.earlier_epochs and (earlier := earlier_examples(log, space, tables)) is not None:
        first = msgspec.structs.replace(
            recipe, epochs=recipe.earlier_epochs, table_rate=recipe.earlier_table_rate
        )
        start, _ = fit(preset, first, earlier, None, device=device, partial=before)
    network, epochs = fit(
        preset,
        recipe,
        examples.slates(~held_out),
        validation,
        device=device,
        start=start,
        partial=partial,
    )
    for kept in (before, partial):
        if kept is not None:
            kept.forget()
    return Checkpoint(network, recipe, epochs, digest)


def choose_slates(log: Log, preset: Preset) -> EvaluatedSlates:
    """Slates of the test days with enough candidates, some clicked and some not."""
    shown = mixed_slates(log)
    if not shown:
        raise LogFault("impressions.at_ms: no slate of the test days can be evaluated")
    return EvaluatedSlates(shown, encode_log(log, RowSpace(preset.input_spec()), shown))


def report(log: Log, checkpoint: Checkpoint, slates: EvaluatedSlates, output: OutputSpec) -> Report:
    """Figures of the network and of plain baselines; printed as a table too."""
    network = checkpoint.network
    baselines = plain_baselines(
        log, slates.shown, network.preset.tile_width, seed=checkpoint.recipe.seed
    )
    figures = evaluate(network, slates.encoded, baselines, output, seed=checkpoint.recipe.seed)
    tqdm.write(f"{len(slates.shown)} test slates of {log.name}, 95% intervals over slates")
    tqdm.write(as_markdown(figures))
    return figures


def gather(log: Log, checkpoint: Checkpoint, *, command: str) -> Ingredients:
    """Evaluate, and gather what a bundle is made of."""
    preset = checkpoint.network.preset
    output = OutputSpec()
    space = RowSpace(preset.input_spec())
    slates = choose_slates(log, preset)
    check_no_leak(log, space, slates.shown)
    return Ingredients(
        log=log,
        network=checkpoint.network,
        table=Tables(log, space).of(log.test_from_ms),
        examples=slates.encoded,
        output=output,
        batch=BatchSpec(max_users=MAX_USERS, tile_buckets=TILE_BUCKETS),
        metrics={
            "test": msgspec.to_builtins(report(log, checkpoint, slates, output)),
            "validation_by_epoch": checkpoint.epochs,
            "reference": reference_of(
                score(checkpoint.network, slates.encoded).numpy(), slates.encoded, output
            ),
        },
        provenance={
            "command": command,
            "preset": msgspec.to_builtins(preset),
            "recipe": msgspec.to_builtins(checkpoint.recipe),
            "log": log.name,
            "log_sha256": checkpoint.log_sha256,
            "torch": str(torch.__version__),
        },
    )
