"""`python -m models build`: from a click log to a bundle that serves."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from models.build import build
from models.network import PRESETS
from models.synthetic import generate
from models.train import Recipe


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m models", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    builder = commands.add_parser("build", help="train on a log and write a bundle")
    builder.add_argument("--log", choices=["synthetic"], default="synthetic")
    builder.add_argument("--preset", choices=sorted(PRESETS), default="tiny")
    builder.add_argument("--seed", type=int, default=1)
    builder.add_argument("--out", type=Path, required=True, help="the store's folder")
    options = parser.parse_args(arguments)
    bundle = build(
        generate(options.seed),
        PRESETS[options.preset],
        Recipe(seed=options.seed),
        options.out,
        command=shlex.join(["python", "-m", "models", *arguments]),
    )
    print(bundle.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
