"""Batches on a device, two at a time: one is copied there while the other is computed.

A copying and a computing stream, and for each bucket two places in memory. Called by one
thread that begins batches, and by one, perhaps another, that ends them in the same order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import msgspec

from service.bundle import BatchSpec, InputSpec
from service.domain import Float32Array
from service.encoding.batch import Batch
from service.inference.backends import buckets, cuda
from service.inference.backends.buckets import Bucket, Buckets

PLACES = 2
"""A bucket's places in memory: for the batch that is computed, and for the next one."""
Launch = Callable[[], None]


class Place(msgspec.Struct):
    """One batch's memory on the host and on the device."""

    bucket: Bucket
    serial: int
    """Counts places from 1."""
    inputs: cuda.Slab
    outputs: cuda.Slab
    uploaded: cuda.Event
    done: cuda.Event
    taken: threading.Lock
    """Held from a batch's begin to its end."""
    launch: Launch | None = None
    runs: int = 0
    """Batches that were begun here."""


Guard = Callable[[Place | None], AbstractContextManager[None]]


def _unguarded(_: Place | None) -> AbstractContextManager[None]:
    return nullcontext()


class Pipeline:
    """Streams and memory of one engine with fixed buckets."""

    def __init__(
        self,
        spec: InputSpec,
        limits: BatchSpec,
        prepare: Callable[[Place], Launch],
        guard: Guard = _unguarded,
    ) -> None:
        """`prepare` says how to queue a place's computation on the computing stream.

        `guard` is held around calls of the device: with the place where a batch is begun,
        with None elsewhere. Waiting for a free place is outside.
        """
        self.buckets = Buckets(limits)
        self._spec = spec
        self._prepare = prepare
        self._guard = guard
        self._copying = cuda.Stream()
        self.computing = cuda.Stream()
        self._places: dict[Bucket, list[Place]] = {}
        self._serial = 0

    def begin(self, batch: Batch) -> Callable[[], Float32Array]:
        """Queue a batch; what is given back waits for it, and gives its logits [N, T, 2].

        Blocks while both places of the bucket are taken. Either may raise BackendFault.
        """
        bucket = self.buckets.of(batch)
        place = self._next(bucket)
        place.taken.acquire()
        try:
            with self._guard(place):
                self._queue(place, batch)
        except BaseException:
            place.taken.release()
            raise
        return partial(self._end, place, batch)

    def _queue(self, place: Place, batch: Batch) -> None:
        if place.launch is None:
            place.launch = self._prepare(place)
        buckets.fill(place.inputs.arrays, batch)
        place.inputs.upload(self._copying)
        place.uploaded.record(self._copying)
        self.computing.follow(place.uploaded)
        place.launch()
        place.runs += 1
        place.outputs.download(self.computing)
        place.done.record(self.computing)

    def _end(self, place: Place, batch: Batch) -> Float32Array:
        try:
            with self._guard(None):
                place.done.wait()
            return buckets.take(place.outputs.arrays, batch)
        finally:
            place.taken.release()

    def _next(self, bucket: Bucket) -> Place:
        """The places of a bucket take turns."""
        places = self._places.setdefault(bucket, [])
        if len(places) < PLACES:
            with self._guard(None):
                place = self._new(bucket)
        else:
            place = places.pop(0)
        places.append(place)
        return place

    def _new(self, bucket: Bucket) -> Place:
        self._serial += 1
        return Place(
            bucket,
            self._serial,
            cuda.Slab(buckets.input_layout(bucket, self._spec)),
            cuda.Slab(buckets.output_layout(bucket, self._spec)),
            cuda.Event(),
            cuda.Event(),
            threading.Lock(),
        )

    def close(self) -> None:
        """Free memory, events and streams; the engine must be gone."""
        for places in self._places.values():
            for place in places:
                place.launch = None
                place.inputs.close()
                place.outputs.close()
                place.uploaded.close()
                place.done.close()
        self._places.clear()
        self._copying.close()
        self.computing.close()
