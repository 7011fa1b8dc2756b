"""The trace format: one JSON object a line, in order of time, plain, gzip or zstd.

A line is a ranking request, an event (so that freshness is part of the load), or any
other HTTP request. README.md lists the fields.
"""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, Literal, cast

import msgspec
import zstandard

EventType = Literal["impression", "click", "dwell"]
Kind = Literal["rank", "event", "http"]


class TraceFault(Exception):
    """A trace, or a source of one, that cannot be used: says which line, and why."""


class Record(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """One line of a trace."""

    timestamp: float
    """Milliseconds since the trace's start."""
    user: str = ""
    items: list[str] | None = None
    items_seed: int | None = None
    """With `items_count`, names a slate that is drawn from the replay's catalogue."""
    items_count: int | None = None
    surface: str = ""
    priority: str = ""
    deadline_ms: float | None = None
    event: EventType | None = None
    item: str | None = None
    """The item of an event; without it, one of the user's last slate."""
    dwell_ms: int = 0
    method: str = ""
    path: str = ""
    body: Any = None
    """Sent in the place of the body that is built: a string as it is, else as JSON."""

    def __post_init__(self) -> None:
        """Refuse a line that is not exactly one kind; msgspec makes it a ValidationError."""
        if self.timestamp < 0:
            raise ValueError("`timestamp` is negative")
        if (self.items_seed is None) != (self.items_count is None):
            raise ValueError("`items_seed` and `items_count` go together")
        if self.items_count is not None and self.items_count < 1:
            raise ValueError("`items_count` is less than 1")
        slates = (self.items is not None) + (self.items_seed is not None)
        kinds = slates + (self.event is not None) + bool(self.path)
        if kinds != 1:
            raise ValueError(
                "a line has one of `items`, `items_seed` with `items_count`, `event`, `path`"
            )
        if not self.path and not self.user:
            raise ValueError("`user` is missing")

    @property
    def kind(self) -> Kind:
        """What the line asks for."""
        if self.path:
            return "http"
        return "rank" if self.event is None else "event"


_decode = msgspec.json.Decoder(Record).decode
_encode = msgspec.json.Encoder().encode


def open_bytes(path: Path, mode: Literal["rb", "wb"]) -> IO[bytes]:
    """Open a file through the compression that its name tells: `.gz`, `.zst` or none."""
    if path.suffix == ".gz":
        return cast("IO[bytes]", gzip.GzipFile(path, mode))
    if path.suffix == ".zst":
        stream = zstandard.open(path, mode)
        return io.BufferedReader(stream) if mode == "rb" else cast("IO[bytes]", stream)
    return path.open(mode)


def read(path: Path) -> Iterator[Record]:
    """The records of a trace; raises TraceFault with the line's number."""
    before = 0.0
    number = 0
    try:
        with open_bytes(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    record = _decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    raise TraceFault(f"{path}, line {number}: {error}") from error
                if record.timestamp < before:
                    raise TraceFault(
                        f"{path}, line {number}: `timestamp` {record.timestamp:g} comes before "
                        f"the line above ({before:g}); lines are in order of time"
                    )
                before = record.timestamp
                yield record
    except (OSError, EOFError, zstandard.ZstdError) as error:
        raise TraceFault(f"{path}, after line {number}: {error}") from error


def write(path: Path, records: Iterable[Record]) -> int:
    """Write records, which must be in order of time; returns their count."""
    count = 0
    with open_bytes(path, "wb") as file:
        for count, record in enumerate(records, 1):  # noqa: B007 - the count is the answer
            file.write(_encode(record) + b"\n")
    return count


def in_order(records: Iterable[Record]) -> list[Record]:
    """Records sorted by time, the first one moved to time 0."""
    ordered = sorted(records, key=lambda record: record.timestamp)
    if not ordered:
        return ordered
    start = ordered[0].timestamp
    return [at(record, record.timestamp - start) for record in ordered]


def at(record: Record, timestamp: float) -> Record:
    """The same record at another time, to a microsecond."""
    return msgspec.structs.replace(record, timestamp=round(timestamp, 3))
