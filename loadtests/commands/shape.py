"""Reshape a trace: window or peak, then rate, then speed, then loops."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from loadtests.traces import arrivals, trace
from loadtests.traces.shape import Shape, times_s
from loadtests.traces.trace import Record


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--start-s", type=float, default=0.0)
    parser.add_argument("--end-s", type=float, default=float("inf"))
    parser.add_argument("--peak-s", type=float, help="keep the busiest stretch of this length")
    parser.add_argument("--rate", type=float, default=1.0, help="by superposing shifted copies")
    parser.add_argument("--speed", type=float, default=1.0, help="by compressing time")
    parser.add_argument("--loops", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> int:
    shape = Shape(
        start_s=args.start_s,
        end_s=args.end_s,
        peak_s=args.peak_s,
        rate=args.rate,
        speed=args.speed,
        loops=args.loops,
        seed=args.seed,
    )
    before = list(trace.read(args.source))
    after = shape.apply(before)
    trace.write(args.out, after)
    for name, records in (("before", before), ("after", after)):
        print(f"{name}: {_describe(records)}")
    return 0


def _describe(records: Sequence[Record]) -> str:
    times = times_s(records)
    length_s = max(float(times[-1]), 1e-9)
    return (
        f"{len(records)} lines in {length_s:.1f} s, mean {len(records) / length_s:.1f}/s, "
        f"index of dispersion {arrivals.dispersion(times):.2f} in windows of 1 s, "
        f"{arrivals.dispersion(times, 0.1):.2f} in windows of 0.1 s"
    )
