"""The first answers of a server: it is ready once it ranks, and it must rank as ours does."""

from __future__ import annotations

import time
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from subprocess import Popen
from typing import Any

import msgspec
import numpy as np
import uvloop

from loadtests.driving.client import Client
from loadtests.driving.processes import StartFault
from loadtests.driving.target import Target

Body = dict[str, Any]
"""Of `POST /rank`."""
Scores = list[list[float]]
"""Of each request, by item id."""

_START_S = 60
_PROBES = 3
_CLOSE = 1e-4
_HOUR_MS = 3_600_000


def sent(body: Body, *, listed: bool) -> object:
    """What is sent: the body, or a list of it alone."""
    return [body] if listed else body


class _Refused(StartFault):
    """The server does not understand the request: waiting does not help."""


async def _rank(url: str, body: object) -> Any:
    """One answer's items, sorted by id; raises StartFault."""
    client = Client(Target.parse(url), max_connections=1, timeout_s=10)
    try:
        reply = await client.request("POST", "/rank", msgspec.json.encode(body))
    finally:
        await client.close()
    if reply.status in {HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY}:
        raise _Refused(f"/rank answered {reply.status}: {reply.body[:300]!r}")
    if reply.status != HTTPStatus.OK:
        raise StartFault(f"/rank answered {reply.status or reply.fault}: {reply.body[:300]!r}")
    answer = msgspec.json.decode(reply.body)
    (ranking,) = answer if isinstance(answer, list) else [answer]
    return sorted(ranking["items"], key=lambda item: str(item["id"]))


def probe(url: str, bodies: Sequence[Body], *, listed: bool) -> Scores:
    """Scores of the first requests, as of the last full hour; raises StartFault."""
    now_ms = time.time_ns() // 1_000_000
    # a service that is still warming refuses what may not be degraded
    fixed = {"ts": now_ms // _HOUR_MS * _HOUR_MS, "allow_degraded": False}
    answers = [
        uvloop.run(_rank(url, sent(body | fixed, listed=listed))) for body in bodies[:_PROBES]
    ]
    return [[item["score"] for item in answer] for answer in answers]


def wait_for_scores(
    url: str, bodies: Sequence[Body], process: Popen[bytes], *, log: Path, listed: bool
) -> Scores:
    """The scores of the first requests, once they are answered; raises StartFault."""
    ends_s = time.monotonic() + _START_S
    fault = "no answer"
    while time.monotonic() < ends_s and process.poll() is None:
        try:
            return probe(url, bodies, listed=listed)
        except _Refused:
            raise
        except StartFault as not_yet:
            fault = str(not_yet)
        time.sleep(0.3)
    tail = log.read_text(errors="replace").strip()[-600:]
    raise StartFault(f"{fault}; the end of its log: {tail}")


def check_same(scores: Scores, expected: Scores) -> None:
    """Raise StartFault where a server scores otherwise than ours."""
    for own, ours in zip(scores, expected, strict=True):
        if len(own) != len(ours) or not np.allclose(own, ours, rtol=0, atol=_CLOSE):
            raise StartFault("it does not rank as ours does")
