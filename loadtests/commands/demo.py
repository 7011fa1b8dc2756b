"""Three invented visitors of the shipped shop: what they click, and how their slate moves.

Talks HTTP to a running service, or starts one of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec

from loadtests.driving.processes import StartFault
from service.bundle import MANIFEST

SLATE = 12
SHOWN = 8
CLICKED = 4
WATCHED_MS = 45_000


class Visit(msgspec.Struct, frozen=True):
    """A visitor's session: the words that mark what they look at."""

    who: str
    words: tuple[str, ...]
    surface: str


VISITS = (
    Visit("a runner", ("running",), "home"),
    Visit("a coffee drinker", ("espresso", "grinder", "pour-over", "coffee", "milk"), "search"),
    Visit("a parent", ("wooden train", "blocks", "puzzle", "plush", "marble"), "home"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the demo may be told."""
    parser.add_argument("--url", help="a running service; else one on 127.0.0.1:8000, else its own")
    parser.add_argument("--store", type=Path, default=Path("models/store"))
    parser.add_argument("--seed", type=int, default=7, help="which items make the slate")


def run(args: argparse.Namespace) -> int:
    """Show each visit as a table."""
    titles = _titles(args.store)
    with _service(args.url) as url, httpx.Client(base_url=url, timeout=30) as client:
        for visit in VISITS:
            _show(client, visit, titles, args.seed)
    return 0


def _titles(store: Path) -> dict[str, str]:
    manifests = sorted(store.glob(f"*/*/{MANIFEST}"))
    for manifest in reversed(manifests):
        path = manifest.with_name("titles.json")
        if path.is_file():
            titles: dict[str, str] = json.loads(path.read_text("utf-8"))
            return titles
    raise StartFault(f"no bundle with titles under {store}")


@contextmanager
def _service(url: str | None) -> Iterator[str]:
    for known in (url,) if url else ("http://127.0.0.1:8000",):
        try:
            if httpx.get(f"{known}/readyz", timeout=2).status_code == 200:
                print(f"against the running service at {known}\n")
                yield known
                return
        except httpx.TransportError as error:
            if url:
                raise StartFault(f"no service at {url}: {error}") from error
    with _own_service() as started:
        yield started


@contextmanager
def _own_service() -> Iterator[str]:
    command = [sys.executable, "-m", "service"]
    environment = {"RANKER_PORT": "0", "RANKER_LOG_LEVEL": "error"}
    process = subprocess.Popen(  # noqa: S603  our own interpreter and module
        command, stdout=subprocess.PIPE, text=True, env=_clean_environment() | environment
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if " serves " not in line:
            raise StartFault(f"the service did not start: {line.strip()}")
        print(f"started {line.strip()}\n")
        yield line.split()[2]
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()


def _clean_environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith("RANKER_")}


def _show(client: httpx.Client, visit: Visit, titles: dict[str, str], seed: int) -> None:
    user = f"demo-{secrets.token_hex(4)}"
    chance = random.Random(seed)
    liked = [item for item, title in titles.items() if any(w in title for w in visit.words)]
    other = sorted(titles.keys() - liked)
    for items in (liked, other):
        chance.shuffle(items)
    clicked, liked_shown = liked[:CLICKED], liked[CLICKED : 2 * CLICKED]
    slate = sorted([*liked_shown, *other[: SLATE - CLICKED]])
    before = _rank(client, user, visit, slate)
    token = _browse(client, user, visit, clicked)
    after = _rank(client, user, visit, slate, token=token)
    _print_table(visit, titles, before, after, set(liked))


def _rank(
    client: httpx.Client, user: str, visit: Visit, slate: list[str], token: str | None = None
) -> dict[str, Any]:
    body = {"user_id": user, "items": slate, "context": {"surface": visit.surface}}
    if token is not None:
        body["min_signal_token"] = token
    # the first answer of a cold connection tells of the connection, not of the ranking
    for _ in range(2):
        answer = client.post("/rank", json=body)
        answer.raise_for_status()
    ranking: dict[str, Any] = answer.json()
    return ranking


def _browse(client: httpx.Client, user: str, visit: Visit, clicked: list[str]) -> str:
    """Click and look at each item; the token of the last acknowledgement."""
    events = []
    for item in clicked:
        seen = {"user_id": user, "item_id": item, "surface": visit.surface}
        events += [
            {"type": "click", "event_id": f"{user}-{item}", **seen},
            {"type": "dwell", "dwell_ms": WATCHED_MS, **seen},
        ]
    answer = client.post("/v1/events", json={"events": events})
    answer.raise_for_status()
    token: str = answer.json()["signal_token"]
    return token


def _print_table(
    visit: Visit,
    titles: dict[str, str],
    before: dict[str, Any],
    after: dict[str, Any],
    liked: set[str],
) -> None:
    places = {item["id"]: place for place, item in enumerate(before["items"], 1)}
    signals, timing = after["signals"], after["timing_ms"]
    print(f"{visit.who} on {visit.surface}: {CLICKED} items clicked and looked at for 45 s each")
    print(f"  {'now':>3} {'was':>3} {'move':>5}  {'score':>6}  {'was':>6}  item (* = their kind)")
    scores = {item["id"]: item["score"] for item in before["items"]}
    for place, item in enumerate(after["items"][:SHOWN], 1):
        was = places[item["id"]]
        move = f"{was - place:+d}" if was != place else "="
        mark = "*" if item["id"] in liked else " "
        print(
            f"  {place:>3} {was:>3} {move:>5}  {item['score']:.4f}  {scores[item['id']]:.4f}  "
            f"{mark} {titles[item['id']]}"
        )
    print(
        f"  signals: {signals['count']} from {signals['source']}, newest {signals['age_ms']} ms old"
    )
    print(
        f"  ms: signals {timing['signals']}, queue {timing['queue']}, "
        f"inference {timing['inference']}, total {timing['total']}"
        f"  ({after['model']['backend']}, {after['model']['precision']})\n"
    )
