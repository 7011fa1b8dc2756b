"""One replica's model side, built from settings: catalog, roles, swaps, fleet, onlookers."""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from service.bundle import Bundle, Manifest
from service.errors import NotFound
from service.inference.batcher import BatchReport
from service.inference.outages import RungChange
from service.ranking.onlookers import Onlookers
from service.settings import Settings
from service.signals.connect import connect, disconnect
from service.versions.catalog import Catalog
from service.versions.fleet import FileFleet, Fleet, RedisFleet, replica_name
from service.versions.follow import Decision, Follower
from service.versions.hotswap import open_version
from service.versions.loaded import LoadedVersion
from service.versions.remote import RemoteStore
from service.versions.roles import Versions
from service.versions.shadow import Shadow
from service.versions.signature import check_signature
from service.versions.swaps import SwapReport, Swaps
from service.versions.traffic import Traffic

_log = logging.getLogger("ranker.swap")
_FLEET_TIMEOUT_S = 1.0
_CANCEL_AGAIN_S = 0.2


def log_swap(report: SwapReport) -> None:
    """One line a swap, done or refused."""
    level = logging.INFO if report.outcome == "done" else logging.ERROR
    _log.log(level, f"swap {report.outcome}", extra=msgspec.to_builtins(report))


class Watch(msgspec.Struct, frozen=True, kw_only=True):
    """Who is told of batches, rungs, swaps and decisions on canaries."""

    batches_of: Callable[[Manifest], Callable[[BatchReport], None]]
    """What takes the batches of one version."""
    rungs_of: Callable[[Manifest], Callable[[RungChange], None]] = lambda _: lambda _: None
    """What takes the changes of one version's rungs."""
    swapped: Callable[[SwapReport], None] = log_swap
    decided: Callable[[Decision], None] = lambda _: None


class Replica:
    """The versions that this process serves, and its place in the fleet."""

    def __init__(self, settings: Settings, *, watch: Watch) -> None:
        self.model = settings.model
        self.versions = Versions()
        self.catalog = _catalog(settings)
        self.traffic = Traffic()
        shadow = Shadow(self.versions)
        self.onlookers = Onlookers(traffic=self.traffic, shadow=shadow)
        self.swaps = Swaps(
            model=settings.model,
            versions=self.versions,
            catalog=self.catalog,
            open_version=functools.partial(self._open, settings, watch),
            policy=settings.swap_policy,
            previous_hot_s=settings.previous_hot_ms / 1e3,
            report=watch.swapped,
        )
        self._redis = None
        fleet: Fleet
        if settings.fleet_folder is not None:
            fleet = FileFleet(settings.fleet_folder)
        else:
            assert settings.redis_url is not None, "the caller starts a store before the app"
            url = settings.redis_url.get_secret_value()
            self._redis = connect(url, timeout_s=_FLEET_TIMEOUT_S, max_connections=4)
            fleet = RedisFleet(self._redis, model=settings.model)
        self.follower = Follower(
            swaps=self.swaps,
            fleet=fleet,
            traffic=self.traffic,
            shadow=shadow,
            replica=settings.replica or replica_name(socket.gethostname(), settings.port),
            first=functools.partial(_first, settings, self.catalog),
            poll_s=settings.fleet_poll_ms / 1e3,
            decided=watch.decided,
        )
        self._following: asyncio.Task[None] | None = None

    def _open(self, settings: Settings, watch: Watch, bundle: Bundle) -> LoadedVersion:
        if settings.signing_key is not None:
            check_signature(bundle, settings.signing_key)
        return open_version(
            bundle,
            threads=settings.engine_threads,
            max_queue_s=settings.max_queue_ms / 1e3,
            backend=settings.backend,
            precision=settings.precision,
            plans=settings.plans,
            stall_s=settings.stall_ms / 1e3,
            report=watch.batches_of(bundle.manifest),
            changed=watch.rungs_of(bundle.manifest),
            samples=self.traffic.samples,
            gently=self.versions.primary is not None,
        )

    @property
    def settled(self) -> asyncio.Event:
        """Set once the first load has ended, well or not."""
        return self.follower.settled

    def start(self) -> None:
        """Begin to follow the wish."""
        self._following = asyncio.get_running_loop().create_task(self.follower.run())

    async def close(self) -> None:
        """Leave the fleet and free everything."""
        if self._following is not None:
            # a Redis client may take a cancellation for its own time-out, so once is not enough
            while not self._following.done():
                self._following.cancel()
                await asyncio.wait([self._following], timeout=_CANCEL_AGAIN_S)
        await self.follower.close()
        if self._redis is not None:
            await disconnect(self._redis)


def _catalog(settings: Settings) -> Catalog:
    if "://" not in settings.store:
        return Catalog(Path(settings.store))
    return Catalog(settings.store_copies, RemoteStore(settings.store, settings.store_copies))


def _first(settings: Settings, catalog: Catalog) -> Sequence[str]:
    """What to serve where nothing is wished: the version set, or the newest two."""
    if settings.version:
        return [settings.version]
    versions = catalog.versions(settings.model)
    if not versions:
        reasons = "; ".join(catalog.refused.values()) or f"none under {catalog.store}"
        raise NotFound(f"model {settings.model!r} has no readable version: {reasons}")
    return versions[:2]
