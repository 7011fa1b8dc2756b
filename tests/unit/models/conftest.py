"""A small invented shop with strong intents, and a network trained on it."""

from __future__ import annotations

import msgspec
import pytest
import torch

from models.build import Checkpoint, EvaluatedSlates, choose_slates, train
from models.compress import Subject, compress
from models.log import Log
from models.presets import PRESETS, Preset
from models.synthetic import Size, generate
from models.train import Recipe
from models.variants import KINDS, Made

SMALL = Size(items=200, shoppers=220, days=16, intent=5.0)
QUICK = Recipe(epochs=3, slates_per_batch=32)


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def log() -> Log:
    return generate(3, SMALL)


@pytest.fixture(scope="session")
def preset() -> Preset:
    return msgspec.structs.replace(PRESETS["tiny"], item1_rows=1_024, item2_rows=512)


@pytest.fixture(scope="session")
def checkpoint(log: Log, preset: Preset) -> Checkpoint:
    return train(log, preset, QUICK)


@pytest.fixture(scope="session")
def slates(log: Log, preset: Preset) -> EvaluatedSlates:
    return choose_slates(log, preset)


@pytest.fixture(scope="session")
def made(log: Log, checkpoint: Checkpoint, slates: EvaluatedSlates) -> Made:
    return compress(log, Subject.of_checkpoint(checkpoint), slates.encoded, tuple(KINDS))
