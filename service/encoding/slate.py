"""Slates: candidates to fixed-width tiles, and scores back to an order. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, repeat

import msgspec
import numpy as np
from numpy.typing import NDArray

from service.bundle import OutputSpec
from service.domain import Float32Array, Int32Array, Int64Array, ItemFeatures
from service.encoding import items as i
from service.encoding import rows as r
from service.encoding.items import CANDIDATE_WIDTH, ItemTable
from service.encoding.rows import UNKNOWN_ROW, RowSpace


class Slate(msgspec.Struct, frozen=True):
    """Candidates in the caller's order, and where and when they will be shown."""

    ids: Sequence[str]
    features: Sequence[ItemFeatures | None] | None = None
    surface: str = ""
    now_ms: int = 0

    def tiles(self, tile_width: int) -> int:
        """How many tiles it is cut into."""
        return -(-len(self.ids) // tile_width)


class EncodedSlates(msgspec.Struct, frozen=True):
    """Slates' tensors, end to end; each begins with a tile of its own, padded with row 0."""

    tiles: Int32Array  # [N, T, 9]
    tile_slate: Int32Array  # [N], tile to its slate
    unknown: Int64Array  # [slates], candidates that the item table does not hold


def encode_slates(slates: Sequence[Slate], *, table: ItemTable, space: RowSpace) -> EncodedSlates:
    """Look candidates up, apply the request's own features, and cut into tiles."""
    width = space.spec.tile_width
    counts = np.array([len(slate.ids) for slate in slates], np.int64)
    tiles = -(-counts // width)
    found = table.locate(list(chain.from_iterable(slate.ids for slate in slates)), space)
    slate_of = np.arange(len(slates)).repeat(counts)
    now = np.array([slate.now_ms for slate in slates], np.int64)
    column = np.array([table.ctr_column(slate.surface) for slate in slates], np.int64)
    surface = space.word_rows("surface", [slate.surface for slate in slates])
    rows = table.rows.take(found, axis=0)  # [candidates, 9]
    rows[:, i.ITEM_AGE] = r.item_age_rows(now[slate_of] - table.created_ms.take(found))
    rows[:, i.CTR] = table.ctr[column[slate_of], found]
    rows[:, i.SURFACE] = surface[slate_of]
    if any(slate.features is not None for slate in slates):
        given = list(
            chain.from_iterable(slate.features or repeat(None, len(slate.ids)) for slate in slates)
        )
        if any(given):
            _override(rows, given, found, now[slate_of], table, space)
    if (counts % width).any():
        padded = np.zeros((int(tiles.sum()) * width, CANDIDATE_WIDTH), np.int32)
        shift = (tiles.cumsum() - tiles) * width - (counts.cumsum() - counts)
        padded[np.arange(len(rows)) + shift[slate_of]] = rows
        rows = padded
    return EncodedSlates(
        rows.reshape(-1, width, CANDIDATE_WIDTH),
        np.arange(len(slates), dtype=np.int32).repeat(tiles),
        np.bincount(slate_of[found == len(table)], minlength=len(slates)),
    )


def _override(  # noqa: PLR0917  a private step of the function above
    rows: Int32Array,
    given: Sequence[ItemFeatures | None],
    found: Int64Array,
    now: Int64Array,
    table: ItemTable,
    space: RowSpace,
) -> None:
    """Write the features that requests gave over what the table knows, column by column."""
    at = np.array([place for place, features in enumerate(given) if features is not None])
    some = [features for features in given if features is not None]

    def put(column: int, values: Int32Array, present: NDArray[np.bool_]) -> None:
        rows[at[present], column] = values[present]

    def words(name: str) -> tuple[Int32Array, NDArray[np.bool_]]:
        values = [getattr(features, name) for features in some]
        read = [UNKNOWN_ROW if value is None else space.word_row(name, value) for value in values]
        return np.array(read, np.int32), np.array([value is not None for value in values])

    def numbers(name: str) -> NDArray[np.float64]:
        return np.array([getattr(features, name) for features in some], np.float64)  # None is NaN

    for column, name in ((i.CATEGORY, "category"), (i.AUTHOR, "author"), (i.SURFACE, "surface")):
        put(column, *words(name))
    shown = np.array([features.surface is not None for features in some])
    ctr_rows = np.array([table.ctr_column(features.surface or "") for features in some])
    put(i.CTR, table.ctr[ctr_rows, found[at]], shown)
    created = numbers("created_ms")
    born = np.where(np.isnan(created), 0, created).astype(np.int64)
    put(i.ITEM_AGE, r.item_age_rows(now[at] - born), ~np.isnan(created))
    for column, name, edges in (
        (i.POPULARITY, "popularity", r.POPULARITY_EDGES),
        (i.CTR, "ctr", r.CTR_EDGES),
    ):
        values = numbers(name)
        put(column, r.bucket_rows(name, edges, values), ~np.isnan(values))
    seconds = numbers("duration_s")
    put(i.DURATION, r.bucket_rows("duration", r.DURATION_EDGES_S, seconds), ~np.isnan(seconds))


def blend(logits: Float32Array, output: OutputSpec) -> NDArray[np.float64]:
    """Scores of logits [..., 2] (click, long dwell): the weighted probabilities, [...].

    Rounded to 6 decimals, which is what an answer shows, so that ties are ties for all.
    """
    # in 64 bits exp overflows to inf for no logit of 32 bits that a network could give
    probability = 1.0 / (1.0 + np.exp(-logits.astype(np.float64)))
    scores = probability @ (output.click_weight, output.dwell_weight)
    return np.asarray(np.rint(scores * 1e6) / 1e6)


def best(scores: NDArray[np.float64], *, top_n: int) -> tuple[Int64Array, NDArray[np.float64]]:
    """Input indexes of the `top_n` best candidates, and their scores; ties by input index."""
    order = (-scores).argsort(kind="stable")[:top_n]
    return order, scores[order]


def prior_order(
    priors: Sequence[float | None] | None, count: int, *, top_n: int
) -> tuple[Int64Array, NDArray[np.float64]]:
    """The caller's own order: by prior, best first, then those without one, as they came."""
    values = np.full(count, -np.inf)
    if priors is not None:
        values[:] = [-np.inf if prior is None else prior for prior in priors]
    order = np.argsort(-values, kind="stable")[:top_n]
    return order, np.where(np.isinf(values), 0.0, values)[order]
