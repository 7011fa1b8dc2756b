"""Item tables as of an instant: popularity and smoothed click-through from the past alone."""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

from models.log import Log
from service.encoding.items import UNKNOWN_TIME_MS, ItemColumns, ItemTable
from service.encoding.rows import RowSpace

ITEM_WEIGHT = 10.0
"""Expected clicks that an item's own record must outweigh."""
SURFACE_WEIGHT = 80.0
"""Impressions that an item's record on one surface must outweigh."""
EARLIER_WEIGHT = 0.3
"""What one impression from before the log counts beside one of the log."""

Values = NDArray[np.float64]


def item_table(log: Log, at_ms: int, space: RowSpace, *, trained: frozenset[str]) -> ItemTable:
    """The table that a nightly job would have built at `at_ms`."""
    return ItemTable.build(item_columns(log, at_ms, trained=trained), space)


def item_columns(log: Log, at_ms: int, *, trained: frozenset[str]) -> ItemColumns:
    """Raw features of every item of the log, from impressions before `at_ms`."""
    ids = log.items["id"].to_list()
    past = log.before(at_ms)
    surfaces = sorted(log.impressions["surface"].unique())
    shown, clicked = _counts(past, ids, surfaces)  # [surfaces, items]
    earlier = log.items.select("id").join(
        log.earlier, left_on="id", right_on="item", how="left", maintain_order="left"
    )
    seen = earlier["shown"].fill_null(0.0).to_numpy()
    liked = earlier["liked"].fill_null(0.0).to_numpy()
    rate, lift = _rates(shown, clicked, seen, liked)
    expected = (rate[:, None] * lift).clip(0.001, 0.95)
    by_surface = (clicked + SURFACE_WEIGHT * expected) / (shown + SURFACE_WEIGHT)
    overall = (clicked.sum() + 1) / (shown.sum() + 10)
    created = log.items["created_ms"].fill_null(UNKNOWN_TIME_MS).to_numpy()
    return ItemColumns(
        ids=ids,
        category=log.items["category"].to_list(),
        author=log.items["author"].to_list(),
        created_ms=created,
        popularity=shown.sum(axis=0) + seen,
        duration_s=log.items["duration_s"].fill_null(np.nan).to_numpy(),
        ctr=(overall * lift).clip(0.001, 0.95),
        surface_ctr=dict(zip(surfaces, by_surface, strict=True)),
        trained=np.array([item in trained for item in ids]),
    )


def trained_items(log: Log, before_ms: int) -> frozenset[str]:
    """Ids that a model trained on the log before an instant has seen."""
    seeds = {signal.item_id for signals in log.seeds.values() for signal in signals}
    return frozenset(seeds.union(log.before(before_ms)["item"].unique()))


def _counts(past: pl.DataFrame, ids: list[str], surfaces: list[str]) -> tuple[Values, Values]:
    """Impressions and clicks by surface and item: two float64 [surfaces, items]."""
    shown, clicked = np.zeros((2, len(surfaces), len(ids)))
    column = {item: at for at, item in enumerate(ids)}
    line = {surface: at for at, surface in enumerate(surfaces)}
    counted = past.group_by("surface", "item").agg(pl.len(), pl.col("click").sum())
    for surface, item, impressions, clicks in counted.iter_rows():
        if item in column:
            shown[line[surface], column[item]] = impressions
            clicked[line[surface], column[item]] = clicks
    return shown, clicked


def _rates(shown: Values, clicked: Values, seen: Values, liked: Values) -> tuple[Values, Values]:
    """Click rate of each surface, and how many times its surfaces' rates an item earns.

    The lift is a Gamma-Poisson posterior mean: observed over expected clicks, shrunk to 1.
    """
    earlier_rate = (liked.sum() + 1) / (seen.sum() + 10)
    overall = (clicked.sum() + 10 * earlier_rate) / (shown.sum() + 10)
    rate = (clicked.sum(axis=1) + 20 * overall) / (shown.sum(axis=1) + 20)
    expected = (rate[:, None] * shown).sum(axis=0)
    observed = clicked.sum(axis=0) + EARLIER_WEIGHT * liked
    expected = expected + EARLIER_WEIGHT * earlier_rate * seen
    return rate, (observed + ITEM_WEIGHT) / (expected + ITEM_WEIGHT)
