import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from loadtests.driving.client import Client
from loadtests.driving.target import Target

Conversation = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


@asynccontextmanager
async def client_of(
    conversation: Conversation, *, max_connections: int = 4, timeout_s: float = 2
) -> AsyncIterator[Client]:
    conversations = set()

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        conversations.add(asyncio.current_task())
        with suppress(ConnectionError):
            await conversation(reader, writer)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(converse, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    target = Target.parse(f"http://{host}:{port}")
    client = Client(target, max_connections=max_connections, timeout_s=timeout_s)
    try:
        yield client
    finally:
        await client.close()
        await asyncio.sleep(0.01)  # lets a conversation begin whose connection was just accepted
        server.close()
        await asyncio.gather(*filter(None, conversations))


async def one_request(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return b""


async def test_a_connection_is_used_again_until_the_server_closes_it() -> None:
    connections = 0

    async def twice(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await one_request(reader)
        writer.write(OK)
        await one_request(reader)
        writer.write(OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))

    async with client_of(twice) as client:
        replies = [await client.request("GET", "/") for _ in range(4)]

    assert [(reply.status, reply.body) for reply in replies] == [(200, b"ok")] * 4
    assert connections == 2


async def test_chunks_split_anywhere_and_interim_answers_make_one_reply() -> None:
    answer = (
        b"HTTP/1.1 103 Early Hints\r\nlink: a\r\n\r\n"
        b"HTTP/1.1 503 Gone Away\r\nRetry-After: 1\r\ntransfer-encoding: chunked\r\n\r\n"
        b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    )

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await one_request(reader)
        for at in range(len(answer)):
            writer.write(answer[at : at + 1])
            await asyncio.sleep(0)

    async with client_of(drip) as client:
        reply = await client.request("GET", "/")

    assert (reply.status, reply.body, reply.ok) == (503, b"abcde", False)
    assert reply.headers[b"retry-after"] == b"1"
    assert b"link" not in reply.headers


async def test_a_body_without_length_ends_with_the_connection() -> None:
    async def until_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await one_request(reader)
        writer.write(b"HTTP/1.0 200 OK\r\n\r\nall of it")

    async with client_of(until_close) as client:
        reply = await client.request("GET", "/")

    assert (reply.status, reply.fault, reply.body) == (200, "", b"all of it")


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (b"", "reset"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf", "reset"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "protocol"),
    ],
)
async def test_a_broken_answer_is_a_fault_and_no_status(answer: bytes, fault: str) -> None:
    async def broken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await one_request(reader)
        writer.write(answer)

    async with client_of(broken) as client:
        reply = await client.request("GET", "/")

    assert (reply.status, reply.fault) == (0, fault)


async def test_a_refused_port_is_a_fault_of_each_request() -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    target = Target.parse(f"http://127.0.0.1:{port}")
    client = Client(target, max_connections=2, timeout_s=2)
    replies = await asyncio.gather(*(client.request("GET", "/") for _ in range(5)))

    assert [reply.fault for reply in replies] == ["refused"] * 5


async def test_past_its_time_a_request_is_a_timeout_and_one_without_connection_unsent() -> None:
    asked = 0

    async def silent(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        nonlocal asked
        while await one_request(reader):
            asked += 1

    async with client_of(silent, max_connections=2, timeout_s=0.1) as client:
        replies = await asyncio.gather(*(client.request("GET", "/") for _ in range(5)))

    assert sorted(reply.fault for reply in replies) == ["timeout"] * 2 + ["unsent"] * 3
    assert all(reply.sent_s == 0 for reply in replies if reply.fault == "unsent")
    assert asked == 2


async def test_a_waiting_request_takes_the_first_connection_that_is_free() -> None:
    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await one_request(reader):
            await asyncio.sleep(0.01)
            writer.write(OK)

    async with client_of(slow, max_connections=1) as client:
        replies = await asyncio.gather(*(client.request("GET", "/") for _ in range(5)))

    assert [reply.status for reply in replies] == [200] * 5
    sent = [reply.sent_s for reply in replies]
    assert sent == sorted(sent)


@pytest.mark.parametrize("url", ["127.0.0.1:80", "ftp://host", "http://"])
def test_a_target_without_scheme_or_host_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="is not an http or https URL"):
        Target.parse(url)


def test_a_request_names_its_host_and_length_below_the_base_path() -> None:
    request = Target.parse("http://h:81/base/").encode("POST", "/rank", b"{}", {"X-A": "1"})

    head, body = request.split(b"\r\n\r\n")
    assert body == b"{}"
    assert head.split(b"\r\n") == [
        b"POST /base/rank HTTP/1.1",
        b"host: h:81",
        b"content-type: application/json",
        b"content-length: 2",
        b"x-a: 1",
    ]
