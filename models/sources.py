"""The logs that a command line can name, and how to train on each."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from models import kuairand, prepared, synthetic
from models.log import Log, LogFault
from models.network import Scales
from models.train import Recipe

RECIPES = {
    "synthetic": Recipe(epochs=4, pair_loss=0.3),
    "kuairand": Recipe(
        earlier_epochs=6,
        epochs=3,
        table_rate=1e-3,
        scales=Scales(items=0.05, words=0.05, curves=0.2),
        dropout=0.3,
        id_dropout=0.3,
        dwell_loss=1.0,
        pair_loss=0.3,
    ),
    "prepared": Recipe(epochs=4, dropout=0.2, id_dropout=0.2, pair_loss=0.3),
}
"""How they were chosen is told in the README."""
OWN: dict[tuple[str, str], dict[str, float]] = {
    ("kuairand", "base"): {"earlier_epochs": 3, "learning_rate": 5e-4, "table_rate": 5e-4},
}
"""Where a preset learns a log better in another way."""


def recipe(log: str, preset: str) -> Recipe:
    """How a preset is trained on a log."""
    return msgspec.structs.replace(RECIPES[log], **OWN.get((log, preset), {}))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What says which log is meant."""
    parser.add_argument("--log", choices=sorted(RECIPES), default="synthetic")
    parser.add_argument(
        "--data",
        type=Path,
        help="kuairand: the folder of its Parquet files; prepared: the folder prepare wrote",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--shoppers",
        type=int,
        default=synthetic.Size().shoppers,
        help="synthetic: how many to invent (default %(default)s)",
    )
    parser.add_argument(
        "--hold-out-days",
        type=int,
        default=0,
        help="kuairand: last days before the test to validate on, not train (default 0)",
    )


def open_log(options: argparse.Namespace) -> Log:
    """The log that the arguments name; raises LogFault."""
    if options.log == "synthetic":
        return synthetic.generate(options.seed, synthetic.Size(shoppers=options.shoppers))
    if options.data is None:
        files = "KuaiRand-Pure's Parquet files" if options.log == "kuairand" else "prepare's files"
        raise LogFault(f"--data is needed: the folder of {files}")
    if options.log == "prepared":
        return prepared.load(options.data)
    return kuairand.load(options.data, held_out_days=options.hold_out_days)
