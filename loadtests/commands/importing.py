"""Make a trace of what others recorded: nginx logs, GoReplay, HAR, Mooncake JSON lines."""

from __future__ import annotations

import argparse
from pathlib import Path

from loadtests.traces import importers, trace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("format", choices=sorted(importers.SOURCES))
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--as-rankings", type=int, metavar="SLATE", help="rankings of so many items instead"
    )
    parser.add_argument("--tokens-per-item", type=int, default=100, help="mooncake: slate size")


def run(args: argparse.Namespace) -> int:
    options = {"tokens_per_item": args.tokens_per_item} if args.format == "mooncake" else {}
    records = importers.read(args.format, args.source, **options)
    if args.as_rankings:
        records = importers.as_rankings(records, slate=args.as_rankings)
    count = trace.write(args.out, trace.in_order(records))
    print(f"{args.out}: {count} lines")
    return 0
