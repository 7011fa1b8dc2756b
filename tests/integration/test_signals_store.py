"""Reading, writing and forgetting signals in a real Valkey."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence

import pytest
from redis.asyncio import Redis

from service.domain import EMPTY_STATE, Event, Profile, Signal, UserState
from service.errors import RequestFault, SignalFault
from service.signals.exchange import Command, Exchange, Reply
from service.signals.keys import keys_of
from service.signals.store import SignalStore
from service.signals.writes import Written

NOW_MS = 1_717_171_717_123
Fetch = asyncio.Task[UserState]


def click(user: str, item: str, *, at_ms: int = NOW_MS, event_id: str | None = None) -> Event:
    return Event(user, item, "click", at_ms, event_id=event_id)


async def fetch(store: SignalStore, user: str, token: str | None = None) -> UserState:
    return await store.fetch(user, token=token, budget_s=5.0)


def items(state: UserState) -> list[str]:
    return [signal.item_id for signal in state.signals]


async def test_a_written_event_is_read_back_newest_first(store: SignalStore) -> None:
    dwell = Event("u", "b", "dwell", NOW_MS + 1, dwell_ms=5400, surface="home")
    written = await store.write([click("u", "a"), dwell])
    state = await fetch(store, "u")
    assert (written.accepted, written.duplicates) == (2, 0)
    assert state.signals == (
        Signal("b", "dwell", NOW_MS + 1, 5400, "home"),
        Signal("a", "click", NOW_MS),
    )
    assert (state.source, state.stale) == ("redis", False)


async def test_a_new_user_is_an_answer_of_redis_with_no_signals(store: SignalStore) -> None:
    assert await fetch(store, "nobody") == UserState(source="redis")
    assert await fetch(store, "nobody") != EMPTY_STATE


async def test_a_foreign_producers_records_and_profile_are_read(
    store: SignalStore, valkey: Redis
) -> None:
    await valkey.lpush("signals:{u}", '{"i": "x", "a": "click", "t": 5, "extra": [1]}')
    await valkey.set("profile:{u}", '{"segments": ["sporty"], "extra": 1}')
    state = await fetch(store, "u")
    assert state.signals == (Signal("x", "click", 5),)
    assert state.profile == Profile(("sporty",))


async def test_garbage_is_skipped_and_counted(store: SignalStore, valkey: Redis) -> None:
    good = json.dumps({"i": "x", "a": "dwell", "t": 5, "d": 7})
    bad: list[str | bytes] = [
        "not json",
        b"\xff\xfe",
        "",
        "[1,2]",
        '{"i": 5, "a": "click", "t": 5}',
        '{"i": "x", "a": "impression", "t": 5}',
        '{"i": "x", "a": "click", "t": -1}',
        '{"i": "x", "a": "click", "t": 99999999999999999999}',
        '{"i": "x", "a": "click", "t": 5, "d": 1e99}',
    ]
    await valkey.lpush("signals:{u}", *bad, good)
    await valkey.set("profile:{u}", "garbage")
    state = await fetch(store, "u")
    assert state.signals == (Signal("x", "dwell", 5, 7),)
    assert state.source == "redis"
    assert store.counts.skipped_records == len(bad) + 1


async def test_keys_of_another_type_read_as_empty(store: SignalStore, valkey: Redis) -> None:
    await valkey.set("signals:{u}", "a string")
    await valkey.lpush("profile:{u}", "a list")
    assert await fetch(store, "u") == UserState(source="redis")
    assert store.breaker.state == "closed"


async def test_lists_are_trimmed_and_every_key_expires(store: SignalStore, valkey: Redis) -> None:
    await store.write([click("u", f"i{n}", event_id=f"e{n}") for n in range(1100)])
    keys = keys_of("u")
    assert items(await fetch(store, "u")) == [f"i{n}" for n in range(1099, 1049, -1)]
    assert await valkey.llen(keys.signals) == 50
    assert await valkey.zcard(keys.seen) == 1000
    for key in (keys.signals, keys.seen, keys.written):
        assert 30 * 86400 - 60 < await valkey.ttl(key) <= 30 * 86400


async def test_an_event_id_counts_once(store: SignalStore) -> None:
    first = await store.write([click("u", "a", event_id="1"), click("u", "b", event_id="1")])
    again = await store.write([click("u", "a", event_id="1"), click("u", "c", event_id="2")])
    assert (first.accepted, first.duplicates) == (1, 1)
    assert (again.accepted, again.duplicates) == (1, 1)
    assert items(await fetch(store, "u")) == ["c", "a"]


async def test_impressions_are_accepted_deduplicated_and_not_stored(store: SignalStore) -> None:
    seen = Event("u", "a", "impression", NOW_MS, event_id="1")
    written = await store.write([seen, seen, Event("u", "a", "impression", NOW_MS)])
    assert (written.accepted, written.duplicates) == (2, 1)
    assert await fetch(store, "u", written.token) == UserState(source="redis")


async def test_a_script_that_redis_has_lost_is_loaded_again(
    store: SignalStore, valkey: Redis
) -> None:
    await store.write([click("u", "a")])
    await valkey.script_flush()
    await store.write([click("u", "b"), click("v", "c")])
    assert items(await fetch(store, "u")) == ["b", "a"]
    assert items(await fetch(store, "v")) == ["c"]


async def test_forgetting_removes_every_key_and_the_local_copy(
    store: SignalStore, valkey: Redis
) -> None:
    await store.write([click("u", "a", event_id="1"), click("v", "b")])
    await valkey.set("profile:{u}", '{"segments": ["x"]}')
    await fetch(store, "u")
    assert store.local.get("u") is not None
    await store.forget("u")
    assert store.local.get("u") is None
    assert await valkey.keys("*{u}") == []
    assert items(await fetch(store, "v")) == ["b"]


class HeldExchange:
    """The real exchange, but its replies reach the readers only after `release`."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self.timeout_s = exchange.timeout_s
        self.release = asyncio.Event()
        self.answered = asyncio.Semaphore(0)

    async def __call__(self, commands: Sequence[Command]) -> list[Reply]:
        replies = await self._exchange(commands)
        self.answered.release()
        await self.release.wait()
        return replies

    async def close(self) -> None:
        await self._exchange.close()


async def held_reads(store: SignalStore, *users: str) -> tuple[HeldExchange, list[Fetch]]:
    """A pipeline for each user, read by Redis and on its way back."""
    held = HeldExchange(store._reads._exchange)
    store._reads._exchange = held
    reading = []
    for user in users:
        reading.append(asyncio.create_task(fetch(store, user)))
        await held.answered.acquire()
    return held, reading


async def test_an_answer_on_its_way_does_not_bring_a_forgotten_user_back(
    store: SignalStore,
) -> None:
    await store.write([click("u", "a"), click("v", "b")])
    held, reading = await held_reads(store, "u", "v")
    await store.forget("u")
    held.release.set()
    await asyncio.gather(*reading)
    assert store.local.get("u") is None
    assert store.local.get("v") is not None


async def test_readers_who_left_while_every_pipeline_was_busy_are_not_read(
    store: SignalStore, valkey: Redis
) -> None:
    held, reading = await held_reads(store, "a", "b", "c", "d")
    left = await store.fetch("left", token=None, budget_s=0.01)
    staying = asyncio.create_task(fetch(store, "staying"))
    await asyncio.sleep(0.01)
    held.release.set()
    states = await asyncio.gather(*reading, staying)
    assert left == EMPTY_STATE
    assert [state.source for state in states] == ["redis"] * 5
    assert (store.counts.late, store.counts.pipelines) == (1, 5)
    assert (await valkey.info("commandstats"))["cmdstat_lrange"]["calls"] == 5


@pytest.mark.parametrize(
    "user", ["", "a b", "{x}", "}x", "%7Dx", "a}b{c", "日本", "\ud800", "x\r\n"]
)
async def test_any_user_id_has_keys_of_its_own(store: SignalStore, user: str) -> None:
    await store.write([click("x", "other"), click(user, "own", event_id="1")])
    assert items(await fetch(store, user)) == ["own"]
    await store.forget(user)
    assert items(await fetch(store, user)) == []
    assert items(await fetch(store, "x")) == ["other"]


async def test_a_token_of_this_user_is_covered_by_the_next_read(store: SignalStore) -> None:
    written = await store.write([click("u", "a"), click("v", "b")])
    for user in ("u", "v", "w"):
        assert not (await fetch(store, user, written.token)).stale


async def test_a_state_behind_its_token_is_read_twice_and_marked_stale(
    store: SignalStore, valkey: Redis
) -> None:
    await store.write([click("u", "a")])
    written = await store.write([click("u", "b")])
    await valkey.set(keys_of("u").written, 1)  # as after a fail-over that lost the last write
    pipelines = store.counts.pipelines
    state = await fetch(store, "u", written.token)
    assert (state.source, state.stale, items(state)) == ("redis", True, ["b", "a"])
    assert store.counts.pipelines == pipelines + 2


async def test_a_malformed_token_is_the_callers_fault(store: SignalStore) -> None:
    with pytest.raises(RequestFault, match="not a token") as fault:
        await fetch(store, "u", "not a token!")
    assert fault.value.field == "min_signal_token"


async def test_readers_that_arrive_together_share_one_pipeline(
    store: SignalStore, valkey: Redis
) -> None:
    await store.write([click(f"u{n}", f"i{n}") for n in range(40)])
    await valkey.config_resetstat()
    states = await asyncio.gather(*(fetch(store, f"u{n % 40}") for n in range(80)))
    assert [items(state) for state in states] == [[f"i{n % 40}"] for n in range(80)]
    assert store.counts.pipelines == 1
    assert store.counts.shared == 40
    stats = await valkey.info("commandstats")
    assert stats["cmdstat_lrange"]["calls"] == 40


async def test_readers_that_arrive_one_by_one_do_not_wait_for_company(store: SignalStore) -> None:
    for n in range(3):
        await fetch(store, f"u{n}")
    assert store.counts.pipelines == 3


async def test_a_crowd_is_read_by_a_bounded_number_of_connections(
    store: SignalStore, valkey: Redis
) -> None:
    others = (await valkey.info("clients"))["connected_clients"]
    await store.write([click(f"u{n}", f"i{n}") for n in range(1000)])
    states = await asyncio.gather(*(fetch(store, f"u{n}") for n in range(1000)))
    assert [items(state) for state in states] == [[f"i{n}"] for n in range(1000)]
    clients = (await valkey.info("clients"))["connected_clients"]
    assert clients - others <= 4 + 2  # pipelines and writers


async def test_a_busy_loop_is_not_taken_for_a_slow_redis(store: SignalStore) -> None:
    await store.write([Event(user="u", item_id="a", type="click", at_ms=1)])
    for _ in range(10):
        asking = asyncio.ensure_future(store.fetch("u", token=None, budget_s=0.01))
        for _ in range(4):
            await asyncio.sleep(0)
        time.sleep(0.03)  # the loop is busy for three budgets
        assert (await asking).source == "redis"
    assert store.counts.late == 0


async def test_writes_that_arrive_together_share_a_pipeline_and_none_is_refused(
    store: SignalStore, valkey: Redis
) -> None:
    others = (await valkey.info("clients"))["connected_clients"]
    written = await asyncio.gather(*(store.write([click(f"u{n}", f"i{n}")]) for n in range(400)))
    assert [each.accepted for each in written] == [1] * 400
    states = await asyncio.gather(
        *(fetch(store, f"u{n}", each.token) for n, each in enumerate(written))
    )
    assert [items(state) for state in states] == [[f"i{n}"] for n in range(400)]
    assert not any(state.stale for state in states)
    clients = (await valkey.info("clients"))["connected_clients"]
    assert clients - others <= 4 + 2  # pipelines and writers


async def test_a_slow_loop_does_not_turn_writes_away(store: SignalStore) -> None:
    async def hold_the_loop() -> None:
        for _ in range(20):
            time.sleep(0.02)
            await asyncio.sleep(0)

    holding = asyncio.create_task(hold_the_loop())
    written = await asyncio.gather(*(store.write([click(f"u{n}", "i")]) for n in range(100)))
    await holding
    assert [each.accepted for each in written] == [1] * 100


async def test_a_refused_write_does_not_hurt_its_neighbours(
    store: SignalStore, valkey: Redis
) -> None:
    await valkey.set("signals:{bad}", "not a list")
    bad, good = await asyncio.gather(
        store.write([click("bad", "i")]), store.write([click("good", "i")]), return_exceptions=True
    )
    assert isinstance(bad, SignalFault)
    assert isinstance(good, Written)
    assert good.accepted == 1
