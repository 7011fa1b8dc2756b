"""An hour of real traffic in three minutes against this service: two swaps and a Redis stall.

Starts the service on one core and its Valkey on the other, finds its capacity, scales the
counts so that their busiest five minutes are a share of it, compresses time, replays, judges.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import numpy as np
import uvloop
from numpy.typing import NDArray

from loadtests.commands import arguments, three_versions
from loadtests.commands.replay import kept
from loadtests.commands.report import publish
from loadtests.commands.three_versions import TOKEN, VERSIONS, Served
from loadtests.driving import faults, processes
from loadtests.driving.client import Client
from loadtests.driving.closed import closed_loop
from loadtests.driving.replay import Plan
from loadtests.driving.spool import Catalogue, Wire
from loadtests.driving.target import Target
from loadtests.traces import arrivals, shape, synth, trace
from loadtests.traces.trace import Record, TraceFault
from loadtests.verdicts.slo import Verdict
from loadtests.verdicts.summary import summarise

_TOKEN_VARIABLE = "REHEARSAL_TOKEN"  # noqa: S105  the variable's name
_SWAPS_AT, _STALL_AT = (0.3, 0.8), 0.55
"""Parts of the run."""
_BUSIEST_S = 300


def add_arguments(parser: argparse.ArgumentParser) -> None:
    three_versions.add_arguments(parser)
    parser.add_argument("--counts", type=Path, required=True, help="requests of each second")
    parser.add_argument("--hour", type=int, default=491, help="which hour of the counts, from 0")
    parser.add_argument("--speed", type=float, default=20.0, help="3600 s in 180 s")
    parser.add_argument("--share", type=float, default=0.6, help="of capacity, at the busiest")
    parser.add_argument("--capacity", type=float, help="requests/s; measured if absent")
    parser.add_argument("--clicks", type=float, default=0.1, help="share of requests clicked on")
    parser.add_argument("--stall-s", type=float, default=1.5, help="how long Redis stands still")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/hour"))
    parser.add_argument("--batch-metric", default="ranker_batch_requests")
    arguments.add_realtime(parser)
    arguments.add_objective(parser)


def hour_of(path: Path, hour: int) -> NDArray[np.int64]:
    """Requests of each second of one hour; raises TraceFault."""
    counts = synth.read_counts(path)
    taken = counts[hour * 3600 : (hour + 1) * 3600]
    if not taken.any():
        raise TraceFault(f"{path}: hour {hour} of {len(counts) // 3600} holds no requests")
    return taken


def compressed(
    counts: NDArray[np.int64], rate: float, people: synth.Population, *, speed: float, seed: int
) -> list[Record]:
    """The hour's shape in 1/speed of its time, with `rate` requests/s in its busiest minutes.

    A click is two requests more: itself and its dwell.
    """
    chance = np.random.default_rng(seed)
    window_s = min(_BUSIEST_S, len(counts))
    busiest = np.convolve(counts, np.ones(window_s), "valid").max() / window_s
    scaled = chance.poisson(counts * (rate / speed / busiest / (1 + 2 * people.clicks)))
    records = synth.records(arrivals.from_counts(scaled, chance), people, seed=seed)
    return shape.faster(list(records), speed)


def schedule(args: argparse.Namespace, what: Served, length_s: float) -> list[faults.Entry]:
    promote = f"/v1/models/{what.model}/promote"
    swaps = [
        faults.Http(
            at_s=length_s * part,
            path=promote,
            body={"version": version, "by": "rehearse"},
            token_env=_TOKEN_VARIABLE,
        )
        for part, version in zip(_SWAPS_AT, VERSIONS[1:], strict=True)
    ]
    return [*swaps, faults.Stop(at_s=length_s * _STALL_AT, process="valkey", for_s=args.stall_s)]


async def capacity(what: Served) -> float:
    """Requests a second of a closed loop of 32, after a warm-up."""
    client = Client(Target.parse(what.url), max_connections=32, timeout_s=5)
    await client.warm(32)
    next_request = what.workload.requests(client.target)
    for duration_s in (2, 5):
        found = await closed_loop(client, next_request, connections=32, duration_s=duration_s)
    await client.close()
    return found.rate


def run(args: argparse.Namespace) -> int:
    counts = hour_of(args.counts, args.hour)
    os.environ[_TOKEN_VARIABLE] = TOKEN
    with three_versions.served(args) as what:
        most = args.capacity or uvloop.run(capacity(what))
        people = synth.Population(
            users=args.users, slates={args.candidates: 1.0}, clicks=args.clicks
        )
        records = compressed(counts, args.share * most, people, speed=args.speed, seed=args.seed)
        length_s = len(counts) / args.speed
        args.out.mkdir(parents=True, exist_ok=True)
        trace.write(args.out / "trace.jsonl.zst", records)
        times = shape.times_s(records)
        print(
            f"capacity {most:.0f} requests/s; {len(records)} lines in {length_s:.0f} s, "
            f"busiest second {np.bincount(times.astype(np.int64)).max()}, "
            f"index of dispersion {arrivals.dispersion(times):.2f} (1 is Poisson)",
            flush=True,
        )
        wire = Wire(
            target=Target.parse(what.url),
            catalogue=Catalogue(what.workload.items),
            run=os.urandom(6).hex(),
        )
        plan = Plan(
            name="an hour of traffic",
            trace=f"{args.counts.name}, hour {args.hour}, {args.speed:g} times as fast",
            cores=[processes.cores()[1]],
            realtime=args.realtime,
            schedule=schedule(args, what, length_s),
            pids={"valkey": what.valkey_pid},
        )
        done = kept(records, wire, plan, url=what.url, args=args)
    verdict = publish(done, args.out, arguments.objective(args))
    served = summarise(done.samples).versions
    if missing := [word for word in VERSIONS if word not in served]:
        print(f"verdict: INVALID, as nothing was served by {', '.join(missing)}")
        return Verdict.INVALID
    return verdict
