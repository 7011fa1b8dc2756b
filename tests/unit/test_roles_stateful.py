"""Whatever happens in whatever order: one primary always, and no leased version closed."""

from __future__ import annotations

import asyncio
import gc
import weakref

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from service.bundle import BatchSpec, FileEntry, GoldenSpec, InputSpec, Manifest, OutputSpec
from service.encoding.rows import RowSpace
from service.inference.executor import Executor
from service.versions.loaded import LoadedVersion
from service.versions.roles import Versions
from service.versions.rollout import Role
from tests.unit.engines import ScriptedEngine

FILES = ("rank.onnx", "items.npz", "golden.npz")
SPEC = InputSpec(
    hash_seed=7, item1_rows=10, item2_rows=10, feature_rows=2_048, history_len=2, tile_width=2
)


def loaded(version: str, engine: ScriptedEngine, table: object = None) -> LoadedVersion:
    """A version around a scripted engine; its item table is never looked at."""
    manifest = Manifest(
        schema=1,
        name="shop",
        version=version,
        created_at="",
        input=SPEC,
        output=OutputSpec(),
        batch=BatchSpec(max_users=2, tile_buckets=(1, 2)),
        graphs={"fp32": "rank.onnx"},
        item_table="items.npz",
        golden=GoldenSpec(),
        files={file: FileEntry("", 1) for file in FILES},
    )
    return LoadedVersion(
        manifest=manifest,
        space=RowSpace(SPEC),
        table=table,  # type: ignore[arg-type]
        executor=Executor([engine], name=version),
        max_queue_s=1,
        report=lambda _: None,
    )


class Swapping(RuleBasedStateMachine):
    """Leases and role changes in any order, on a real loop with real device threads."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.versions = Versions()
        self.engines: dict[LoadedVersion, ScriptedEngine] = {}
        self.leases: list[LoadedVersion] = []
        self.retiring: list[asyncio.Task[None]] = []
        self._give("primary", self._new())

    def _new(self) -> LoadedVersion:
        engine = ScriptedEngine()
        version = loaded(f"v{len(self.engines)}", engine)
        self.engines[version] = engine
        return version

    def _give(self, role: Role, version: LoadedVersion | None) -> None:
        for unheld in self.versions.assign(role, version):
            self.retiring.append(self.loop.create_task(unheld.retire()))
        self._turn()

    def _turn(self) -> None:
        self.loop.run_until_complete(asyncio.sleep(0))

    @rule(role=st.sampled_from(["primary", "canary", "shadow", "standby"]))
    def load(self, role: Role) -> None:
        self._give(role, self._new())

    @rule(role=st.sampled_from(["canary", "shadow", "standby", "previous"]))
    def drop(self, role: Role) -> None:
        self._give(role, None)

    @precondition(lambda self: self.versions.canary is not None)
    @rule()
    def promote_the_canary(self) -> None:
        self._give("primary", self.versions.canary)

    @precondition(lambda self: self.versions.previous is not None)
    @rule()
    def roll_back(self) -> None:
        self._give("primary", self.versions.previous)

    @rule(user=st.integers(0, 99), percent=st.sampled_from([0.0, 30.0, 100.0]))
    def request(self, user: int, percent: float) -> None:
        self.versions.canary_percent = percent
        version = self.versions.pick(None, f"user-{user}")
        version.__enter__()
        self.leases.append(version)

    @precondition(lambda self: self.leases)
    @rule(at=st.integers(0, 1_000))
    def answer(self, at: int) -> None:
        self.leases.pop(at % len(self.leases)).__exit__(None, None, None)
        self._turn()

    @invariant()
    def one_primary_always(self) -> None:
        primary = self.versions.primary
        assert primary is not None
        assert self.versions.pick("shop@stable", "u") is primary

    @invariant()
    def no_leased_version_is_closed(self) -> None:
        assert not [version for version in self.leases if self.engines[version].closed]

    @invariant()
    def no_held_version_is_closed(self) -> None:
        assert not [held for held in self.versions.held() if held.closed]

    def teardown(self) -> None:
        for version in self.leases:
            version.__exit__(None, None, None)
        self.leases.clear()
        for task in self.retiring:
            self.loop.run_until_complete(task)
        self.loop.run_until_complete(self.versions.close())
        assert all(engine.closed for engine in self.engines.values())
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()


TestSwapping = Swapping.TestCase
TestSwapping.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


async def test_a_closed_version_is_freed_without_the_collector() -> None:
    version = loaded("v1", ScriptedEngine(), table=None)
    trace = weakref.ref(version)
    gc.collect()
    gc.disable()
    try:
        await version.retire()
        del version
        await asyncio.sleep(0)
        assert trace() is None
    finally:
        gc.enable()
