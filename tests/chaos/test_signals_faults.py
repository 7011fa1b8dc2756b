"""Redis away, silent, slow or broken: reads degrade in time, writes say so, nobody is mixed up."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable

import pytest
from redis.asyncio import Redis

from service.domain import EMPTY_STATE, Event, UserState
from service.errors import SignalFault
from service.signals.breaker import Breaker
from service.signals.connect import connect
from service.signals.store import SignalStore
from tests.chaos.fault_proxy import FaultProxy

NOW_MS = 1_717_171_717_123
TIMEOUT_S = 3.0
BUDGET_S = 0.05
MARGIN_S = 1.5
"""For a busy machine; far below the timeouts that would show if a bound were missing."""


@pytest.fixture
async def proxy(valkey_url: str) -> AsyncIterator[FaultProxy]:
    async with FaultProxy(valkey_url) as proxy:
        yield proxy


@pytest.fixture
async def store(proxy: FaultProxy) -> AsyncIterator[SignalStore]:
    client = connect(f"redis://127.0.0.1:{proxy.port}/0", timeout_s=TIMEOUT_S, max_connections=16)
    store = SignalStore(client, budget_s=5.0, breaker=Breaker(failures=3, open_s=0.1))
    yield store
    await store.close()


async def fetch(store: SignalStore, user: str = "known", budget_s: float = BUDGET_S) -> UserState:
    return await store.fetch(user, token=None, budget_s=budget_s)


async def write(store: SignalStore, user: str = "known", event_id: str | None = None) -> None:
    await store.write([Event(user, f"item-of-{user}", "click", NOW_MS, event_id=event_id)])


async def know(store: SignalStore) -> None:
    await write(store)
    state = await fetch(store, budget_s=5.0)
    assert state.source == "redis"
    assert len(state.signals) == 1


async def assert_degrades_in_time(store: SignalStore) -> None:
    start_s = time.monotonic()
    known, unknown = await asyncio.gather(fetch(store), fetch(store, "unknown"))
    assert time.monotonic() - start_s < BUDGET_S + MARGIN_S
    assert (known.source, known.stale) == ("local", True)
    assert [signal.item_id for signal in known.signals] == ["item-of-known"]
    assert unknown == EMPTY_STATE


async def fetch_until(
    store: SignalStore, expected: Callable[[UserState], bool], budget_s: float
) -> None:
    async with asyncio.timeout(10):
        while True:
            if expected(await fetch(store, budget_s=budget_s)):
                return
            await asyncio.sleep(0.01)


async def assert_recovers(store: SignalStore) -> None:
    await fetch_until(store, lambda state: state.source == "redis", budget_s=1.0)
    assert store.breaker.state == "closed"
    await write(store, "later")
    assert (await fetch(store, "later", budget_s=5.0)).source == "redis"


async def test_a_refused_port(store: SignalStore, proxy: FaultProxy) -> None:
    await know(store)
    proxy.refuse()
    for _ in range(5):
        await assert_degrades_in_time(store)
    assert store.breaker.state in ("open", "half_open")
    with pytest.raises(SignalFault):
        await write(store)
    await proxy.accept()
    await assert_recovers(store)


async def test_a_server_that_falls_silent(store: SignalStore, proxy: FaultProxy) -> None:
    await know(store)
    proxy.black_hole = True
    for _ in range(3):
        await assert_degrades_in_time(store)
    with pytest.raises(SignalFault):
        await write(store)
    await fetch_until(store, lambda _: store.breaker.state != "closed", budget_s=BUDGET_S)
    start_s = time.monotonic()
    for _ in range(200):
        await fetch(store)
    assert time.monotonic() - start_s < 200 * BUDGET_S / 2, "an open breaker answers at once"
    proxy.heal()
    await assert_recovers(store)


async def test_an_answer_later_than_the_budget_still_refreshes_the_copy(
    store: SignalStore, proxy: FaultProxy, valkey: Redis
) -> None:
    await know(store)
    await valkey.lpush("signals:{known}", '{"i":"newer","a":"click","t":1}')
    connections = proxy.connections
    proxy.delay_s = 2 * BUDGET_S
    state = await fetch(store)
    assert (state.source, len(state.signals)) == ("local", 1)
    await fetch_until(store, lambda late: len(late.signals) == 2, budget_s=0)
    assert store.breaker.state == "closed", "slower than a reader's patience is no failure"
    assert proxy.connections == connections, "readers who left cost no connection"


async def test_a_reader_who_is_cancelled_costs_no_connection(
    store: SignalStore, proxy: FaultProxy
) -> None:
    await know(store)
    connections = proxy.connections
    proxy.delay_s = 0.02
    for _ in range(10):
        reading = asyncio.create_task(fetch(store, budget_s=5.0))
        writing = asyncio.create_task(write(store, "other"))
        await asyncio.sleep(0.005)
        reading.cancel()
        writing.cancel()
        await asyncio.wait([reading, writing])
        assert reading.cancelled()
        assert writing.cancelled()
    proxy.heal()
    assert (await fetch(store, budget_s=5.0)).source == "redis"
    assert proxy.connections <= connections + 4 + 2, "opened for company, not for repair"
    assert store.breaker.state == "closed"


@pytest.mark.parametrize("fault", ["reset", "truncate", "half_close"])
async def test_a_connection_broken_in_the_middle_of_a_reply(
    store: SignalStore, proxy: FaultProxy, fault: str
) -> None:
    await know(store)
    if fault == "truncate":
        proxy.truncate_bytes = 10
        state = await fetch(store, budget_s=5.0)
    else:
        proxy.delay_s = 0.1
        reading = asyncio.create_task(fetch(store, budget_s=5.0))
        await asyncio.sleep(0.03)
        proxy.reset() if fault == "reset" else proxy.half_close()
        state = await reading
    assert (state.source, state.stale) == ("local", True)
    proxy.heal()
    await assert_recovers(store)


@pytest.mark.parametrize("fault", ["reset", "half_close"])
async def test_a_connection_that_ended_while_idle_is_replaced_unnoticed(
    store: SignalStore, proxy: FaultProxy, fault: str
) -> None:
    await know(store)
    proxy.reset() if fault == "reset" else proxy.half_close()
    await asyncio.sleep(0.05)
    assert (await fetch(store, budget_s=5.0)).source == "redis"


async def test_an_unasked_reply_closes_the_connection_instead_of_shifting_answers(
    store: SignalStore, proxy: FaultProxy
) -> None:
    await know(store)
    connections = proxy.connections
    [connection] = store._exchange._idle  # type: ignore[attr-defined]
    await connection.send_command("GET", "signals:unasked")  # as a lost reader would leave it
    await asyncio.sleep(0.05)
    state = await fetch(store, budget_s=5.0)
    assert [signal.item_id for signal in state.signals] == ["item-of-known"]
    assert proxy.connections == connections + 1


async def test_a_write_that_timed_out_can_be_repeated(
    store: SignalStore, proxy: FaultProxy, valkey: Redis
) -> None:
    await know(store)
    proxy.delay_s = 2 * TIMEOUT_S
    with pytest.raises(SignalFault):
        await write(store, event_id="once")
    assert await valkey.zcard("seen:{known}") == 1, "taken, although not acknowledged"
    proxy.heal()
    again = await store.write([Event("known", "x", "click", NOW_MS, event_id="once")])
    assert (again.accepted, again.duplicates) == (0, 1)
    state = await store.fetch("known", token=again.token, budget_s=5.0)
    assert (state.source, state.stale) == ("redis", False)


async def test_no_reply_reaches_another_user_whatever_breaks(
    store: SignalStore, proxy: FaultProxy
) -> None:
    users = [f"u{n}" for n in range(40)]
    await store.write([Event(user, f"item-of-{user}", "click", NOW_MS) for user in users])
    rng = random.Random(7)
    sources = {"redis": 0, "local": 0, "none": 0}

    async def reader(user: str) -> None:
        while sources["redis"] < 400 or sources["local"] < 200:
            budget_s = rng.choice([0.002, 0.02, 0.5])
            state = await fetch(store, user, budget_s)
            assert {signal.item_id for signal in state.signals} <= {f"item-of-{user}"}
            assert state.signals or state.source == "none"
            sources[state.source] += 1
            await asyncio.sleep(rng.random() * 0.01)

    async def breaker_of_things() -> None:
        while True:
            proxy.heal()
            fault = rng.choice(
                ["none", "delay", "jitter", "truncate", "black_hole", "reset", "half_close"]
            )
            if fault == "none":
                pass
            elif fault == "delay":
                proxy.delay_s = 0.005
            elif fault == "jitter":
                proxy.jitter_s = 0.03
            elif fault == "truncate":
                proxy.truncate_bytes = rng.randrange(1, 500)
            elif fault == "black_hole":
                proxy.black_hole = True
            elif fault == "reset":
                proxy.reset()
            else:
                proxy.half_close()
            await asyncio.sleep(rng.random() * 0.05)

    chaos = asyncio.create_task(breaker_of_things())
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for user in users:
            group.create_task(reader(user))
    chaos.cancel()
    await asyncio.wait([chaos])
    proxy.heal()
    await assert_recovers(store)


@pytest.mark.parametrize("word", ["LOADING Redis is loading", "NOAUTH Authentication required."])
async def test_a_server_that_refuses_after_its_first_reply_has_failed(word: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while command := await reader.read(65_536):
            asked = command.count(b"LRANGE")
            for _ in range(command.count(b"CLIENT") + command.count(b"SELECT")):
                writer.write(b"+OK\r\n")
            if asked:
                writer.write(b"*0\r\n" + f"-{word}\r\n".encode() * (2 * asked - 1))
        writer.close()

    breaker = Breaker(failures=1, open_s=10)
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = connect(f"redis://127.0.0.1:{port}/0", timeout_s=TIMEOUT_S, max_connections=16)
    store = SignalStore(client, budget_s=5.0, breaker=breaker)
    async with server:
        assert await fetch(store, budget_s=5.0) == EMPTY_STATE
        assert breaker.state == "open"
        await store.close()
