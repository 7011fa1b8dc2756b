"""Replay a trace on time against a server, and say whether the objective was met."""

from __future__ import annotations

import argparse
from pathlib import Path

from loadtests.commands import arguments
from loadtests.commands.report import publish
from loadtests.driving.replay import replay
from loadtests.traces import trace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path)
    parser.add_argument("url", help="base URL of the server")
    parser.add_argument("--out", type=Path, default=Path("runs/replay"), help="the run's folder")
    parser.add_argument("--name", default="replay")
    arguments.add_objective(parser)
    arguments.add_sending(parser)
    arguments.add_faults(parser)


def run(args: argparse.Namespace) -> int:
    records = list(trace.read(args.trace))
    done = replay(records, arguments.wire(args, args.url), arguments.plan(args, name=args.name))
    done.save(args.out)
    return publish(done, args.out, arguments.objective(args))
