"""A loaded version: its manifest, item table, engines and batcher, and who is using it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Self

import xxhash

from service.bundle import Manifest
from service.domain import Int64Array
from service.encoding.batch import Batch, encode_batch
from service.encoding.history import Person
from service.encoding.items import ItemTable
from service.encoding.rows import RowSpace
from service.encoding.slate import Slate
from service.inference.backends.base import Backend
from service.inference.batcher import BatchReport, MicroBatcher
from service.inference.executor import Executor
from service.inference.outages import RungChange

TAG_CHARS = 8


class _Encoder:
    """What the batcher encodes with.

    It knows no version: objects in a cycle, once frozen, would never be collected.
    """

    __slots__ = ("space", "table")

    def __init__(self, table: ItemTable, space: RowSpace) -> None:
        self.table = table
        self.space = space

    def __call__(
        self, people: Sequence[Person], slates: Sequence[Slate]
    ) -> tuple[Batch, Int64Array]:
        return encode_batch(people, slates, table=self.table, space=self.space)


class LoadedVersion:
    """One version in memory. It is closed when it is retired and the last lease is back.

    As a context it is leased: it stays open for one request.
    """

    def __init__(
        self,
        *,
        manifest: Manifest,
        space: RowSpace,
        table: ItemTable,
        executor: Executor,
        max_queue_s: float,
        report: Callable[[BatchReport], None],
        changed: Callable[[RungChange], None] = lambda _: None,
        stall_s: float = 0.05,
    ) -> None:
        self.manifest = manifest
        self.tag = tag_of(manifest.version)
        self.space = space
        self.executor = executor
        self._encoder = _Encoder(table, space)
        self.batcher = MicroBatcher(
            executor=executor,
            encode=self._encoder,
            output=manifest.output,
            tile_width=manifest.input.tile_width,
            limits=manifest.batch,
            max_queue_s=max_queue_s,
            stall_s=stall_s,
            report=report,
            changed=changed,
        )
        self.leases = 0
        self.closed = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def table(self) -> ItemTable:
        """May be replaced by a newer one of the same row space at any time."""
        return self._encoder.table

    @table.setter
    def table(self, table: ItemTable) -> None:
        self._encoder.table = table

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

    def __enter__(self) -> Self:
        assert not self.closed, f"{self.version} is closed"
        self.leases += 1
        self._idle.clear()
        return self

    def __exit__(self, *_: object) -> None:
        self.leases -= 1
        if not self.leases:
            self._idle.set()

    async def retire(self) -> None:
        """Wait until the last lease is back, then free the engines off the loop."""
        while self.leases:
            await self._idle.wait()
        self.closed = True
        await asyncio.to_thread(self.executor.close)


def tag_of(version: str) -> str:
    """A version's short mark inside ranking ids: 8 hex digits."""
    return xxhash.xxh32_hexdigest(version.encode())
