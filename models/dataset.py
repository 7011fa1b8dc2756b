"""A log replayed in time: each slate encoded as the service would have encoded it then.

Uses the service's own `fold` and `encode_batch`, never a second version.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Self

import numpy as np
import polars as pl
from numpy.typing import NDArray
from tqdm import tqdm

from models.log import Log
from models.rates import item_table, trained_items
from service.domain import (
    Context,
    Float32Array,
    Int32Array,
    Int64Array,
    ItemFeatures,
    Profile,
    Signal,
)
from service.encoding.batch import encode_batch
from service.encoding.history import Person, fold
from service.encoding.items import ItemTable
from service.encoding.rows import RowSpace
from service.encoding.slate import Slate

KEEP_SIGNALS = 50
"""How many records of a user the store keeps."""
DAY_MS = 86_400_000
CHUNK = 1_024


class Shown(NamedTuple):
    """One slate of the log, as a request would carry it, with what came of it."""

    number: int
    user: str
    at_ms: int
    surface: str
    """Of the whole slate; empty where its candidates differ."""
    items: list[str]
    surfaces: list[str]
    positions: list[int]
    click: list[bool]
    long_dwell: list[bool]

    def features(self) -> list[ItemFeatures | None] | None:
        """Each candidate's own surface, where the slate has no common one."""
        if self.surface:
            return None
        return [ItemFeatures(surface=word) for word in self.surfaces]


class Examples(NamedTuple):
    """S encoded slates in N tiles of T candidates; tiles of a slate stand together."""

    hist_ids: Int32Array  # [S, L, 6]
    hist_age: Int32Array  # [S, L]
    hist_mask: Float32Array  # [S, L]
    ctx_ids: Int32Array  # [S, 16]
    cand_ids: Int32Array  # [N, T, 9]
    tile_user: Int32Array  # [N], tile to slate
    click: Float32Array  # [N, T], NaN where padded or not known
    long_dwell: Float32Array  # [N, T], NaN where padded
    position: Int64Array  # [N, T]
    at_ms: Int64Array  # [S]

    def slates(self, chosen: NDArray[np.bool_]) -> Self:
        """The chosen slates [S], with their tiles."""
        tiles = chosen[self.tile_user]
        number = np.cumsum(chosen) - 1
        return self._replace(
            **{
                name: getattr(self, name)[chosen]
                for name in ("hist_ids", "hist_age", "hist_mask", "ctx_ids", "at_ms")
            },
            **{
                name: getattr(self, name)[tiles]
                for name in ("cand_ids", "click", "long_dwell", "position")
            },
            tile_user=number[self.tile_user[tiles]].astype(np.int32),
        )


def shown_slates(impressions: pl.DataFrame) -> list[Shown]:
    """The slates of time-ordered impressions, by the time of their first impression."""
    grouped = impressions.group_by("slate", maintain_order=True).agg(
        pl.col("user", "at_ms").first(),
        pl.col("surface").n_unique().alias("surfaces_shown"),
        pl.col("surface").first().alias("first_surface"),
        pl.col("item", "surface", "position", "click", "long_dwell"),
    )
    return [
        Shown(
            number=row["slate"],
            user=row["user"],
            at_ms=row["at_ms"],
            surface=row["first_surface"] if row["surfaces_shown"] == 1 else "",
            items=row["item"],
            surfaces=row["surface"],
            positions=row["position"],
            click=row["click"],
            long_dwell=row["long_dwell"],
        )
        for row in grouped.iter_rows(named=True)
    ]


def slates_before_test(log: Log) -> list[Shown]:
    """Those that begin before the test days."""
    return [slate for slate in shown_slates(log.impressions) if slate.at_ms < log.test_from_ms]


def replay(log: Log, slates: list[Shown]) -> Iterator[tuple[Shown, list[Signal]]]:
    """Each slate with its user's signals, newest first, from events strictly before it."""
    signals: dict[str, list[Signal]] = defaultdict(
        list, {user: list(known) for user, known in log.seeds.items()}
    )
    events = iter(log.events.iter_rows(named=True))
    event = next(events, None)
    for slate in slates:
        while event is not None and event["at_ms"] < slate.at_ms:
            user = event["user"]
            signals[user] = fold(signals[user], signal_of(event), keep=KEEP_SIGNALS)
            event = next(events, None)
        yield slate, signals[slate.user]


def signal_of(event: dict[str, object]) -> Signal:
    """The record that one row of `Log.events` becomes."""
    return Signal(
        item_id=str(event["item"]),
        action="click" if event["action"] == "click" else "dwell",
        at_ms=int(str(event["at_ms"])),
        dwell_ms=int(str(event["dwell_ms"])),
        surface=str(event["surface"]),
    )


class Tables:
    """The item table of each day: what was known at its start, and not after the test began."""

    def __init__(self, log: Log, space: RowSpace, trained: frozenset[str] | None = None) -> None:
        """`trained` overrides which ids the network is said to know."""
        self._log = log
        self._space = space
        self.trained = trained_items(log, log.test_from_ms) if trained is None else trained
        self._tables: dict[int, ItemTable] = {}

    def day_of(self, at_ms: int) -> int:
        """The start of the day, counted back from the test's, whose table was known then."""
        return min(at_ms - (at_ms - self._log.test_from_ms) % DAY_MS, self._log.test_from_ms)

    def of(self, day_ms: int) -> ItemTable:
        """The table known at the start of a day."""
        if day_ms not in self._tables:
            self._tables[day_ms] = item_table(self._log, day_ms, self._space, trained=self.trained)
        return self._tables[day_ms]


def encode_log(
    log: Log, space: RowSpace, slates: list[Shown], tables: Tables | None = None
) -> Examples:
    """Encode slates of a log, in time order; shows progress."""
    return encode_shown(log, space, list(replay(log, slates)), tables or Tables(log, space))


def encode_shown(
    log: Log, space: RowSpace, shown_to: Sequence[tuple[Shown, Sequence[Signal]]], tables: Tables
) -> Examples:
    """Encode slates, each with its user's signals, those of a day together; shows progress."""
    asked: dict[int, tuple[list[Person], list[Slate]]] = {}  # by the table that was known then
    by_day: dict[int, list[Shown]] = {}
    width = space.spec.tile_width
    for slate, signals in shown_to:
        profile = log.profiles.get(slate.user, Profile())
        context = Context(surface=slate.surface)
        day = tables.day_of(slate.at_ms)
        by_day.setdefault(day, []).append(slate)
        people, shown = asked.setdefault(day, ([], []))
        people.append(Person(signals, profile, context, slate.at_ms))
        shown.append(Slate(slate.items, slate.features(), slate.surface, slate.at_ms))
    encoded = [
        encode_batch(
            people[at : at + CHUNK], shown[at : at + CHUNK], table=tables.of(day), space=space
        )
        for day, (people, shown) in tqdm(asked.items(), desc="encode", leave=False, unit="day")
        for at in range(0, len(people), CHUNK)
    ]
    batches = [batch for batch, _ in encoded]
    slates = [slate for of_day in by_day.values() for slate in of_day]
    first = np.cumsum([0, *[len(batch.hist_ids) for batch in batches]])
    position = in_tiles([slate.positions for slate in slates], width)
    return Examples(
        hist_ids=np.concatenate([batch.hist_ids for batch in batches]),
        hist_age=np.concatenate([batch.hist_age for batch in batches]),
        hist_mask=np.concatenate([batch.hist_mask for batch in batches]),
        ctx_ids=np.concatenate([batch.ctx_ids for batch in batches]),
        cand_ids=np.concatenate([batch.cand_ids for batch in batches]),
        tile_user=np.concatenate(
            [batch.tile_user + at for batch, at in zip(batches, first[:-1], strict=True)]
        ).astype(np.int32),
        click=in_tiles([slate.click for slate in slates], width).astype(np.float32),
        long_dwell=in_tiles([slate.long_dwell for slate in slates], width).astype(np.float32),
        position=np.nan_to_num(position).astype(np.int64),
        at_ms=np.array([slate.at_ms for slate in slates], np.int64),
    )


def in_tiles(values: Sequence[Sequence[float]], width: int) -> NDArray[np.float64]:
    """One value a candidate, cut into tiles as slates are: [N, T], NaN where padded."""
    parts = []
    for row in values:
        padded = np.full(-(-len(row) // width) * width, np.nan)
        padded[: len(row)] = row
        parts.append(padded.reshape(-1, width))
    return np.concatenate(parts)
