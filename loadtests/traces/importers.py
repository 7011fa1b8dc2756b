"""Traces from what others recorded: nginx logs, GoReplay files, HAR, Mooncake JSON lines.

Each importer yields records in the source's order with absolute times in milliseconds;
`trace.in_order` makes a trace of them. A line that cannot be read is a TraceFault.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import httptools
import msgspec

from loadtests.traces.trace import Record, TraceFault, open_bytes

_NGINX = re.compile(
    r'(?P<who>\S+) \S+ \S+ \[(?P<when>[^\]]+)\] "(?P<method>[A-Z]+) (?P<path>\S+)[^"]*" \d{3} '
)
_GOR_BREAK = "\n🐵🙈🙉\n".encode()


def nginx(path: Path) -> Iterator[Record]:
    """Lines of nginx's `combined` format; the time may also be `$msec`. Bodies are not logged."""
    with open_bytes(path, "rb") as file:
        for number, raw in enumerate(file, 1):
            line = raw.decode(errors="replace")
            match = _NGINX.match(line)
            if match is None:
                raise TraceFault(f"{path}, line {number}: not nginx's combined format: {line!r}")
            try:
                when_ms = _nginx_ms(match["when"])
            except ValueError as error:
                raise TraceFault(f"{path}, line {number}: the time: {error}") from error
            yield Record(
                timestamp=when_ms, user=match["who"], method=match["method"], path=match["path"]
            )


def _nginx_ms(when: str) -> float:
    if when.replace(".", "").isdigit():
        return float(when) * 1e3
    return datetime.strptime(when, "%d/%b/%Y:%H:%M:%S %z").timestamp() * 1e3


def goreplay(path: Path) -> Iterator[Record]:
    """Requests of a `.gor` file: payloads of type 1, each after its line of type, id and ns."""
    with open_bytes(path, "rb") as file:
        payloads = file.read().split(_GOR_BREAK)
    for number, payload in enumerate(payloads, 1):
        head, _, request = payload.lstrip(b"\n").partition(b"\n")
        words = head.split()
        if not words or words[0] != b"1":  # 2 and 3 are answers
            continue
        try:
            yield _parse_request(request, int(words[2]) / 1e6)
        except (ValueError, IndexError, httptools.HttpParserError) as error:
            raise TraceFault(f"{path}, payload {number}: {error!r}") from error


class _Request:
    def __init__(self) -> None:
        self.path = b""
        self.body = b""

    def on_url(self, url: bytes) -> None:
        self.path += url

    def on_body(self, chunk: bytes) -> None:
        self.body += chunk


def _parse_request(request: bytes, when_ms: float) -> Record:
    parsed = _Request()
    parser = httptools.HttpRequestParser(parsed)
    parser.feed_data(request)
    method = parser.get_method().decode()
    return _request(when_ms, method, parsed.path.decode(), parsed.body.decode())


def _request(when_ms: float, method: str, path: str, body: str) -> Record:
    return Record(timestamp=when_ms, method=method, path=path or "/", body=body or None)


class _Post(msgspec.Struct):
    text: str = ""


class _HarRequest(msgspec.Struct, rename="camel"):
    method: str
    url: str
    post_data: _Post | None = None


class _HarEntry(msgspec.Struct, rename="camel"):
    started_date_time: datetime
    request: _HarRequest


class _HarLog(msgspec.Struct):
    entries: list[_HarEntry]


class _Har(msgspec.Struct):
    log: _HarLog


def har(path: Path) -> Iterator[Record]:
    """Requests of an HTTP archive, as browsers save it; all hosts alike."""
    with open_bytes(path, "rb") as file:
        try:
            archive = msgspec.json.decode(file.read(), type=_Har)
        except msgspec.DecodeError as error:
            raise TraceFault(f"{path}: not a HAR file: {error}") from error
    for entry in archive.log.entries:
        request = entry.request
        _, _, after = request.url.partition("://")
        _, slash, rest = after.partition("/")
        body = request.post_data.text if request.post_data is not None else ""
        when_ms = entry.started_date_time.timestamp() * 1e3
        yield _request(when_ms, request.method, slash + rest, body)


class _Mooncake(msgspec.Struct):
    timestamp: float
    input_length: int
    hash_ids: list[int] = []


def mooncake(path: Path, *, tokens_per_item: int = 100) -> Iterator[Record]:
    """Mooncake-style lines as rankings: the first prefix block is the user, length the slate."""
    with open_bytes(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                given = msgspec.json.decode(line, type=_Mooncake)
            except msgspec.DecodeError as error:
                raise TraceFault(f"{path}, line {number}: {error}") from error
            yield Record(
                timestamp=given.timestamp,
                user=f"u{given.hash_ids[0] if given.hash_ids else number}",
                items_seed=number,
                items_count=min(max(round(given.input_length / tokens_per_item), 1), 1000),
            )


def as_rankings(records: Iterable[Record], *, slate: int) -> Iterator[Record]:
    """Requests of another service as rankings at the same times by the same users."""
    for number, record in enumerate(records):
        who = record.user or f"{zlib.crc32(record.path.encode()):08x}"
        yield Record(timestamp=record.timestamp, user=who, items_seed=number, items_count=slate)


SOURCES: dict[str, Callable[..., Iterator[Record]]] = {
    "nginx": nginx,
    "gor": goreplay,
    "har": har,
    "mooncake": mooncake,
}


def read(source: str, path: Path, **options: Any) -> Iterator[Record]:
    """Records of one source; raises TraceFault, also where the file cannot be opened."""
    try:
        yield from SOURCES[source](path, **options)
    except OSError as error:
        raise TraceFault(f"{path}: {error}") from error
