"""Swaps: makes the loaded versions what is wished. One load at a time, off the loop.

A version that cannot be served changes nothing; its fault stands under its role.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import msgspec

from service.bundle import Bundle, Manifest
from service.domain import BackendKind
from service.errors import NoHeadroom, NotFound, RankerError
from service.versions.catalog import Catalog
from service.versions.loaded import LoadedVersion
from service.versions.memory import headroom_bytes, needed_bytes
from service.versions.roles import Versions
from service.versions.rollout import Role, Wish

Wished = Role | Literal["backend"]
Policy = Literal["availability-preserving", "resource-preserving"]
Open = Callable[[Bundle], LoadedVersion]


class SwapReport(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt to give a role to a version, for telemetry."""

    role: Role
    model: str
    version: str
    replaced: str = ""
    outcome: Literal["done", "refused"]
    reason: str = ""
    started_s: float
    """On the monotonic clock."""
    load_s: float = 0.0
    """Open, verify, golden parity and warm-up; 0 where the version was loaded already."""
    total_s: float = 0.0


class Fault(msgspec.Struct, frozen=True):
    """Why a role, or the engine that is tried first, is not what is wished."""

    version: str
    reason: str


class Swaps:
    """Applies wishes to the roles of one model."""

    def __init__(
        self,
        *,
        model: str,
        versions: Versions,
        catalog: Catalog,
        open_version: Open,
        policy: Policy = "availability-preserving",
        previous_hot_s: float = 600.0,
        report: Callable[[SwapReport], None] = lambda _: None,
        headroom: Callable[[], int] = headroom_bytes,
    ) -> None:
        self.model = model
        self.versions = versions
        self.faults: dict[Wished, Fault] = {}
        self.loading: str | None = None
        self.retiring: set[asyncio.Task[None]] = set()
        self._backend: BackendKind | None = None
        self._catalog = catalog
        self._open = open_version
        self._policy = policy
        self._previous_hot_s = previous_hot_s
        self._previous_timer: asyncio.TimerHandle | None = None
        self._report = report
        self._headroom = headroom
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="load")

    async def apply(self, wish: Wish) -> None:
        """Bring every role to the wish, as far as this replica can; see `faults`.

        Changes that need no load come first. May be cancelled: a load on its way is then
        finished and thrown away.
        """
        self.faults = {}
        self._drop_unwished(wish)
        self._backend = wish.backend
        for held in self.versions.held():
            self._prefer(held)
        self.versions.canary_percent = wish.canary.percent if wish.canary is not None else 0.0
        for role, wanted in wish.roles().items():
            await self._give(role, wanted)
            if self.versions.primary is None:
                await self._give("primary", wish.previous)

    def _prefer(self, version: LoadedVersion) -> None:
        """Let a version try the wished engine first; one that has none stays as it is."""
        try:
            version.batcher.prefer(self._backend)
        except NotFound as error:
            self.faults["backend"] = Fault(version.version, f"{version.version}: {error}")

    def _drop_unwished(self, wish: Wish) -> None:
        for role, wanted in wish.roles().items():
            held: LoadedVersion | None = getattr(self.versions, role)
            # whoever is about to be the primary stays until it is
            keep = role == "primary" or held is None or held.version in {wanted, wish.primary}
            if not keep:
                self._assign(role, None)

    async def _give(self, role: Role, wanted: str | None) -> None:
        """Give a role to a version, loading it if need be; a fault is kept, not raised."""
        held: LoadedVersion | None = getattr(self.versions, role)
        if wanted is None or (held is not None and held.version == wanted):
            return
        started = time.monotonic()
        load_s = 0.0
        fault = ""
        try:
            version = self.versions.find(wanted)
            if version is None:
                version = await self._load(wanted)
                load_s = time.monotonic() - started
                self._prefer(version)
            self._assign(role, version)
        except RankerError as error:
            fault = f"{type(error).__name__}: {error}"
        except Exception as error:  # noqa: BLE001  the swap loop's boundary: one version fails
            fault = f"{type(error).__name__}: {error}"
        if fault:
            self.faults[role] = Fault(wanted, fault)
            if role == "primary":
                self.versions.fault = fault
        self._report(
            SwapReport(
                role=role,
                model=self.model,
                version=wanted,
                replaced=held.version if held is not None else "",
                outcome="refused" if fault else "done",
                reason=fault,
                started_s=started,
                load_s=load_s,
                total_s=time.monotonic() - started,
            )
        )

    async def _load(self, wanted: str) -> LoadedVersion:
        """Open a version on the loader's thread; cancelled, it closes what still comes."""
        self.loading = wanted
        loop = asyncio.get_running_loop()
        try:
            bundle = await loop.run_in_executor(
                self._loader, self._catalog.open, self.model, wanted
            )
            await self._make_room(bundle.manifest)
            opening = loop.run_in_executor(self._loader, self._open, bundle)
            try:
                return await asyncio.shield(opening)
            except asyncio.CancelledError:
                opening.add_done_callback(_throw_away)
                raise
        finally:
            self.loading = None

    async def _make_room(self, manifest: Manifest) -> None:
        """Free what the policy allows to; raises NoHeadroom where that is not enough."""
        needed = needed_bytes(manifest)
        if self._headroom() >= needed:
            return
        if self._policy == "resource-preserving":
            expendable: tuple[Role, ...] = ("previous", "standby", "shadow", "canary", "primary")
            for role in expendable:
                held: LoadedVersion | None = getattr(self.versions, role)
                if held is not None:
                    self.versions.fault = f"{manifest.version} is being loaded in its place"
                    setattr(self.versions, role, None)
                    if held not in self.versions.held():
                        await held.retire()
                if self._headroom() >= needed:
                    return
        free = self._headroom()
        if free < needed:
            raise NoHeadroom(
                f"{manifest.version} may need {needed >> 20} MiB, {free >> 20} MiB are free"
            )

    def _assign(self, role: Role, version: LoadedVersion | None) -> None:
        for unheld in self.versions.assign(role, version):
            self._retire(unheld)
        if role == "primary" and self.versions.previous is not None:
            if self._previous_timer is not None:
                self._previous_timer.cancel()
            self._previous_timer = asyncio.get_running_loop().call_later(
                self._previous_hot_s, self._assign, "previous", None
            )
        if version is not None:
            settle()

    def _retire(self, version: LoadedVersion) -> None:
        task = asyncio.get_running_loop().create_task(version.retire())
        self.retiring.add(task)
        task.add_done_callback(self.retiring.discard)

    @property
    def may_retry(self) -> bool:
        """Whether trying a refused version again cannot interrupt the one that serves."""
        return self._policy == "availability-preserving" or self.versions.primary is None

    async def close(self) -> None:
        """Let retiring versions drain, then retire the rest."""
        if self._previous_timer is not None:
            self._previous_timer.cancel()
        while self.retiring:
            await asyncio.gather(*self.retiring)
        await self.versions.close()
        self._loader.shutdown(wait=False)


def _throw_away(opening: asyncio.Future[LoadedVersion]) -> None:
    """Free what was loaded for nobody, off the loop: it joins threads and frees engines."""
    if not opening.cancelled() and opening.exception() is None:
        loop = asyncio.get_running_loop()
        loop.run_in_executor(None, opening.result().executor.close)


def settle() -> None:
    """Collect what a load left behind, then exempt what stays from every later collection.

    A full collection takes tens of ms with these libraries loaded; frozen objects are skipped.
    """
    gc.collect()
    gc.freeze()
