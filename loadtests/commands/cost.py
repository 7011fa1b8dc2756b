"""Replicas and money for a trace: a baseline, perhaps a candidate, and the claims of others.

The case is a JSON file. `--trace` fills in its traffic, `--baseline-curve` and
`--candidate-curve` what a replica serves (the knee), `--prices` and `--instance` the price.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from loadtests.traces import trace
from loadtests.traces.shape import times_s
from loadtests.traces.trace import TraceFault
from loadtests.verdicts.curve import Curve
from loadtests.verdicts.pricing import Case, CaseFault, check_claims, compute
from loadtests.verdicts.slo import Verdict
from loadtests.verdicts.text import table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("case", type=Path, nargs="?", help="JSON; options fill what it leaves out")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--scale", type=float, default=1.0, help="of the trace's rates")
    parser.add_argument("--baseline-curve", type=Path)
    parser.add_argument("--candidate-curve", type=Path)
    parser.add_argument("--prices", type=Path, help="JSON: instance type to price an hour")
    parser.add_argument("--instance")
    parser.add_argument("--utilization", type=float)
    parser.add_argument("--engineering-cost", type=float)


def run(args: argparse.Namespace) -> int:
    case = _case(args)
    try:
        lines = compute(case)
    except CaseFault as error:
        raise TraceFault(f"the case: {error}") from error
    print("assumptions:")
    for name in case.__struct_fields__:
        if name != "claims" and (value := getattr(case, name)) is not None:
            print(f"  {name}: {msgspec.json.encode(value).decode()}")
    rows = [(line.name, f"{line.value:,.2f}", line.unit, line.how) for line in lines]
    print(table(rows, header=("result", "value", "unit", "how")))
    claims = check_claims(case, lines)
    for claim in claims:
        computed = "" if claim.computed is None else f", computed {claim.computed:,.2f}"
        print(f"claim {claim.name}: stated {claim.stated:,.2f}{computed}: {claim.verdict}")
    holds = all(claim.verdict == "holds" for claim in claims)
    return Verdict.PASS if holds else Verdict.FAIL


def _case(args: argparse.Namespace) -> Case:
    given: dict[str, Any] = {}
    if args.case is not None:
        try:
            given = msgspec.json.decode(args.case.read_bytes(), type=dict[str, Any])
        except (OSError, msgspec.DecodeError) as error:
            raise TraceFault(f"{args.case}: {error}") from error
    for side in ("baseline", "candidate"):
        path = getattr(args, f"{side}_curve")
        if path is not None:
            knee = Curve.load(path).knee
            if knee is None:
                raise TraceFault(f"{path}: no rate of this curve passes, so it tells no capacity")
            given[side] = {"requests_per_s": knee.offered_rate, "latency_ms": knee.p50_ms}
    if args.trace is not None:
        given["traffic"] = _traffic(args.trace, args.scale)
    if args.prices is not None:
        prices = msgspec.json.decode(args.prices.read_bytes(), type=dict[str, float])
        if args.instance not in prices:
            raise TraceFault(f"{args.prices}: no {args.instance!r} among {', '.join(prices)}")
        given["price_per_hour"] = prices[args.instance]
    for name in ("utilization", "engineering_cost"):
        if (value := getattr(args, name)) is not None:
            given[name] = value
    try:
        return msgspec.convert(given, Case)
    except msgspec.ValidationError as error:
        raise TraceFault(f"the case: {error}") from error


def _traffic(path: Path, scale: float) -> dict[str, float]:
    times = times_s([record for record in trace.read(path) if record.kind != "event"])
    if not len(times):
        raise TraceFault(f"{path} holds no requests but events")
    counts = np.bincount(times.astype(np.int64))
    return {"peak_per_s": float(counts.max()) * scale, "mean_per_s": float(counts.mean()) * scale}
