"""A loaded version: its manifest, item table, engines and batcher, and who is using it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from service.bundle import Manifest
from service.domain import Int64Array
from service.encoding.batch import Batch, encode_batch
from service.encoding.history import Person
from service.encoding.items import ItemTable
from service.encoding.rows import RowSpace
from service.encoding.slate import Slate
from service.errors import NotFound, NotReady
from service.inference.backends.base import Backend
from service.inference.batcher import BatchReport, MicroBatcher
from service.inference.executor import Executor

STABLE = "stable"


class LoadedVersion:
    """One version in memory. It is closed when it is retired and the last lease is back."""

    def __init__(
        self,
        *,
        manifest: Manifest,
        space: RowSpace,
        table: ItemTable,
        executor: Executor,
        max_queue_s: float,
        report: Callable[[BatchReport], None],
        stall_s: float = 0.05,
    ) -> None:
        self.manifest = manifest
        self.space = space
        self.table = table
        """May be replaced by a newer one of the same row space at any time."""
        self.executor = executor
        self.batcher = MicroBatcher(
            executor=executor,
            encode=self._encode,
            output=manifest.output,
            tile_width=manifest.input.tile_width,
            limits=manifest.batch,
            max_queue_s=max_queue_s,
            stall_s=stall_s,
            report=report,
        )
        self._leases = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def _encode(
        self, people: Sequence[Person], slates: Sequence[Slate]
    ) -> tuple[Batch, Int64Array]:
        return encode_batch(people, slates, table=self.table, space=self.space)

    @property
    def name(self) -> str:
        """The model's name."""
        return self.manifest.name

    @property
    def version(self) -> str:
        """The version's word."""
        return self.manifest.version

    def add_rung(self, backend: Backend) -> None:
        """Serve with one more engine from now on; from any thread."""
        rung = self.executor.add(backend)
        if rung is not None:
            self.batcher.add_rung(rung)

    @contextmanager
    def lease(self) -> Iterator[LoadedVersion]:
        """Keep the version open for one request."""
        self._leases += 1
        self._idle.clear()
        try:
            yield self
        finally:
            self._leases -= 1
            if not self._leases:
                self._idle.set()

    async def retire(self) -> None:
        """Wait until the last lease is back, then free the engines off the loop."""
        await self._idle.wait()
        await asyncio.to_thread(self.executor.close)


class Versions:
    """The roles. A swap is a change of `primary` on the loop."""

    def __init__(self) -> None:
        self.primary: LoadedVersion | None = None
        self.fault = "no version has been loaded yet"
        """Why there is no primary, or why the last swap failed."""

    def pick(self, wanted: str | None) -> LoadedVersion:
        """The version for a request's `model`: name, name@label or name@version.

        Raises NotReady without a primary, NotFound for words that name nothing here.
        """
        primary = self.primary
        if primary is None:
            raise NotReady(f"no version is ready: {self.fault}")
        if wanted is None:
            return primary
        name, _, which = wanted.partition("@")
        if name != primary.name:
            raise NotFound(f"no model {name!r} is served here", field="model")
        if which not in {"", STABLE, primary.version}:
            raise NotFound(f"model {name!r} has no label or version {which!r} here", field="model")
        return primary

    async def close(self) -> None:
        """Retire what is loaded."""
        primary, self.primary = self.primary, None
        if primary is not None:
            self.fault = "the service is shutting down"
            await primary.retire()
