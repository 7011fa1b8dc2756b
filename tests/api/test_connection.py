"""Requests in unusual pieces: each is answered once, whole, and in the order of asking."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import pytest

from tests.live import LiveService


@pytest.fixture
def line(shared_service: LiveService, api: httpx.Client) -> Iterator[socket.socket]:
    assert api.get("/readyz").status_code == 200
    where = urlsplit(shared_service.url)
    assert where.hostname is not None
    assert where.port is not None
    with socket.create_connection((where.hostname, where.port), timeout=30) as line:
        yield line


def request(name: str, *, path: str = "/rank", items: int = 3, more: bytes = b"") -> bytes:
    slate = [f"sku-{at:05d}" for at in range(items)]
    body = json.dumps({"user_id": "u1", "items": slate, "request_id": name}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n".encode()
    return head + more + b"\r\n" + body


def answers(line: socket.socket, count: int) -> list[tuple[int, dict[str, str], bytes]]:
    found = []
    with line.makefile("rb") as stream:
        for _ in range(count):
            status = int(stream.readline().split()[1])
            headers = {}
            while pair := stream.readline().strip():
                key, _, value = pair.decode().partition(": ")
                headers[key] = value
            found.append((status, headers, stream.read(int(headers["content-length"]))))
    return found


def test_a_body_in_single_bytes_is_one_request(line: socket.socket) -> None:
    for byte in request("slow"):
        line.sendall(bytes([byte]))
    ((status, headers, body),) = answers(line, 1)
    assert status == 200
    assert headers["x-request-id"] == "slow"
    assert len(json.loads(body)["items"]) == 3


def test_pipelined_requests_are_answered_in_their_order(line: socket.socket) -> None:
    large = b"x-padding: " + b"a" * 20_000 + b"\r\n"
    line.sendall(
        request("first")
        + request("second", path="/rank?by=the+framework", items=200)
        + request("third", items=1_000, more=large)
        + request("fourth")
    )
    found = answers(line, 4)
    assert [headers["x-request-id"] for _, headers, _ in found] == [
        "first",
        "second",
        "third",
        "fourth",
    ]
    assert [len(json.loads(body)["items"]) for *_, body in found] == [3, 200, 1_000, 3]


def test_a_body_past_the_short_ways_limit_is_ranked_too(line: socket.socket) -> None:
    slate = [{"id": f"sku-{at:05d}", "features": {"author": "a" * 200}} for at in range(500)]
    body = json.dumps({"user_id": "u1", "items": slate}).encode()
    assert 65_536 < len(body) < 1_048_576
    line.sendall(b"POST /rank HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    line.sendall(request("next"))
    (status, _, ranked), (_, headers, _) = answers(line, 2)
    assert status == 200
    assert len(json.loads(ranked)["items"]) == 500
    assert headers["x-request-id"] == "next"


def test_a_caller_may_ask_for_the_last_answer(line: socket.socket) -> None:
    line.sendall(request("last", more=b"connection: close\r\n"))
    ((status, headers, _),) = answers(line, 1)
    assert (status, headers["connection"]) == (200, "close")
    assert line.recv(1) == b""


def test_an_expectation_is_met_before_the_body_is_sent(line: socket.socket) -> None:
    head, _, body = request("asked", more=b"expect: 100-continue\r\n").partition(b"\r\n\r\n")
    line.sendall(head + b"\r\n\r\n")
    assert line.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
    line.sendall(body)
    ((status, headers, _),) = answers(line, 1)
    assert (status, headers["x-request-id"]) == (200, "asked")
