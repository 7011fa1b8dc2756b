"""The row space: where ids, values and buckets live in the embedding tables. Pure.

Row 0 is padding and row 1 unknown in every table. The feature table begins with one
reserved block per bucketed quantity; the rest holds hashed `field=value` words.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from service.bundle import InputSpec
from service.domain import Int32Array, Int64Array, UInt64Array

PADDING_ROW = 0
UNKNOWN_ROW = 1
HASHED_ROWS_START = 512
HOURS_PER_WEEK = 168
AGE_BUCKETS = 32
DWELL_BUCKETS = 8
ACTION_INDEX = {"click": 0, "dwell": 1}
_CACHED_WORDS = 65_536

_DAY_MS = 86_400_000
_NEVER_MS = 100 * 365 * _DAY_MS
"""An age past this means that the time was not known."""

AGE_EDGES_MS: Int64Array = np.geomspace(1_000, 60 * _DAY_MS, AGE_BUCKETS - 1).astype(np.int64)
DWELL_EDGES_MS: Int64Array = np.array(
    [1, 2_000, 5_000, 10_000, 20_000, 45_000, 120_000], dtype=np.int64
)
ITEM_AGE_EDGES_MS: Int64Array = np.append(
    np.geomspace(3_600_000, 3 * 365 * _DAY_MS, 31).astype(np.int64), _NEVER_MS
)
POPULARITY_EDGES: NDArray[np.float64] = np.geomspace(1, 1e7, 31)
CTR_EDGES: NDArray[np.float64] = 1 / (1 + np.exp(-np.linspace(-7.6, 3.0, 127)))
DURATION_EDGES_S: NDArray[np.float64] = np.geomspace(1, 7_200, 31)

BLOCK_SIZES = {
    "action_dwell": len(ACTION_INDEX) * DWELL_BUCKETS,
    "gap": AGE_BUCKETS,
    "item_age": len(ITEM_AGE_EDGES_MS),
    "popularity": len(POPULARITY_EDGES) + 1,
    "ctr": len(CTR_EDGES) + 1,
    "duration": len(DURATION_EDGES_S) + 1,
    "hour": HOURS_PER_WEEK,
}


def _block_starts() -> dict[str, int]:
    starts, next_row = {}, UNKNOWN_ROW + 1
    for block, size in BLOCK_SIZES.items():
        starts[block] = next_row
        next_row += size
    assert next_row <= HASHED_ROWS_START
    return starts


BLOCK_START = _block_starts()

# [buckets + 1]: the bucket past the last edge means "not known"
_ITEM_AGE_ROWS: Int32Array = np.append(
    np.arange(BLOCK_SIZES["item_age"], dtype=np.int32) + BLOCK_START["item_age"],
    UNKNOWN_ROW,
).astype(np.int32)


def item_age_rows(age_ms: Int64Array) -> Int32Array:
    """Feature rows of item ages in ms; an age of a century or more is unknown."""
    return _ITEM_AGE_ROWS.take(ITEM_AGE_EDGES_MS.searchsorted(age_ms, "right"))


def bucket_rows(block: str, edges: NDArray[np.float64], values: NDArray[np.float64]) -> Int32Array:
    """Feature rows of `values` in one block; NaN is unknown."""
    rows = np.searchsorted(edges, values, side="right") + BLOCK_START[block]
    return np.where(np.isnan(values), UNKNOWN_ROW, rows).astype(np.int32)


def hour_row(now_ms: int) -> int:
    """Feature row of the hour of the week, UTC, counted from the epoch's Thursday."""
    return BLOCK_START["hour"] + now_ms // 3_600_000 % HOURS_PER_WEEK


class RowSpace:
    """Hashing of ids and words into the tables' rows, for one input spec."""

    def __init__(self, spec: InputSpec) -> None:
        self.spec = spec
        self._words: dict[tuple[str, str], int] = {}

    def hash_ids(self, ids: Iterable[str], count: int) -> UInt64Array:
        """xxh3_64 of each id's UTF-8 bytes, seeded by the spec: uint64 [count]."""
        digests = map(xxh3_64_intdigest, map(str.encode, ids), repeat(self.spec.hash_seed))
        return np.fromiter(digests, np.uint64, count)

    def item_rows(self, hashes: UInt64Array) -> tuple[Int32Array, Int32Array]:
        """Rows of hashed ids in the two item tables, from the hash's two halves."""
        low = hashes & np.uint64(0xFFFFFFFF)
        high = hashes >> np.uint64(32)
        first = UNKNOWN_ROW + 1 + low % np.uint64(self.spec.item1_rows - 2)
        second = UNKNOWN_ROW + 1 + high % np.uint64(self.spec.item2_rows - 2)
        return first.astype(np.int32), second.astype(np.int32)

    def word_row(self, field: str, value: str) -> int:
        """Feature row of the word `field=value`; an empty value is unknown."""
        if not value:
            return UNKNOWN_ROW
        row = self._words.get((field, value))
        if row is None:
            digest = xxh3_64_intdigest(f"{field}={value}".encode(), self.spec.hash_seed)
            row = HASHED_ROWS_START + digest % (self.spec.feature_rows - HASHED_ROWS_START)
            if len(self._words) >= _CACHED_WORDS:
                self._words.clear()
            self._words[field, value] = row
        return row

    def word_rows(self, field: str, values: Sequence[str]) -> Int32Array:
        """Feature rows of many words of one field, most of them alike: int32 [n]."""
        row_of = {value: self.word_row(field, value) for value in set(values)}
        return np.fromiter(map(row_of.__getitem__, values), np.int32, len(values))
