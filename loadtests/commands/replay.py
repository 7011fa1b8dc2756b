"""Replay a trace on time against a server, and say whether the objective was met."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from loadtests.commands import arguments
from loadtests.commands.report import publish
from loadtests.driving import metrics
from loadtests.driving.replay import Plan, replay
from loadtests.driving.samples import Run
from loadtests.driving.spool import Wire
from loadtests.traces import trace
from loadtests.traces.trace import Record


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path)
    parser.add_argument("url", help="base URL of the server")
    parser.add_argument("--out", type=Path, default=Path("runs/replay"), help="the run's folder")
    parser.add_argument("--name", default="replay")
    parser.add_argument(
        "--batch-metric",
        default="ranker_batch_requests",
        help="histogram of batch sizes at /metrics, if the server has one",
    )
    arguments.add_objective(parser)
    arguments.add_sending(parser)
    arguments.add_faults(parser)


def run(args: argparse.Namespace) -> int:
    wire, plan = arguments.wire(args, args.url), arguments.plan(args, name=args.name)
    done = kept(list(trace.read(args.trace)), wire, plan, url=args.url, args=args)
    return publish(done, args.out, arguments.objective(args))


def kept(
    records: Sequence[Record], wire: Wire, plan: Plan, *, url: str, args: argparse.Namespace
) -> Run:
    """The run, with the server's batch sizes, saved in `args.out`."""
    metrics_url = f"{url.rstrip('/')}/metrics"
    batches_before = metrics.batch_sizes(metrics_url, args.batch_metric)
    done = replay(records, wire, plan)
    batches = metrics.since(batches_before, metrics.batch_sizes(metrics_url, args.batch_metric))
    done.description.batches = {f"{bound:g}": count for bound, count in batches.items()}
    done.save(args.out)
    return done
