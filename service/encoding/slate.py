"""Slates: candidates to fixed-width tiles, and scores back to an order. Pure."""

from __future__ import annotations

from collections.abc import Sequence

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
    """An encoded slate: `tiles` is int32 [tiles, T, 9], padded with row 0."""

    tiles: Int32Array
    count: int
    unknown: int
    """How many candidates the item table does not hold."""


def encode_slate(
    ids: Sequence[str],
    features: Sequence[ItemFeatures | None] | None,
    *,
    surface: str,
    now_ms: int,
    table: ItemTable,
    space: RowSpace,
) -> Slate:
    """Look candidates up, apply the request's own features, and cut into tiles."""
    count = len(ids)
    width = space.spec.tile_width
    tile_count = -(-count // width)
    padded = np.zeros((tile_count * width, CANDIDATE_WIDTH), np.int32)
    cand = padded[:count]
    found = table.locate(ids, space)
    # mode="clip" lets numpy write to `out` unbuffered; positions are in range by construction
    table.rows.take(found, axis=0, out=cand, mode="clip")
    cand[:, i.ITEM_AGE] = r.item_age_rows(now_ms - table.created_ms.take(found))
    cand[:, i.CTR] = table.surface_ctr(surface).take(found)
    cand[:, i.SURFACE] = space.word_row("surface", surface)
    if features is not None:
        for at, given in enumerate(features):
            if given is not None:
                _override(
                    cand[at],
                    given,
                    int(found[at]),
                    now_ms=now_ms,
                    table=table,
                    space=space,
                )
    unknown = int((found == len(table)).sum())
    return Slate(padded.reshape(tile_count, width, CANDIDATE_WIDTH), count, unknown)


def _override(
    row: Int32Array,
    given: ItemFeatures,
    position: int,
    *,
    now_ms: int,
    table: ItemTable,
    space: RowSpace,
) -> None:
    if given.surface is not None:
        row[i.SURFACE] = space.word_row("surface", given.surface)
        row[i.CTR] = table.surface_ctr(given.surface)[position]
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
    """Scores of logits [..., 2] (click, long dwell): the weighted probabilities, [...]."""
    # in 64 bits exp overflows to inf for no logit of 32 bits that a network could give
    probability = 1.0 / (1.0 + np.exp(-logits.astype(np.float64)))
    return np.asarray(probability @ (output.click_weight, output.dwell_weight))


def merge(
    logits: Float32Array, count: int, output: OutputSpec, *, top_n: int
) -> tuple[Int64Array, NDArray[np.float64]]:
    """The best `top_n` of a slate's tiles [tiles, T, 2]: input indexes and their scores.

    Ties break by input index. Scores are rounded to 6 decimals, the precision promised.
    """
    scores = np.rint(blend(logits.reshape(-1, 2)[:count], output) * 1e6) / 1e6
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
