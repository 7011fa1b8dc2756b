"""Measure the throughput-latency curve: a trace's requests at rising Poisson rates."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path

import numpy as np

from loadtests.commands import arguments
from loadtests.driving import processes
from loadtests.driving.replay import replay
from loadtests.traces import arrivals, trace
from loadtests.traces.trace import Record, TraceFault, at
from loadtests.verdicts.curve import Curve, Point
from loadtests.verdicts.page import curve_section, document
from loadtests.verdicts.slo import Verdict
from loadtests.verdicts.summary import summarise
from loadtests.verdicts.text import curve_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, help="whose requests are sent; its times are not used")
    parser.add_argument("url")
    parser.add_argument("--rates", type=float, nargs="+", required=True, help="requests/s, rising")
    parser.add_argument("--step-s", type=float, default=15.0, help="length of each rate")
    parser.add_argument("--misses", type=int, default=2, help="stop after so many in a row")
    parser.add_argument("--retries", type=int, default=2, help="of a rate with a late generator")
    parser.add_argument("--pid", type=int, action="append", default=[], help="server, for CPU")
    parser.add_argument("--out", type=Path, default=Path("runs/curve"))
    parser.add_argument("--name", default="curve")
    parser.add_argument("--seed", type=int, default=0)
    arguments.add_objective(parser)
    arguments.add_sending(parser)


def retimed(
    records: Sequence[Record], rate: float, duration_s: float, *, seed: int
) -> list[Record]:
    """The rankings of a trace, again and again if need be, as a Poisson process."""
    times = arrivals.poisson(rate, duration_s, np.random.default_rng(seed))
    return [
        at(record, time * 1e3)
        for record, time in zip(islice(cycle(records), len(times)), times.tolist(), strict=True)
    ]


def run(args: argparse.Namespace) -> int:
    records = [record for record in trace.read(args.trace) if record.kind != "event"]
    if not records:
        raise TraceFault(f"{args.trace} holds no requests but events")
    objective = arguments.objective(args)
    plan, wire = arguments.plan(args, name=args.name), arguments.wire(args, args.url)
    points: list[Point] = []
    for rate in sorted(args.rates):
        # a rate at which the generator was late is measured again: it told nothing
        for _ in range(1 + args.retries):
            cpu_before_s = processes.cpu_s(args.pid)
            done = replay(retimed(records, rate, args.step_s, seed=args.seed), wire, plan)
            cpu_s = processes.cpu_s(args.pid) - cpu_before_s if args.pid else None
            summary = summarise(done.samples)
            judged = objective.judge(summary)
            told = f"{rate:g}/s: p99 {summary.latency.p99_ms:.2f} ms, {judged.verdict.name}"
            print(told, file=sys.stderr, flush=True)
            if judged.verdict is not Verdict.INVALID:
                break
        points.append(Point.of(summary, judged, server_cpu_s=cpu_s))
        last = points[-args.misses :]
        if len(last) == args.misses and all(p.verdict is not Verdict.PASS for p in last):
            break
    curve = Curve(name=args.name, objective=objective, points=points)
    args.out.mkdir(parents=True, exist_ok=True)
    curve.save(args.out / "curve.json")
    page = document(args.name, f"{args.trace} against {args.url}", [curve_section(curve)])
    (args.out / "curve.html").write_text(page)
    print(curve_text(curve))
    return Verdict.PASS if curve.knee is not None else Verdict.FAIL
