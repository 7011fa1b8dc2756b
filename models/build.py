"""From a log to a bundle: encode, train, evaluate, pack."""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch
from tqdm import tqdm

from models.dataset import Examples, Tables, encode_log, shown_slates
from models.log import Log
from models.metrics import slate_report
from models.network import Preset
from models.pack import Ingredients, pack
from models.reference import reference_of
from models.train import Recipe, fit, score
from service.bundle import BatchSpec, Bundle, OutputSpec
from service.encoding.rows import RowSpace

MAX_USERS = 32
TILE_BUCKETS = (1, 2, 5, 10, 20, 40, 80, 160)


class Splits(msgspec.Struct, frozen=True):
    """Encoded slates by time."""

    train: Examples
    validation: Examples
    test: Examples


def encode(log: Log, preset: Preset) -> Splits:
    log.check()
    every = encode_log(log, RowSpace(preset.input_spec()), shown_slates(log.impressions))
    return Splits(
        every.slates(every.at_ms < log.validate_from_ms),
        every.slates((every.at_ms >= log.validate_from_ms) & (every.at_ms < log.test_from_ms)),
        every.slates(every.at_ms >= log.test_from_ms),
    )


def build(
    log: Log, preset: Preset, recipe: Recipe, store: Path, *, command: str, version: str = ""
) -> Bundle:
    """Every step; prints the figures of the test slates."""
    splits = encode(log, preset)
    network, epochs = fit(preset, recipe, splits.train, splits.validation)
    logits = score(network, splits.test)
    metrics = slate_report(logits, splits.test)
    for name, value in metrics.items():
        tqdm.write(f"test {name} {value:.4f}")
    output = OutputSpec(click_weight=1.0, dwell_weight=0.0)
    parts = Ingredients(
        name=log.name,
        log=log,
        network=network,
        table=Tables(log, RowSpace(preset.input_spec())).of(log.test_from_ms),
        examples=splits.test,
        output=output,
        batch=BatchSpec(max_users=MAX_USERS, tile_buckets=TILE_BUCKETS),
        metrics={
            "test": metrics,
            "validation": epochs,
            "reference": reference_of(logits.numpy(), splits.test, output),
        },
        provenance={
            "command": command,
            "recipe": msgspec.to_builtins(recipe),
            "preset": msgspec.to_builtins(preset),
            "torch": str(torch.__version__),
            "log_sha256": log.digest(),
        },
    )
    return pack(parts, store, version=version)
