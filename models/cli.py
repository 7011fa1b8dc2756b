"""The commands of `python -m models`: from a click log to a bundle that serves."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

import msgspec
import torch

from models import beauty, prune, sources, speed
from models.build import Checkpoint, choose_slates, gather, report, train
from models.compress import Subject, compress, test_slates, with_variants, write_variants
from models.export import to_onnx
from models.export_split import to_pair
from models.log import Log
from models.mapping import read_mapping
from models.network import Network
from models.pack import pack
from models.plan import PRECISIONS, SMS, build_plans
from models.prepare import prepare
from models.presets import PRESETS
from models.report import write_report
from models.train import DEVICES, device_named
from models.tune import TUNE_S
from models.variants import KINDS
from service.bundle import Bundle, OutputSpec
from service.errors import RankerError


def main(arguments: list[str]) -> int:
    """Run one command; 0 if it did what was asked."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options, shlex.join(["python", "-m", "models", *arguments]))
    except RankerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _prepare(options: argparse.Namespace, _command: str) -> None:
    files = {"impressions": options.impressions}
    for name in ("items", "histories", "users"):
        if paths := getattr(options, name):
            files[name] = paths
    summary = prepare(read_mapping(options.mapping), files, options.out)
    for name, count in summary.counts.items():
        print(f"{name.replace('_', ' '):16} {count:>12,}")
    for warning in summary.warnings:
        print(f"warning: {warning}")
    print(options.out)


def _train(options: argparse.Namespace, _command: str) -> None:
    resume = options.checkpoint.with_suffix(".partial")
    checkpoint = _trained(options, sources.open_log(options), resume)
    checkpoint.save(options.checkpoint)
    for figures in checkpoint.epochs:
        print(" ".join(f"{name} {value:.4g}" for name, value in figures.items()))
    print(options.checkpoint)


def _trained(options: argparse.Namespace, log: Log, resume: Path | None = None) -> Checkpoint:
    recipe = sources.recipe(options.log, options.preset)
    recipe = msgspec.structs.replace(recipe, seed=options.seed)
    if options.epochs is not None:
        recipe = msgspec.structs.replace(recipe, epochs=options.epochs)
    device = device_named(options.device)
    return train(log, PRESETS[options.preset], recipe, device=device, resume=resume)


def _evaluate(options: argparse.Namespace, _command: str) -> None:
    log, checkpoint = sources.open_log(options), Checkpoint.load(options.checkpoint)
    slates = choose_slates(log, checkpoint.network.preset)
    report(log, checkpoint, slates, OutputSpec())


def _export(options: argparse.Namespace, _command: str) -> None:
    network = Checkpoint.load(options.checkpoint).network
    if options.split:
        for path, graph in zip(
            (options.out.with_suffix(".encode.onnx"), options.out.with_suffix(".score.onnx")),
            to_pair(network),
            strict=True,
        ):
            path.write_bytes(graph)
            print(path)
        return
    options.out.write_bytes(to_onnx(network))
    print(options.out)


def _quantize(options: argparse.Namespace, _command: str) -> None:
    log, subject = sources.open_log(options), _subject(options)
    made = compress(log, subject, test_slates(log, subject.spec), options.variants)
    write_variants(made, options.out)
    print(options.out)
    made.check()


def _subject(options: argparse.Namespace) -> Subject:
    if options.bundle is not None:
        return Subject.of_bundle(options.bundle)
    return Subject.of_checkpoint(Checkpoint.load(options.checkpoint))


def _report(options: argparse.Namespace, command: str) -> None:
    log, checkpoint = sources.open_log(options), Checkpoint.load(options.checkpoint)
    print(write_report(log, checkpoint, options.out, command=command, mlflow=options.mlflow))


def _speed(options: argparse.Namespace, _command: str) -> None:
    if options.checkpoint is not None:
        network = Checkpoint.load(options.checkpoint).network
    else:
        torch.manual_seed(1)
        network = Network(PRESETS[options.preset]).eval()
    print(speed.as_table(speed.race(network, each_s=options.seconds)))


def _prune(options: argparse.Namespace, _command: str) -> None:
    log, checkpoint = sources.open_log(options), Checkpoint.load(options.checkpoint)
    device = device_named(options.device)
    outcomes = prune.run(log, checkpoint, epochs=options.epochs or 1, device=device)
    print(prune.as_markdown(outcomes))


def _plan(options: argparse.Namespace, _command: str) -> None:
    bundle = Bundle.open(options.bundle)
    for built in build_plans(bundle, options.sm, options.out, precisions=options.precision):
        print(built)


def _pack(options: argparse.Namespace, command: str) -> None:
    _write(options, sources.open_log(options), Checkpoint.load(options.checkpoint), command)


def _build(options: argparse.Namespace, command: str) -> None:
    log = sources.open_log(options)
    _write(options, log, _trained(options, log), command)


def _write(options: argparse.Namespace, log: Log, checkpoint: Checkpoint, command: str) -> None:
    parts = gather(log, checkpoint, command=command)
    if options.variants:
        subject = Subject.of_checkpoint(checkpoint)
        parts = with_variants(parts, compress(log, subject, parts.examples, options.variants))
    print(pack(parts, options.out, version=options.version, tune_s=options.tune).folder)


def _beauty(options: argparse.Namespace, _command: str) -> None:
    sequences = beauty.read_sequences(options.data)
    recipe = msgspec.structs.replace(beauty.RECIPES[options.loss], seed=options.seed)
    if options.epochs is not None:
        recipe = msgspec.structs.replace(recipe, epochs=options.epochs)
    model, figures = beauty.fit(sequences, recipe, device=device_named(options.device))
    test = beauty.rank(model, sequences, held_out=1)
    for epoch, figure in enumerate(figures):
        print(f"epoch {epoch} validation ndcg10 {figure:.4f}")
    print(f"{len(sequences)} users, loss {recipe.loss}, the best epoch's model:")
    for name, label in (("ndcg", "NDCG@10"), ("recall", "recall@10")):
        print(f"test {label} {test.interval(name, seed=options.seed)}")


def _parser() -> argparse.ArgumentParser:
    source = argparse.ArgumentParser(add_help=False)
    sources.add_arguments(source)
    machine = argparse.ArgumentParser(add_help=False)
    machine.add_argument(
        "--device", choices=DEVICES, default="auto", help="auto: cuda where there is one"
    )
    machine.add_argument("--epochs", type=int, help="at most; default: the recipe's own")
    training = argparse.ArgumentParser(add_help=False, parents=[machine])
    training.add_argument("--preset", choices=sorted(PRESETS), default="tiny")
    checkpoint = argparse.ArgumentParser(add_help=False)
    checkpoint.add_argument("--checkpoint", type=Path, required=True)
    store = argparse.ArgumentParser(add_help=False)
    store.add_argument("--out", type=Path, required=True, help="the store's folder")
    store.add_argument("--version", default="", help="default: a day and a digest of the content")
    _add_variants(store, default=())
    store.add_argument(
        "--tune",
        metavar="SECONDS",
        type=_positive,
        nargs="?",
        const=TUNE_S,
        help="time each graph, engine and number of threads on this CPU "
        f"(for SECONDS each, {TUNE_S:g} if not told), and serve the best one on CPUs like it",
    )
    sequences = argparse.ArgumentParser(add_help=False, parents=[machine])
    sequences.add_argument("--data", type=Path, required=True, help="folder of sequences.txt")
    sequences.add_argument("--loss", choices=sorted(beauty.RECIPES), default="full")
    sequences.add_argument("--seed", type=int, default=1)
    files = argparse.ArgumentParser(add_help=False)
    files.add_argument(
        "impressions", type=Path, nargs="+", help="files or folders: Parquet, CSV or JSON lines"
    )
    for name in ("items", "histories", "users"):
        files.add_argument(f"--{name}", type=Path, nargs="+", help=f"files of {name}")
    files.add_argument("--mapping", type=Path, required=True, help="TOML: what each column means")
    files.add_argument("--out", type=Path, required=True, help="an empty folder")
    graph = argparse.ArgumentParser(add_help=False)
    graph.add_argument("--out", type=Path, required=True, help="the ONNX file")
    graph.add_argument(
        "--split", action="store_true", help="two files: OUT.encode.onnx and OUT.score.onnx"
    )
    trained = argparse.ArgumentParser(add_help=False)
    origin = trained.add_mutually_exclusive_group(required=True)
    origin.add_argument("--checkpoint", type=Path)
    origin.add_argument("--bundle", type=Path, help="the folder of a packed version")
    variants = argparse.ArgumentParser(add_help=False)
    variants.add_argument("--out", type=Path, required=True, help="the folder of the graphs")
    _add_variants(variants, default=tuple(KINDS))
    page = argparse.ArgumentParser(add_help=False)
    page.add_argument("--out", type=Path, required=True, help="the page's folder")
    page.add_argument(
        "--mlflow",
        metavar="URI",
        default="",
        help="also keep the run there: a tracking server, or sqlite:///runs.db",
    )
    plans = argparse.ArgumentParser(add_help=False)
    plans.add_argument("--bundle", type=Path, required=True, help="the folder of a packed version")
    plans.add_argument("--out", type=Path, required=True, help="the cache's folder")
    plans.add_argument(
        "--sm", type=_listed, default=SMS, help="compute capabilities (default 8.0,8.6,8.9,12.0)"
    )
    plans.add_argument(
        "--precision", type=_listed, default=PRECISIONS, help="default: fp16,int8,fp8"
    )

    racing = argparse.ArgumentParser(add_help=False)
    subject = racing.add_mutually_exclusive_group()
    subject.add_argument("--preset", choices=sorted(PRESETS), default="base", help="random weights")
    subject.add_argument("--checkpoint", type=Path)
    racing.add_argument(
        "--seconds",
        type=_positive,
        default=speed.EACH_S,
        help=f"for each engine and number of users (default {speed.EACH_S:g})",
    )

    parser = argparse.ArgumentParser(prog="python -m models", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for run, parents, summary in (
        (_build, [source, training, store], "every step: train, evaluate, write a bundle"),
        (_prepare, [files], "make a log of a click log of your own"),
        (
            _train,
            [source, training, checkpoint],
            "train and write a checkpoint; goes on where it was interrupted",
        ),
        (_evaluate, [source, checkpoint], "compare a checkpoint with plain baselines"),
        (_pack, [source, checkpoint, store], "evaluate a checkpoint and write a bundle"),
        (_export, [checkpoint, graph], "write the ONNX file alone"),
        (_quantize, [source, trained, variants], "write smaller graphs, and judge each"),
        (_report, [source, checkpoint, page], "write a page with plots on a checkpoint"),
        (_speed, [racing], "time every engine and graph on this CPU, against one baseline"),
        (_prune, [source, checkpoint, machine], "try what pruning gives, and judge it"),
        (_plan, [plans], "build TensorRT's engine plans; for RTX no GPU is needed"),
        (_beauty, [sequences], "purchase sequences: train a retrieval model, rank all items"),
    ):
        command = commands.add_parser(
            run.__name__[1:], parents=parents, help=summary, description=summary
        )
        command.set_defaults(run=run)
    return parser


def _add_variants(parser: argparse.ArgumentParser, *, default: tuple[str, ...]) -> None:
    parser.add_argument(
        "--variants",
        type=_known_variants,
        default=default,
        help=f"of {', '.join(KINDS)}, or all (default: {', '.join(default) or 'none'})",
    )


def _known_variants(text: str) -> tuple[str, ...]:
    names = tuple(KINDS) if text == "all" else _listed(text)
    if unknown := set(names) - set(KINDS):
        raise argparse.ArgumentTypeError(f"no variant {', '.join(sorted(unknown))}")
    return names


def _positive(text: str) -> float:
    if not (number := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def _listed(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word)
