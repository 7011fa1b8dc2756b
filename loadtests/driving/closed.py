"""A closed loop: each connection sends its next request when its answer has come.

It measures capacity. It never measures latency under a given load: a slow server slows
the questions down (coordinated omission).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from time import perf_counter

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadtests.driving.client import Client, Reply


class ClosedRun(msgspec.Struct, frozen=True):
    """What a closed loop saw: seconds from sending to answer of each good answer."""

    latency_s: NDArray[np.float64]
    wall_s: float
    failures: dict[str, int]
    degraded: dict[str, int]

    @property
    def rate(self) -> float:
        """Good answers a second."""
        return len(self.latency_s) / self.wall_s

    def percentile_ms(self, percent: float) -> float:
        """A latency percentile in ms, NaN where nothing succeeded."""
        if not len(self.latency_s):
            return float("nan")
        return float(np.percentile(self.latency_s, percent)) * 1e3


async def closed_loop(
    client: Client, next_request: Callable[[], bytes], *, connections: int, duration_s: float
) -> ClosedRun:
    """Keep `connections` requests on their way for `duration_s`, then wait for the last."""
    latency_s: list[float] = []
    failures: Counter[str] = Counter()
    degraded: Counter[str] = Counter()
    started_s = perf_counter()
    ends_s = started_s + duration_s
    on_the_way = connections
    finished = asyncio.get_running_loop().create_future()

    def on_reply(reply: Reply) -> None:
        nonlocal on_the_way
        if reply.ok:
            latency_s.append(reply.received_s - reply.sent_s)
            if reason := reply.headers.get(b"x-degraded"):
                degraded[reason.decode()] += 1
        else:
            failures[reply.fault or str(reply.status)] += 1
        if reply.received_s < ends_s and reply.fault != "refused":
            client.send(next_request(), on_reply)
            return
        on_the_way -= 1
        if not on_the_way:
            finished.set_result(None)

    for _ in range(connections):
        client.send(next_request(), on_reply)
    await finished
    wall_s = perf_counter() - started_s
    return ClosedRun(np.array(latency_s), wall_s, dict(failures), dict(degraded))
