"""CPU of one `SignalStore.fetch`: `python -m loadtests.bench_signals`.

Starts its own Valkey; 50 records a user. Counts this process's CPU time, not Valkey's.
"""

from __future__ import annotations

import asyncio
import time

import msgspec
import uvloop
from redis.asyncio import Redis

from service.domain import Event, Signal
from service.signals.breaker import Breaker
from service.signals.connect import connect
from service.signals.embedded import embedded_valkey
from service.signals.exchange import Command, exchange_with
from service.signals.keys import keys_of
from service.signals.records import decode_records, encode_signal
from service.signals.store import SignalStore

RECORDS = 50
FETCHES = 20_000
EVENTS = 4_000
CONCURRENCIES = (1, 8, 32, 128)
NOW_MS = 1_717_171_717_123


def signal(n: int) -> Signal:
    return Signal(f"item-{n:05d}", "dwell", NOW_MS + n, 5400 + n, "home")


async def fetch_in_turn(store: SignalStore, users: list[str], fetches: int) -> None:
    for n in range(fetches):
        state = await store.fetch(users[n % len(users)], token=None, budget_s=5.0)
        assert len(state.signals) == RECORDS


async def measure_round_trip(client: Redis, users: list[str]) -> None:
    """The exchange against redis-py's own pipeline, both without decoding."""
    exchange = exchange_with(client, Breaker())
    print("users  exchange  redis-py pipeline (CPU us a user)")
    for count in (1, 32):
        keys = [keys_of(user) for user in users[:count]]
        commands: list[Command] = [("LRANGE", key.signals, 0, RECORDS - 1) for key in keys]
        commands += [("GET", key.profile) for key in keys]

        async def by_pipeline(commands: list[Command] = commands) -> None:
            pipeline = client.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            await pipeline.execute()

        async def by_exchange(commands: list[Command] = commands) -> None:
            await exchange(commands)

        cpu_us = []
        for way in (by_exchange, by_pipeline):
            await way()
            start_s = time.process_time()
            for _ in range(FETCHES // 4 // count):
                await way()
            cpu_us.append((time.process_time() - start_s) / (FETCHES // 4) * 1e6)
        print(f"{count:5d}  {cpu_us[0]:8.1f}  {cpu_us[1]:17.1f}")
    await exchange.close()


async def measure(url: str) -> None:
    client = connect(url, timeout_s=5.0, max_connections=16)
    assert isinstance(client, Redis)
    store = SignalStore(client, budget_s=5.0, breaker=Breaker(), keep=RECORDS)
    users = [f"user-{n:04d}" for n in range(256)]
    for user in users:
        await store.write(
            [
                Event(user, s.item_id, "dwell", s.at_ms, s.dwell_ms, surface=s.surface)
                for s in map(signal, range(RECORDS))
            ]
        )
    print("concurrency  CPU us a fetch  users a pipeline")
    for concurrency in CONCURRENCIES:
        store.counts.pipelines = store.counts.users = 0
        start_s = time.process_time()
        async with asyncio.TaskGroup() as group:
            for n in range(concurrency):
                group.create_task(
                    fetch_in_turn(store, users[n::concurrency], FETCHES // concurrency)
                )
        cpu_us = (time.process_time() - start_s) / FETCHES * 1e6
        counts = store.counts
        print(f"{concurrency:11d}  {cpu_us:14.1f}  {counts.users / counts.pipelines:16.1f}")

    start_s = time.process_time()
    for n in range(EVENTS):
        await store.write([Event(users[n % 256], f"new-{n}", "click", NOW_MS, event_id=str(n))])
    print(f"one write of one event: {(time.process_time() - start_s) / EVENTS * 1e6:.1f} us")
    await measure_round_trip(client, users)
    await store.close()


def measure_decode() -> None:
    records = [encode_signal(signal(n)) for n in range(RECORDS)]
    start_s = time.process_time()
    for _ in range(FETCHES):
        decode_records(records)
    cpu_us = (time.process_time() - start_s) / FETCHES * 1e6
    size = len(msgspec.json.encode([signal(n) for n in range(RECORDS)]))
    print(f"of this, decoding {RECORDS} records ({size} bytes): {cpu_us:.1f} us")


if __name__ == "__main__":
    with embedded_valkey() as url:
        uvloop.run(measure(url))
    measure_decode()
