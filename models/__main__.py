"""`python -m models`: from a click log to a bundle that serves."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

import msgspec

from models import kuairand, synthetic
from models.build import Checkpoint, choose_slates, gather, report, train
from models.export import to_onnx
from models.log import Log, LogFault
from models.network import Scales
from models.pack import pack
from models.presets import PRESETS
from models.train import Recipe
from service.bundle import OutputSpec
from service.errors import RankerError

RECIPES = {
    "synthetic": Recipe(),
    "kuairand": Recipe(
        epochs=3,
        table_rate=1e-3,
        scales=Scales(items=0.05, words=0.05, curves=0.2),
        dropout=0.3,
        id_dropout=0.3,
        pair_loss=0.3,
    ),
}
"""Chosen on validation slates."""


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    command = shlex.join(["python", "-m", "models", *arguments])
    try:
        if options.command == "export":
            options.out.write_bytes(to_onnx(Checkpoint.load(options.checkpoint).network))
            print(options.out)
            return 0
        log = _open(options)
        if options.command == "evaluate":
            checkpoint = Checkpoint.load(options.checkpoint)
            slates = choose_slates(log, checkpoint.network.preset)
            report(log, checkpoint, slates, OutputSpec())
        elif options.command == "train":
            checkpoint = _train(options, log)
            checkpoint.save(options.checkpoint)
            for figures in checkpoint.epochs:
                print(" ".join(f"{name} {value:.4g}" for name, value in figures.items()))
            print(options.checkpoint)
        else:
            packing = options.command == "pack"
            checkpoint = Checkpoint.load(options.checkpoint) if packing else _train(options, log)
            parts = gather(log, checkpoint, command=command)
            bundle = pack(parts, options.out, version=options.version)
            print(bundle.folder)
    except RankerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    source = argparse.ArgumentParser(add_help=False)
    source.add_argument("--log", choices=sorted(RECIPES), default="synthetic")
    source.add_argument("--data", type=Path, help="kuairand: the folder of its Parquet files")
    source.add_argument(
        "--hold-out-days", type=int, default=0, help="kuairand: days to validate on, not train"
    )
    source.add_argument("--seed", type=int, default=1)
    source.add_argument(
        "--shoppers",
        type=int,
        default=synthetic.Size().shoppers,
        help="synthetic: how many to invent",
    )
    training = argparse.ArgumentParser(add_help=False)
    training.add_argument("--preset", choices=sorted(PRESETS), default="tiny")
    training.add_argument("--epochs", type=int, help="at most; default: the log's own")
    checkpoint = argparse.ArgumentParser(add_help=False)
    checkpoint.add_argument("--checkpoint", type=Path, required=True)
    store = argparse.ArgumentParser(add_help=False)
    store.add_argument("--out", type=Path, required=True, help="the store's folder")
    store.add_argument("--version", default="", help="default: a day and a digest of the content")

    parser = argparse.ArgumentParser(prog="python -m models", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "build",
        parents=[source, training, store],
        help="every step: train, evaluate, write a bundle",
    )
    commands.add_parser(
        "train", parents=[source, training, checkpoint], help="train and write a checkpoint"
    )
    commands.add_parser(
        "evaluate", parents=[source, checkpoint], help="compare a checkpoint with plain baselines"
    )
    commands.add_parser(
        "pack", parents=[source, checkpoint, store], help="evaluate a checkpoint and write a bundle"
    )
    exporter = commands.add_parser("export", parents=[checkpoint], help="write the ONNX file alone")
    exporter.add_argument("--out", type=Path, required=True, help="the ONNX file")
    return parser


def _open(options: argparse.Namespace) -> Log:
    if options.log == "synthetic":
        return synthetic.generate(options.seed, synthetic.Size(shoppers=options.shoppers))
    if options.data is None:
        raise LogFault("--data is needed: the folder of KuaiRand-Pure's Parquet files")
    return kuairand.load(options.data, held_out_days=options.hold_out_days)


def _train(options: argparse.Namespace, log: Log) -> Checkpoint:
    recipe = msgspec.structs.replace(RECIPES[options.log], seed=options.seed)
    if options.epochs is not None:
        recipe = msgspec.structs.replace(recipe, epochs=options.epochs)
    return train(log, PRESETS[options.preset], recipe)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
