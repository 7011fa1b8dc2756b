"""Slates: candidates to fixed-width tiles, and scores back to an order. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import msgspec
import numpy as np
from numpy.typing import NDArray

from service.bundle import OutputSpec
from service.domain import Float32Array, Int32Array, Int64Array, ItemFeatures
from service.encoding import items as i
from service.encoding import rows as r
from service.encoding.items import CANDIDATE_WIDTH, ItemTable
from service.encoding.rows import RowSpace


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
    surface = np.array([space.word_row("surface", slate.surface) for slate in slates], np.int32)
    rows = table.rows.take(found, axis=0)  # [candidates, 9]
    rows[:, i.ITEM_AGE] = r.item_age_rows(now[slate_of] - table.created_ms.take(found))
    rows[:, i.CTR] = table.ctr[column[slate_of], found]
    rows[:, i.SURFACE] = surface[slate_of]
    start = 0
    for slate in slates:
        for at, given in enumerate(slate.features or (), start):
            if given is not None:
                _override(rows[at], given, int(found[at]), slate.now_ms, table, space)
        start += len(slate.ids)
    padded = np.zeros((int(tiles.sum()) * width, CANDIDATE_WIDTH), np.int32)
    shift = (tiles.cumsum() - tiles) * width - (counts.cumsum() - counts)
    padded[np.arange(len(rows)) + shift[slate_of]] = rows
    return EncodedSlates(
        padded.reshape(-1, width, CANDIDATE_WIDTH),
        np.arange(len(slates), dtype=np.int32).repeat(tiles),
        np.bincount(slate_of, found == len(table), len(slates)).astype(np.int64),
    )


def _override(  # noqa: PLR0917  a private step of the loop above
    row: Int32Array,
    given: ItemFeatures,
    position: int,
    now_ms: int,
    table: ItemTable,
    space: RowSpace,
) -> None:
    if given.surface is not None:
        row[i.SURFACE] = space.word_row("surface", given.surface)
        row[i.CTR] = table.ctr[table.ctr_column(given.surface), position]
    if given.category is not None:
        row[i.CATEGORY] = space.word_row("category", given.category)
    if given.author is not None:
        row[i.AUTHOR] = space.word_row("author", given.author)
    if given.created_ms is not None:
        row[i.ITEM_AGE] = r.item_age_rows(np.array([now_ms - given.created_ms]))[0]
    if given.popularity is not None:
        row[i.POPULARITY] = _bucket("popularity", r.POPULARITY_EDGES, given.popularity)
    if given.ctr is not None:
        row[i.CTR] = _bucket("ctr", r.CTR_EDGES, given.ctr)
    if given.duration_s is not None:
        row[i.DURATION] = _bucket("duration", r.DURATION_EDGES_S, given.duration_s)


def _bucket(block: str, edges: NDArray[np.float64], value: float) -> int:
    return int(r.bucket_rows(block, edges, np.array([value]))[0])


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
