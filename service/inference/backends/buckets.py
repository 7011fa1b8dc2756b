"""Fixed shapes: which sizes of a batch a device knows, and one's place in memory. Pure."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from service.bundle import BatchSpec, InputSpec
from service.domain import Float32Array
from service.encoding.batch import Batch
from service.encoding.history import CONTEXT_WIDTH, HISTORY_WIDTH
from service.encoding.items import CANDIDATE_WIDTH
from service.errors import BackendRecoverable

Layout = dict[str, tuple[tuple[int, ...], np.dtype[Any]]]
OUTPUT = "logits"


class Bucket(NamedTuple):
    """A permitted size of a batch."""

    users: int
    tiles: int


class Buckets:
    """Every pair of a power of two of users and a tile bucket of the manifest."""

    def __init__(self, limits: BatchSpec) -> None:
        powers = [1 << exponent for exponent in range(limits.max_users.bit_length())]
        below = [count for count in powers if count < limits.max_users]
        self.users = (*below, limits.max_users)
        self.tiles = limits.tile_buckets
        self.pairs = tuple(
            Bucket(users, tiles)
            for tiles in self.tiles
            for users in self.users
            if users < 2 * tiles  # each user has a tile
        )

    def of(self, batch: Batch) -> Bucket:
        """The smallest one that holds the batch; raises BackendRecoverable if none does."""
        users, tiles = len(batch.ctx_ids), len(batch.tile_user)
        if users > self.users[-1] or tiles > self.tiles[-1]:
            raise BackendRecoverable(f"{users} users and {tiles} tiles are over the largest bucket")
        return Bucket(
            self.users[bisect_left(self.users, users)], self.tiles[bisect_left(self.tiles, tiles)]
        )


def input_layout(bucket: Bucket, spec: InputSpec) -> Layout:
    """Shapes and types of a batch's arrays at the size of a bucket."""
    users, tiles = bucket
    ids, length = np.dtype(np.int32), spec.history_len
    return {
        "hist_ids": ((users, length, HISTORY_WIDTH), ids),
        "hist_age": ((users, length), ids),
        "hist_mask": ((users, length), np.dtype(np.float32)),
        "ctx_ids": ((users, CONTEXT_WIDTH), ids),
        "cand_ids": ((tiles, spec.tile_width, CANDIDATE_WIDTH), ids),
        "tile_user": ((tiles,), ids),
    }


def output_layout(bucket: Bucket, spec: InputSpec) -> Layout:
    """Shape and type of the logits of a bucket."""
    return {OUTPUT: ((bucket.tiles, spec.tile_width, 2), np.dtype(np.float32))}


def zeros(layout: Layout) -> dict[str, NDArray[Any]]:
    """New arrays of a layout; row 0 is a safe id."""
    return {name: np.zeros(shape, dtype) for name, (shape, dtype) in layout.items()}


def fill(arrays: dict[str, NDArray[Any]], batch: Batch) -> None:
    """Write a batch over the first rows; rows behind it keep old, valid ids of user 0."""
    for name in Batch.__struct_fields__:
        rows = getattr(batch, name)
        arrays[name][: len(rows)] = rows
    arrays["tile_user"][len(batch.tile_user) :] = 0


def take(arrays: dict[str, NDArray[Any]], batch: Batch) -> Float32Array:
    """A copy of the logits of the batch's own tiles."""
    logits: Float32Array = arrays[OUTPUT][: len(batch.tile_user)].copy()
    return logits


def resized(golden: Batch, bucket: Bucket) -> Batch:
    """A batch of the size of a bucket, made of the rows of another one."""
    users = np.arange(bucket.users) % len(golden.ctx_ids)
    tiles = np.arange(bucket.tiles)
    return Batch(
        golden.hist_ids[users],
        golden.hist_age[users],
        golden.hist_mask[users],
        golden.ctx_ids[users],
        golden.cand_ids[tiles % len(golden.cand_ids)],
        (tiles % bucket.users).astype(np.int32),
    )
