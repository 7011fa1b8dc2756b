"""Compare two servers, interleaved A B B A, or two runs; the verdict is on the ratio of p99.

One URL may stand for both, with a request before each leg that turns it into A or B.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

import msgspec
import numpy as np

from loadtests.commands import arguments
from loadtests.driving import faults, processes
from loadtests.driving.replay import replay
from loadtests.driving.samples import Run, RunFault, Samples
from loadtests.traces import trace
from loadtests.verdicts.comparison import Ratio, p99_ratio
from loadtests.verdicts.page import comparison_page
from loadtests.verdicts.slo import LATE_SHARE, Verdict
from loadtests.verdicts.summary import summarise
from loadtests.verdicts.text import PERCENTILE_HEADER, percentile_rows, table

_ORDER = "ABBA"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--a", required=True, help="a URL, or the folder of a run")
    parser.add_argument("--b", required=True)
    parser.add_argument("--name-a", default="A")
    parser.add_argument("--name-b", default="B")
    parser.add_argument("--trace", type=Path, help="replayed once a leg, if A and B are URLs")
    parser.add_argument("--rounds", type=int, default=2, help="times A B B A")
    parser.add_argument("--at-most", type=float, default=1.0, help="ratio of p99, B over A")
    parser.add_argument(
        "--served", type=float, default=0.99, help="least share that each must answer well"
    )
    parser.add_argument("--before-a", metavar="JSON", help='{"path": ..., "body": ...}')
    parser.add_argument("--before-b", metavar="JSON", help="a request before each leg of B")
    parser.add_argument("--pid-a", type=int, action="append", default=[], help="for CPU a request")
    parser.add_argument("--pid-b", type=int, action="append", default=[])
    parser.add_argument("--out", type=Path, default=Path("runs/compare"))
    arguments.add_sending(parser)


def run(args: argparse.Namespace) -> int:
    names = {"A": args.name_a, "B": args.name_b}
    cpu_s = {"A": 0.0, "B": 0.0}
    if args.trace is None:
        legs = {"A": [Run.load(Path(args.a)).samples], "B": [Run.load(Path(args.b)).samples]}
    else:
        legs = _measure(args, cpu_s)
    try:
        ratio = p99_ratio(list(zip(legs["A"], legs["B"], strict=True)))
    except ValueError as error:
        raise RunFault(str(error)) from error
    summaries = {side: summarise(Samples.merge(legs[side])) for side in "AB"}
    late_ms = max(summary.lateness.p99_ms for summary in summaries.values())
    verdict = ratio.judge(args.at_most)
    if any(summary.served_share < args.served for summary in summaries.values()):
        verdict = Verdict.INVALID
    if late_ms > LATE_SHARE * min(ratio.p99_a_ms, ratio.p99_b_ms):
        verdict = Verdict.INVALID
    lines = [
        table(
            percentile_rows({names[side]: summaries[side].judged for side in "AB"}),
            header=PERCENTILE_HEADER,
        )
    ]
    for side, summary in summaries.items():
        told = (
            f"{names[side]}: {summary.served_share:.3%} served, wanted at least {args.served:.1%}, "
            f"errors {summary.errors or 'none'}"
        )
        if cpu_s[side]:
            told += f", {cpu_s[side] / max(summary.served, 1) * 1e6:.0f} µs of CPU a request"
        lines.append(told)
    lines += [_told(ratio, names, args.at_most), f"generator's lateness p99 {late_ms:.3f} ms"]
    lines.append(f"verdict: {verdict.name}")
    text = "\n".join(lines)
    args.out.mkdir(parents=True, exist_ok=True)
    latencies = {names[side]: legs[side] for side in "AB"}
    page = comparison_page(latencies, verdict=verdict, lines=lines[1:-1])
    (args.out / "compare.html").write_text(page)
    (args.out / "compare.json").write_bytes(msgspec.json.encode(ratio) + b"\n")
    print(f"{text}\npage: {args.out / 'compare.html'}")
    return verdict


def _told(ratio: Ratio, names: dict[str, str], at_most: float) -> str:
    return (
        f"p99 of {names['B']} over {names['A']}: {ratio.estimate:.3f}, 95% interval "
        f"{ratio.low:.3f} to {ratio.high:.3f} ({ratio.blocks} paired seconds); "
        f"wanted at most {at_most:g}"
    )


def _measure(args: argparse.Namespace, cpu_s: dict[str, float]) -> dict[str, list[Samples]]:
    records = list(trace.read(args.trace))
    legs: dict[str, list[Samples]] = {"A": [], "B": []}
    before = {
        "A": _request(args.before_a, "--before-a"),
        "B": _request(args.before_b, "--before-b"),
    }
    for number, side in enumerate(_ORDER * args.rounds, 1):
        wire = arguments.wire(args, args.a if side == "A" else args.b)
        if (entry := before[side]) is not None:
            result = asyncio.run(faults.call(entry, wire.target))
            if not result.startswith("2"):
                raise RunFault(f"the request before {side}: {result}")
        pids = args.pid_a if side == "A" else args.pid_b
        cpu_before_s = processes.cpu_s(pids)
        done = replay(records, wire, arguments.plan(args, name=side))
        cpu_s[side] += processes.cpu_s(pids) - cpu_before_s
        legs[side].append(done.samples)
        p99_ms = np.percentile(done.samples.latency_s, 99) * 1e3
        print(f"leg {number}, {side}: p99 {p99_ms:.2f} ms", file=sys.stderr, flush=True)
    return legs


def _request(text: str | None, option: str) -> faults.Http | None:
    if text is None:
        return None
    try:
        return msgspec.convert({"at_s": 0, "do": "http", **msgspec.json.decode(text)}, faults.Http)
    except (msgspec.DecodeError, TypeError) as error:
        raise RunFault(f"{option}: {error}") from error
