"""A canary under real requests is promoted if it is good, and rolled back by itself if not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from redis.asyncio import Redis

from service.bundle import Bundle
from service.domain import Event, Float32Array
from service.encoding.batch import Batch
from service.errors import BackendRecoverable
from service.inference.backends.base import Backend
from service.ranking.admission import Admission, Deadline
from service.ranking.onlookers import Onlookers
from service.ranking.query import Query, Ranking
from service.ranking.ranker import Ranker
from service.signals.store import SignalStore
from service.versions import rollout
from service.versions.catalog import Catalog
from service.versions.fleet import RedisFleet
from service.versions.follow import Decision, Follower
from service.versions.gates import Gates
from service.versions.hotswap import open_version
from service.versions.loaded import LoadedVersion
from service.versions.roles import Versions
from service.versions.rollout import CanaryWish
from service.versions.shadow import Shadow
from service.versions.swaps import SwapReport, Swaps
from service.versions.traffic import Traffic
from tests.bundles import copy_bundle, other_bundle

pytestmark = pytest.mark.alone

ITEMS = [f"sku-{number:05}" for number in range(40)]
Score = Callable[[Backend, Batch], Float32Array]


class Spoilt:
    """A real engine, made slow or failing: the one seam where a fault is forced."""

    def __init__(self, engine: Backend, score: Score) -> None:
        self.name, self.kind, self.precision = engine.name, engine.kind, engine.precision
        self.close = engine.close
        self._engine = engine
        self._score = score

    def score(self, batch: Batch) -> Float32Array:
        return self._score(self._engine, batch)


def slowly(engine: Backend, batch: Batch) -> Float32Array:
    time.sleep(0.1)
    return engine.score(batch)


def not_at_all(_engine: Backend, _batch: Batch) -> Float32Array:
    raise BackendRecoverable("spoilt on purpose")


class Rig:
    """One replica's parts without HTTP, whose canary's engine may be spoilt."""

    def __init__(self, bundles: Path, signals: SignalStore, client: Redis) -> None:
        self.spoil: Score | None = None
        self.reports: list[SwapReport] = []
        self.decisions: list[Decision] = []
        self.versions = Versions()
        self.traffic = Traffic()
        shadow = Shadow(self.versions)
        self.onlookers = Onlookers(traffic=self.traffic, shadow=shadow)
        self.free_bytes = 1 << 40
        self.swaps = Swaps(
            model="shop",
            versions=self.versions,
            catalog=Catalog(bundles),
            open_version=self._open,
            report=self.reports.append,
            headroom=lambda: self.free_bytes,
        )
        self.follower = Follower(
            swaps=self.swaps,
            fleet=RedisFleet(client, model="shop"),
            traffic=self.traffic,
            shadow=shadow,
            replica="here",
            first=lambda: ["v1"],
            decided=self.decisions.append,
        )
        self.ranker = Ranker(
            versions=self.versions,
            signals=signals,
            admission=Admission(max_in_flight=100),
            max_items=1_000,
            signals_budget_s=5,
        )
        self._users = 0

    def _open(self, bundle: Bundle) -> LoadedVersion:
        version = open_version(
            bundle, threads=1, backend="onnx-cpu", max_queue_s=10, samples=self.traffic.samples
        )
        if self.spoil is not None and bundle.manifest.version != "v1":
            for rung in version.executor.rungs:
                rung.backend = Spoilt(rung.backend, self.spoil)
        return version

    async def rank(self) -> Ranking:
        self._users += 1
        await asyncio.sleep(0)  # without a version, ranking itself never waits
        query = Query(items=[*ITEMS], user_id=f"user-{self._users}")
        started = time.monotonic()
        ranking = await self.ranker.rank(query, Deadline(30, received_s=started))
        ranking.times.total_s = time.monotonic() - started
        self.onlookers.answered(ranking)
        return ranking

    async def start_canary(self, version: str, *, step_ms: int = 60_000) -> None:
        canary = CanaryWish(
            version=version,
            steps=(20.0, 50.0),
            step_ms=step_ms,
            promote=True,
            gates=Gates(min_requests=60),
        )
        change = rollout.with_canary
        await self.follower.act(
            lambda wish: change(wish, canary, now_ms=time.time_ns() // 1_000_000),
            act="canary",
            by="test",
        )
        while self.versions.canary is None:
            await self.rank()

    async def until_decided(self) -> Decision:
        """Requests and looks in turn until the canary is promoted or rolled back."""
        for number in range(4_000):
            await self.rank()
            if number % 20 == 0:
                await self.follower.turn()
            if self.decisions and self.decisions[-1].fate != "advance":
                return self.decisions[-1]
        raise AssertionError(f"nothing was decided: {self.follower.verdict()}")


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    bundles = tmp_path_factory.mktemp("store")
    copy_bundle(bundles, "v1")
    copy_bundle(bundles, "v2")
    other_bundle(bundles, "other")
    return bundles


@pytest.fixture
async def rig(bundles: Path, store: SignalStore, valkey: Redis) -> AsyncIterator[Rig]:
    rig = Rig(bundles, store, valkey)
    await rig.follower.turn()
    await rig.follower.settled.wait()
    yield rig
    await rig.follower.close()


async def test_a_good_canary_climbs_and_is_promoted(rig: Rig) -> None:
    await rig.start_canary("v2", step_ms=1_000)
    # its engine is the primary's: latencies differ by the machine's noise alone
    decision = await rig.until_decided()
    assert decision.fate == "promote", decision
    assert [one.fate for one in rig.decisions] == ["advance", "promote"]
    while rig.versions.primary is None or rig.versions.primary.version != "v2":
        await rig.rank()
    assert rig.versions.names() == {"primary": "v2", "previous": "v1"}


@pytest.mark.parametrize(
    ("version", "spoil", "gate"),
    [("v2", slowly, "p99"), ("v2", not_at_all, "errors"), ("other", None, "score drift")],
    ids=["slow", "failing", "wrong"],
)
async def test_a_bad_canary_is_rolled_back_by_itself(
    rig: Rig, version: str, spoil: Score | None, gate: str
) -> None:
    rig.spoil = spoil
    await rig.start_canary(version)
    decision = await rig.until_decided()
    assert (decision.fate, decision.reason.partition(":")[0]) == ("rollback", gate)
    assert decision.numbers["requests"] >= 60
    while rig.versions.canary is not None:
        await rig.rank()
    assert rig.versions.names() == {"primary": "v1"}
    assert rig.follower.wish.reason.startswith(gate)


async def test_clicks_are_credited_to_the_version_that_ranked(rig: Rig) -> None:
    await rig.start_canary("v2")
    rankings = [await rig.rank() for _ in range(60)]
    by_canary = [one for one in rankings if one.model_version == "v2"]
    assert by_canary

    def click(ranking: Ranking) -> Event:
        return Event("u", ITEMS[0], "click", 1, ranking_id=ranking.ranking_id)

    elsewhere = Traffic()  # another replica, which ranked none of them
    elsewhere.follow(rig.follower.wish.canary, "v1")
    onlookers = Onlookers(traffic=elsewhere, shadow=Shadow(Versions()))
    onlookers.stored([click(one) for one in rankings] + [click(rankings[0])])
    canary, primary = elsewhere.counts()
    assert canary is not None
    assert primary is not None
    assert canary.clicked == len(by_canary)
    assert primary.clicked == len(rankings) - len(by_canary)


async def test_a_version_that_does_not_fit_into_memory_is_refused(rig: Rig) -> None:
    rig.free_bytes = 1 << 20
    await rig.follower.act(lambda wish: rollout.promoted(wish, "v2"), act="promote", by="test")
    while not rig.swaps.faults:
        await rig.rank()
    assert "NoHeadroom" in rig.swaps.faults["primary"].reason
    assert rig.reports[-1].outcome == "refused"
    assert (await rig.rank()).model_version == "v1"


async def test_preserving_resources_makes_room_and_still_never_fails(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rig.swaps, "_policy", "resource-preserving")
    rig.swaps._headroom = lambda: 1 << 40 if rig.versions.primary is None else 0
    await rig.follower.act(lambda wish: rollout.promoted(wish, "v2"), act="promote", by="test")
    seen = set()
    while "v2" not in seen:
        ranking = await rig.rank()
        seen.add(ranking.model_version or ",".join(ranking.degraded))
    assert seen <= {"v1", "warming", "v2"}
    assert rig.versions.names() == {"primary": "v2"}
