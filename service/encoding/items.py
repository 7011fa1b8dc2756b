"""The item table: columnar features of known items, and the search by hashed id. Pure."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from itertools import compress, repeat

import msgspec
import numpy as np
from numpy.typing import NDArray

from service.domain import Int32Array, Int64Array, UInt64Array
from service.encoding import rows as r
from service.encoding.rows import UNKNOWN_ROW, RowSpace
from service.errors import ManifestFault

CANDIDATE_WIDTH = 9
ITEM1, ITEM2, CATEGORY, AUTHOR, ITEM_AGE, POPULARITY, CTR, DURATION, SURFACE = range(
    CANDIDATE_WIDTH
)
UNKNOWN_TIME_MS = -(2**60)
_HOT_IDS = 200_000


class ItemColumns(msgspec.Struct, kw_only=True):
    """Raw features of n items, as whoever builds a table knows them; NaN or "" is unknown."""

    ids: Sequence[str]
    category: Sequence[str]
    author: Sequence[str]
    created_ms: Int64Array
    """UNKNOWN_TIME_MS where not known."""
    popularity: NDArray[np.float64]
    duration_s: NDArray[np.float64]
    ctr: NDArray[np.float64]
    """Smoothed click-through over all surfaces."""
    surface_ctr: Mapping[str, NDArray[np.float64]] = {}
    """The same for each surface that the model tells apart."""
    trained: NDArray[np.bool_] | None = None
    """False where the model never saw the id: such an item leans on its features alone."""


class ItemTable:
    """n known items sorted by hashed id; every column has one more row, for unknown items."""

    def __init__(
        self,
        *,
        id_hash: UInt64Array,
        rows: Int32Array,
        ctr: Int32Array,
        created_ms: Int64Array,
        surfaces: Sequence[str],
    ) -> None:
        self.id_hash = id_hash  # [n]
        self.rows = rows  # [n + 1, 9], a template of cand_ids
        self.ctr = ctr  # [1 + surfaces, n + 1], row 0 over all surfaces
        self.created_ms = created_ms  # [n + 1]
        self.surfaces = tuple(surfaces)
        self._ctr_column = {name: at + 1 for at, name in enumerate(self.surfaces)}
        self._last = max(len(id_hash) - 1, 0)
        self._hot: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.id_hash)

    @classmethod
    def build(cls, items: ItemColumns, space: RowSpace) -> ItemTable:
        """Bucket and hash raw columns; raises ManifestFault where two ids share a hash."""
        count = len(items.ids)
        hashes = space.hash_ids(items.ids, count)
        if len(np.unique(hashes)) != count:
            raise ManifestFault("the item table holds an id twice")
        rows = np.zeros((count, CANDIDATE_WIDTH), np.int32)
        rows[:, ITEM1], rows[:, ITEM2] = space.item_rows(hashes)
        if items.trained is not None:
            rows[~items.trained, ITEM1] = rows[~items.trained, ITEM2] = UNKNOWN_ROW
        rows[:, CATEGORY] = [space.word_row("category", value) for value in items.category]
        rows[:, AUTHOR] = [space.word_row("author", value) for value in items.author]
        rows[:, POPULARITY] = r.bucket_rows("popularity", r.POPULARITY_EDGES, items.popularity)
        rows[:, DURATION] = r.bucket_rows("duration", r.DURATION_EDGES_S, items.duration_s)
        ctr = np.stack(
            [
                r.bucket_rows("ctr", r.CTR_EDGES, column)
                for column in (items.ctr, *items.surface_ctr.values())
            ]
        )
        order = np.argsort(hashes)
        return cls(
            id_hash=hashes[order],
            rows=np.pad(rows[order], ((0, 1), (0, 0)), constant_values=UNKNOWN_ROW),
            ctr=np.pad(ctr[:, order], ((0, 0), (0, 1)), constant_values=UNKNOWN_ROW),
            created_ms=np.append(items.created_ms[order], UNKNOWN_TIME_MS),
            surfaces=tuple(items.surface_ctr),
        )

    def find(self, hashes: UInt64Array) -> Int64Array:
        """Positions of hashed ids, `len(self)` where unknown: int64 [n]."""
        if not len(self):
            return np.zeros(len(hashes), np.int64)
        at = np.searchsorted(self.id_hash, hashes)
        np.minimum(at, self._last, out=at)
        at[self.id_hash[at] != hashes] = len(self)
        return at

    def locate(self, ids: Sequence[str], space: RowSpace) -> Int64Array:
        """Positions of ids, `len(self)` where unknown: int64 [n].

        Ids asked for before are remembered, which halves the cost of a slate of known items.
        """
        count = len(ids)
        found = np.fromiter(map(self._hot.get, ids, repeat(-1)), np.int64, count)
        if count and found.min() < 0:
            found = self.find(space.hash_ids(ids, count))
            if len(self._hot) + count > _HOT_IDS:
                self._hot.clear()
            known = found < len(self)
            self._hot.update(zip(compress(ids, known), found[known].tolist(), strict=True))
        return found

    def ctr_column(self, surface: str) -> int:
        """The row of `ctr` that tells of this surface, 0 if none does."""
        return self._ctr_column.get(surface, 0)

    def to_bytes(self, space: RowSpace) -> bytes:
        """The table as one npz file, with the row space it was made for."""
        buffer = io.BytesIO()
        np.savez_compressed(
            buffer,
            allow_pickle=False,
            space=_fingerprint(space),
            id_hash=self.id_hash,
            rows=self.rows,
            ctr=self.ctr,
            created_ms=self.created_ms,
            surfaces=np.array(self.surfaces, dtype=np.str_),
        )
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, content: bytes, space: RowSpace) -> ItemTable:
        """Read `to_bytes`; raises ManifestFault if damaged or made for another row space."""
        try:
            with np.load(io.BytesIO(content), allow_pickle=False) as file:
                columns = {name: file[name] for name in file.files}
            fingerprint = columns.pop("space")
            surfaces = [str(name) for name in columns.pop("surfaces")]
            table = cls(**columns, surfaces=surfaces)
        except Exception as error:  # numpy raises BadZipFile, ValueError, KeyError, zlib.error
            raise ManifestFault(f"the item table cannot be read: {error}") from error
        if not np.array_equal(fingerprint, _fingerprint(space)):
            raise ManifestFault("the item table was made for another row space")
        table.check()
        return table

    def check(self) -> None:
        """Raise ManifestFault where columns disagree in length, or ids are not sorted."""
        count = len(self)
        shapes = (self.rows.shape, self.ctr.shape, self.created_ms.shape)
        wanted = (
            (count + 1, CANDIDATE_WIDTH),
            (1 + len(self.surfaces), count + 1),
            (count + 1,),
        )
        if shapes != wanted:
            raise ManifestFault(f"the item table's columns are {shapes}, not {wanted}")
        if count and not bool(np.all(self.id_hash[1:] > self.id_hash[:-1])):
            raise ManifestFault("the item table is not sorted by hashed id")


def _fingerprint(space: RowSpace) -> Int64Array:
    spec = space.spec
    return np.array([spec.hash_seed, spec.item1_rows, spec.item2_rows, spec.feature_rows], np.int64)
