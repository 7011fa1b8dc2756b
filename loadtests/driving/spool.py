"""A trace as the bytes that will be sent, in one file that all generators map.

Bodies are built before the clock starts, so building them can never make a request late.
"""

from __future__ import annotations

import mmap
import random
import sys
import zlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadtests.driving.target import Target
from loadtests.traces.trace import Kind, Record

KINDS: tuple[Kind, ...] = ("rank", "event", "http")
STAMP_DIGITS = 13
_STAMP = 10**STAMP_DIGITS - 1
"""Stands in an event's `ts` until it is sent; 13 digits, as any time from 2001 to 2286 in ms."""
_REMEMBERED_USERS = 100_000


class Catalogue:
    """Item ids that seeds draw slates from."""

    def __init__(self, ids: Sequence[str]) -> None:
        if not ids:
            raise ValueError("the catalogue of items is empty")
        self._ids = ids

    @classmethod
    def read(cls, path: Path) -> Self:
        """One id a line, or a JSON object whose keys are ids, or a JSON list of ids."""
        text = path.read_text()
        if text.lstrip().startswith(("{", "[")):
            return cls(list(msgspec.json.decode(text)))
        return cls(text.split())

    @classmethod
    def numbered(cls, count: int) -> Self:
        """`item-0` and so on."""
        return cls([f"item-{number}" for number in range(count)])

    def slate(self, seed: int, count: int) -> list[str]:
        """Distinct ids, the same for the same seed; fewer if there are not so many."""
        return random.Random(seed).sample(self._ids, min(count, len(self._ids)))


class Wire(msgspec.Struct, frozen=True, kw_only=True):
    """How records become requests."""

    target: Target
    catalogue: Catalogue
    rank_path: str = "/rank"
    events_path: str = "/v1/events"
    headers: dict[str, str] = {}
    run: str = "run"
    """Makes event ids of this run unlike those of any other."""


class Spool:
    """n requests in order of time, each a stretch of the mapped file."""

    def __init__(self, path: Path, index: dict[str, NDArray[np.generic]]) -> None:
        self.due_s: NDArray[np.float64] = index["due_s"].astype(np.float64)  # [n]
        self.kind: NDArray[np.uint8] = index["kind"].astype(np.uint8)  # [n], place in KINDS
        self.click: NDArray[np.bool_] = index["click"].astype(np.bool_)  # [n]
        self.user: NDArray[np.uint32] = index["user"].astype(np.uint32)  # [n], hashed
        # lists: reading one number of an array at a time would make a numpy scalar of each
        self._ends: list[int] = [0, *index["ends"].tolist()]
        """[n + 1]; request `n` lies between its place and the next."""
        self._stamps: list[int] = index["stamps"].tolist()
        """[n], place of the time stamp in the request, 0 if none."""
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self.due_s)

    def share(self, part: int, parts: int) -> NDArray[np.int64]:
        """Which requests are one generator's: a user's all are, so their order holds."""
        return np.flatnonzero(self.user % parts == part)

    def request(self, at: int, now_ms: int) -> bytes:
        """The bytes to send, an event stamped with the time of sending."""
        request = self._bytes[self._ends[at] : self._ends[at + 1]]
        if place := self._stamps[at]:
            return b"%b%013d%b" % (request[:place], now_ms, request[place + STAMP_DIGITS :])
        return request

    @classmethod
    def build(cls, records: Iterable[Record], wire: Wire, folder: Path, *, total: int) -> Self:
        """Write `requests.bin` and its index below `folder`, with progress on a terminal."""
        path = folder / "requests.bin"
        due, ends, stamps = array("d"), array("Q"), array("I")
        kinds, users, clicks = array("B"), array("I"), array("B")
        last_slates: OrderedDict[str, list[str]] = OrderedDict()
        end = 0
        with path.open("wb") as file:
            for number, record in enumerate(records):
                request = _encode(record, wire, number, last_slates)
                end += file.write(request)
                due.append(record.timestamp / 1e3)
                ends.append(end)
                clicks.append(record.event == "click")
                kinds.append(KINDS.index(record.kind))
                users.append(zlib.crc32((record.user or str(number)).encode()))
                place = request.find(b"%d" % _STAMP) if record.kind == "event" else 0
                stamps.append(max(place, 0))
                if sys.stderr.isatty() and number % 5000 == 0:
                    print(f"\rbuilding requests: {number}/{total}", end="", file=sys.stderr)
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr)
        index = {
            "due_s": due,
            "kind": kinds,
            "user": users,
            "click": clicks,
            "ends": ends,
            "stamps": stamps,
        }
        columns = {name: np.asarray(of) for name, of in index.items()}
        np.savez(folder / "index.npz", allow_pickle=False, **columns)
        return cls.open(folder)

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Map what `build` wrote."""
        with np.load(folder / "index.npz") as file:
            return cls(folder / "requests.bin", {name: file[name] for name in file.files})


def _encode(
    record: Record, wire: Wire, number: int, last_slates: OrderedDict[str, list[str]]
) -> bytes:
    path, body = record.path, record.body
    if record.kind == "rank":
        path = wire.rank_path
        items = record.items
        if items is None:
            assert record.items_seed is not None
            assert record.items_count is not None
            items = wire.catalogue.slate(record.items_seed, record.items_count)
        last_slates[record.user] = items
        last_slates.move_to_end(record.user)
        if len(last_slates) > _REMEMBERED_USERS:
            last_slates.popitem(last=False)
        if body is None:
            body = _rank_body(record, items)
    elif record.kind == "event":
        path = wire.events_path
        if body is None:
            body = _event_body(record, wire, number, last_slates)
    method = record.method or "POST"
    if body is None:
        content = b""
    else:
        content = body.encode() if isinstance(body, str) else msgspec.json.encode(body)
    return wire.target.encode(method, path, content, wire.headers)


def _rank_body(record: Record, items: list[str]) -> dict[str, Any]:
    body: dict[str, Any] = {"user_id": record.user, "items": items}
    if record.surface:
        body["context"] = {"surface": record.surface}
    if record.priority:
        body["priority"] = record.priority
    if record.deadline_ms is not None:
        body["timeout_ms"] = record.deadline_ms
    return body


def _event_body(
    record: Record, wire: Wire, number: int, last_slates: OrderedDict[str, list[str]]
) -> dict[str, Any]:
    item = record.item
    if item is None:
        shown = last_slates.get(record.user) or wire.catalogue.slate(number, 1)
        item = shown[number % len(shown)]
    last_slates[record.user] = [item]  # a dwell follows the click on the same item
    body: dict[str, Any] = {
        "event_id": f"{wire.run}-{number}",
        "type": record.event,
        "user_id": record.user,
        "item_id": item,
        "ts": _STAMP,
    }
    if record.event == "dwell":
        body["dwell_ms"] = record.dwell_ms
    return body
