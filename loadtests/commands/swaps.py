"""Many swaps under a steady load, and a verdict: nothing failed, nothing stale, nothing slow.

Copies the newest bundle under three version names, so that each promotion loads a version,
warms it, publishes it and frees the oldest; drives the admin routes of a service that it
starts itself.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec
import numpy as np
import uvloop
from tqdm import tqdm

from loadtests.commands import three_versions
from loadtests.commands.three_versions import TOKEN, VERSIONS, Served
from loadtests.driving import processes
from loadtests.driving.client import Client, Reply
from loadtests.driving.closed import closed_loop
from loadtests.driving.target import Target

_MAX_P99_RATIO = 1.5
_MAX_GROWTH = 0.05
_SETTLED = 10
"""The swap after which memory is taken to have settled."""


class Answer(msgspec.Struct, frozen=True):
    """One request of the steady load."""

    due_s: float
    """When it should have been sent; its latency counts from here."""
    sent_s: float
    received_s: float
    status: int
    version: str
    degraded: str


class Swap(msgspec.Struct, frozen=True):
    """One promotion: from its order to the answer that shows it done."""

    version: str
    ordered_s: float
    done_s: float
    resident_bytes: int


async def steady_load(
    client: Client, next_request: Callable[[], bytes], *, rate: float, stop: asyncio.Event
) -> list[Answer]:
    """Send at a fixed rate, whatever comes back, until told to stop."""
    answers: list[Answer] = []
    on_the_way = 0
    all_back = asyncio.Event()

    def send(due_s: float) -> None:
        nonlocal on_the_way
        on_the_way += 1

        def on_reply(reply: Reply) -> None:
            nonlocal on_the_way
            on_the_way -= 1
            headers = reply.headers
            answers.append(
                Answer(
                    due_s,
                    reply.sent_s,
                    reply.received_s,
                    reply.status,
                    headers.get(b"x-model-version", b"").decode(),
                    headers.get(b"x-degraded", b"").decode(),
                )
            )
            if not on_the_way:
                all_back.set()

        client.send(next_request(), on_reply)

    started_s = perf_counter()
    for number in itertools.count():
        due_s = started_s + number / rate
        await asyncio.sleep(max(0.0, due_s - perf_counter()))
        if stop.is_set():
            break
        send(due_s)
    all_back.clear()
    if on_the_way:
        await all_back.wait()
    return answers


async def promote(client: Client, model: str, version: str) -> float:
    """Order a promotion, and return when the models page shows it done; raises StartFault."""
    order = msgspec.json.encode({"version": version, "by": "loadtests"})
    bearer = {"authorization": f"Bearer {TOKEN}"}
    reply = await client.request("POST", f"/v1/models/{model}/promote", order, bearer)
    if reply.status != 202:
        raise processes.StartFault(f"promote answered {reply.status}: {reply.body[:300]!r}")
    for _ in range(3_000):
        page = await client.request("GET", "/v1/models")
        shown: dict[str, Any] = msgspec.json.decode(page.body)
        if shown["roles"].get("primary") == version:
            return page.received_s
        await asyncio.sleep(0.02)
    raise processes.StartFault(f"{version} did not become the primary: {shown}")


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def measure(args: argparse.Namespace, what: Served) -> bool:
    target = Target.parse(what.url)
    next_request = what.workload.requests(target)
    client = Client(target, max_connections=args.connections, timeout_s=5)
    operator = Client(target, max_connections=1, timeout_s=30)
    await client.warm(min(32, args.connections))
    found = await closed_loop(client, next_request, connections=32, duration_s=args.warm_up_s)
    rate = args.rate or 0.6 * found.rate
    print(f"capacity {found.rate:.0f} requests/s; steady load {rate:.0f}", flush=True)
    stop = asyncio.Event()
    load = asyncio.create_task(steady_load(client, next_request, rate=rate, stop=stop))
    await asyncio.sleep(args.pause_s)
    swaps: list[Swap] = []
    began_s = perf_counter()
    try:
        for number in tqdm(range(args.swaps), unit="swap"):
            version = VERSIONS[(number + 1) % len(VERSIONS)]
            ordered_s = perf_counter()
            done_s = await promote(operator, what.model, version)
            await asyncio.sleep(args.pause_s)
            swaps.append(Swap(version, ordered_s, done_s, resident_bytes(what.pid)))
    finally:
        stop.set()
        answers = await load
        await operator.close()
        await client.close()
    return verdict([answer for answer in answers if answer.due_s > began_s], swaps)


def misplaced(answers: list[Answer], swaps: list[Swap]) -> int:
    """Answers by a version that was not live at any time between their sending and receipt."""
    order_s = np.array([swap.ordered_s for swap in swaps])
    done_s = np.array([swap.done_s for swap in swaps])
    names = [VERSIONS[0], *(swap.version for swap in swaps)]
    wrong = 0
    for answer in answers:
        if answer.version:
            first = int(np.searchsorted(done_s, answer.sent_s))
            last = int(np.searchsorted(order_s, answer.received_s))
            wrong += answer.version not in names[first : last + 1]
    return wrong


def verdict(answers: list[Answer], swaps: list[Swap]) -> bool:
    """Print every figure with its limit; true if all hold."""
    due_s = np.array([answer.due_s for answer in answers])
    latency_ms = np.array([answer.received_s - answer.due_s for answer in answers]) * 1e3
    inside = np.zeros(len(answers), bool)
    for swap in swaps:
        # the whole seconds that a swap touches, from its order to its end
        inside |= (due_s >= swap.ordered_s) & (due_s <= swap.done_s + 0.1)
    p99_in, p99_out = (float(np.percentile(latency_ms[at], 99)) for at in (inside, ~inside))
    settled, last = swaps[min(_SETTLED, len(swaps)) - 1], swaps[-1]
    growth = last.resident_bytes / settled.resident_bytes - 1
    failed = sum(answer.status != 200 for answer in answers)
    stale = misplaced(answers, swaps)
    load_s = np.array([swap.done_s - swap.ordered_s for swap in swaps])
    print(
        f"{len(swaps)} swaps, {len(answers)} requests; a swap took p50 {np.median(load_s):.2f} s, "
        f"longest {load_s.max():.2f} s; {inside.mean():.0%} of the requests fell into a swap"
    )
    reasons = Counter(answer.degraded for answer in answers if answer.degraded)
    print(f"degraded: {dict(reasons) or 'none'}")
    checks = [
        (f"failed requests: {failed} (limit 0)", failed == 0),
        (f"answers by a version that was not live: {stale} (limit 0)", stale == 0),
        (
            (
                f"p99 during swaps {p99_in:.2f} ms, outside {p99_out:.2f} ms: "
                f"{p99_in / p99_out:.2f} times (limit {_MAX_P99_RATIO})"
            ),
            p99_in <= _MAX_P99_RATIO * p99_out,
        ),
        (
            (
                f"resident memory {settled.resident_bytes >> 20} MiB after swap {_SETTLED}, "
                f"{last.resident_bytes >> 20} MiB at the end: {growth:+.1%} "
                f"(limit {_MAX_GROWTH:+.0%})"
            ),
            growth <= _MAX_GROWTH,
        ),
    ]
    for text, holds in checks:
        print(f"{'pass' if holds else 'FAIL'}  {text}")
    return all(holds for _, holds in checks)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    three_versions.add_arguments(parser)
    parser.add_argument("--swaps", type=int, default=100)
    parser.add_argument(
        "--rate", type=float, help="requests/s; 60%% of a measured capacity if absent"
    )
    parser.add_argument("--connections", type=int, default=256)
    parser.add_argument("--warm-up-s", type=float, default=4)
    parser.add_argument("--pause-s", type=float, default=1, help="calm before each swap")


def run(args: argparse.Namespace) -> int:
    with three_versions.served(args) as what:
        passed = uvloop.run(measure(args, what))
    print("verdict:", "pass" if passed else "FAIL")
    return 0 if passed else 1
