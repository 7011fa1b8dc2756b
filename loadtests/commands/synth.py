"""Make a trace: from per-second counts, from arrival stamps, or from a model of traffic."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from loadtests.commands import arguments
from loadtests.traces import arrivals, synth, trace
from loadtests.traces.arrivals import FloatArray

_MODELS = ("counts", "stamps", "poisson", "gamma", "mmpp", "diurnal", "step", "ramp", "spike",
           "flash-sale")  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", choices=_MODELS)
    parser.add_argument("out", type=Path, help=".jsonl, .jsonl.gz or .jsonl.zst")
    parser.add_argument("--seed", type=int, default=0)
    group = parser.add_argument_group("when")
    group.add_argument("--source", type=Path, help="file of counts or stamps")
    group.add_argument("--from-s", type=int, default=0, help="counts: first second taken")
    group.add_argument("--column", default="TIMESTAMP", help="stamps: column of the CSV")
    group.add_argument("--duration-s", type=float, default=60.0)
    group.add_argument("--rate", type=float, default=100.0, help="requests/s; the low one of two")
    group.add_argument("--high", type=float, default=400.0, help="the high rate, where two")
    group.add_argument("--cv", type=float, default=4.0, help="gamma: of the gaps; 1 is Poisson")
    group.add_argument("--low-stay-s", type=float, default=10.0, help="mmpp: mean stay")
    group.add_argument("--high-stay-s", type=float, default=2.0, help="mmpp: mean stay")
    group.add_argument("--at-s", type=float, default=20.0, help="step, spike, flash-sale: when")
    group.add_argument("--for-s", type=float, default=5.0, help="spike: length")
    group.add_argument("--half-life-s", type=float, default=10.0, help="flash-sale")
    group = parser.add_argument_group("who and what")
    group.add_argument("--users", type=int, default=10_000)
    group.add_argument("--zipf", type=float, default=1.0, help="exponent of users' activity")
    group.add_argument("--slates", type=arguments.weights, default={100: 1.0}, metavar="20:3,100:1")
    group.add_argument("--surfaces", type=arguments.words, default={"home": 1.0})
    group.add_argument("--deadline-ms", type=float)
    group.add_argument("--priority", default="")
    group.add_argument("--clicks", type=float, default=0.0, help="share of requests clicked on")
    group.add_argument("--dwell-s", type=float, default=20.0, help="mean dwell after a click")


def times(args: argparse.Namespace) -> FloatArray:
    """Arrival times by the chosen model."""
    chance = np.random.default_rng(args.seed)
    low, high, length = args.rate, args.high, args.duration_s
    for option in ("rate", "high", "duration_s", "cv", "low_stay_s", "high_stay_s", "half_life_s"):
        if not getattr(args, option) > 0:
            raise trace.TraceFault(f"--{option.replace('_', '-')} is not above 0")
    if args.model in {"counts", "stamps"} and args.source is None:
        raise trace.TraceFault(f"{args.model} needs --source")
    match args.model:
        case "counts":
            counts = synth.read_counts(args.source)[args.from_s : args.from_s + round(length)]
            return arrivals.from_counts(counts, chance)
        case "stamps":
            stamps = synth.read_stamps(args.source, args.column)
            return stamps[: np.searchsorted(stamps, length)]
        case "poisson":
            return arrivals.poisson(low, length, chance)
        case "gamma":
            return arrivals.gamma(low, args.cv, length, chance)
        case "mmpp":
            stays = (args.low_stay_s, args.high_stay_s)
            return arrivals.mmpp((low, high), stays, length, chance)
        case "diurnal":
            rate = arrivals.diurnal(low, high, length)
        case "step":
            rate = arrivals.step(low, high, args.at_s)
        case "ramp":
            rate = arrivals.ramp(low, high, length)
        case "spike":
            rate = arrivals.spike(low, high, args.at_s, args.for_s)
        case _:
            rate = arrivals.flash_sale(low, high, args.at_s, args.half_life_s)
    return arrivals.varying(rate, max(low, high), length, chance)


def run(args: argparse.Namespace) -> int:
    when = times(args)
    people = synth.Population(
        users=args.users,
        zipf=args.zipf,
        slates=args.slates,
        surfaces=args.surfaces,
        deadline_ms=args.deadline_ms,
        priority=args.priority,
        clicks=args.clicks,
        dwell_s=args.dwell_s,
    )
    count = trace.write(args.out, synth.records(when, people, seed=args.seed))
    print(
        f"{args.out}: {count} lines, {len(when)} rankings, mean {len(when) / args.duration_s:.1f}/s"
        f", index of dispersion {arrivals.dispersion(when):.2f} (1 is Poisson)"
    )
    return 0
