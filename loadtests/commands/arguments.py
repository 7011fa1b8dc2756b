"""Arguments that several commands share, and what they mean."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from loadtests.driving.faults import read_schedule
from loadtests.driving.replay import Plan
from loadtests.driving.spool import Catalogue, Wire
from loadtests.driving.target import Target
from loadtests.verdicts.slo import Objective


def weights(text: str) -> dict[int, float]:
    """`20:0.5,100:0.4` as slate sizes with weights; a lone size weighs 1."""
    pairs = (pair.partition(":") for pair in text.split(","))
    found = {int(size): float(weight or 1) for size, _, weight in pairs}
    if any(size < 1 for size in found) or any(weight <= 0 for weight in found.values()):
        raise ValueError("sizes are at least 1 and weights above 0")
    return found


def words(text: str) -> dict[str, float]:
    """`home:0.7,search:0.3` as words with weights."""
    pairs = (pair.partition(":") for pair in text.split(","))
    return {word: float(weight or 1) for word, _, weight in pairs}


def named_process(text: str) -> tuple[str, int]:
    """`valkey=4711`, or `valkey=@file` with the number in a file."""
    name, _, number = text.partition("=")
    return name, int(Path(number[1:]).read_text() if number.startswith("@") else number)


def header(text: str) -> tuple[str, str]:
    """`Name: value`; `$VARIABLE` as a value is read from the environment."""
    name, colon, value = text.partition(":")
    value = value.strip()
    if not colon:
        raise ValueError("a header is written `Name: value`")
    return name, os.environ[value[1:]] if value.startswith("$") else value


def above_0(text: str) -> float:
    """A number above 0."""
    if not (number := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def count(text: str) -> int:
    """A whole number from 1 up."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return number


def add_sending(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how records become requests")
    group.add_argument("--rank-path", default="/rank")
    group.add_argument("--events-path", default="/v1/events")
    group.add_argument(
        "--items", type=Path, help="ids that seeds draw from: one a line, or JSON; else 10,000 made"
    )
    group.add_argument("--header", type=header, action="append", default=[], metavar="NAME: VALUE")
    group = parser.add_argument_group("the generator")
    group.add_argument("--timeout-ms", type=float, default=1000)
    group.add_argument("--processes", type=int, default=1, help="generators (a core holds one)")
    group.add_argument("--connections", type=int, default=32, help="opened before, each process")
    group.add_argument("--max-connections", type=int, default=1024, help="of each process")
    group.add_argument("--cores", type=int, nargs="*", default=[], help="pin generators to these")
    add_realtime(group)


def add_realtime(parser: argparse._ActionsContainer) -> None:
    what = "generators go before other processes (SCHED_FIFO; root)"
    parser.add_argument("--realtime", action="store_true", help=what)


def add_faults(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("faults while it runs")
    group.add_argument("--faults", type=Path, help="a schedule: README.md tells its format")
    group.add_argument(
        "--process", type=named_process, action="append", default=[], metavar="NAME=PID"
    )


def add_objective(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the objective")
    group.add_argument("--p99-ms", type=float, default=50.0)
    group.add_argument("--p50-ms", type=float)
    group.add_argument("--p999-ms", type=float)
    group.add_argument("--served", type=float, default=0.99, help="least share of 200 to 299")
    group.add_argument("--degraded", type=float, help="largest share of degraded answers")


def objective(args: argparse.Namespace) -> Objective:
    return Objective(
        p99_ms=args.p99_ms,
        p50_ms=args.p50_ms,
        p999_ms=args.p999_ms,
        served=args.served,
        degraded=args.degraded,
    )


def wire(args: argparse.Namespace, url: str) -> Wire:
    catalogue = Catalogue.read(args.items) if args.items else Catalogue.numbered(10_000)
    return Wire(
        target=Target.parse(url),
        catalogue=catalogue,
        rank_path=args.rank_path,
        events_path=args.events_path,
        headers=dict(args.header),
        run=os.urandom(6).hex(),
    )


def plan(args: argparse.Namespace, *, name: str) -> Plan:
    pids = dict(getattr(args, "process", []))
    schedule = read_schedule(args.faults, pids) if getattr(args, "faults", None) else ()
    return Plan(
        name=name,
        trace=str(args.trace),
        timeout_s=args.timeout_ms / 1e3,
        processes=args.processes,
        connections=args.connections,
        max_connections=args.max_connections,
        cores=args.cores,
        realtime=args.realtime,
        schedule=schedule,
        pids=pids,
    )
