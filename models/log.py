"""A click log: slates that were shown, events that followed, and what was known before.

Sources (`synthetic`, `kuairand`) make one; everything after them knows only this shape.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import msgspec
import polars as pl

from service.domain import Profile, Signal
from service.errors import RankerError

ITEM_SCHEMA = pl.Schema(
    {
        "id": pl.String,
        "title": pl.String,
        "category": pl.String,
        "author": pl.String,
        "created_ms": pl.Int64,
        "duration_s": pl.Float64,
    }
)
IMPRESSION_SCHEMA = pl.Schema(
    {
        "slate": pl.Int64,
        "user": pl.String,
        "item": pl.String,
        "at_ms": pl.Int64,
        "surface": pl.String,
        "position": pl.Int64,
        "click": pl.Boolean,
        "long_dwell": pl.Boolean,
    }
)
EVENT_SCHEMA = pl.Schema(
    {
        "user": pl.String,
        "item": pl.String,
        "at_ms": pl.Int64,
        "action": pl.String,
        "dwell_ms": pl.Int64,
        "surface": pl.String,
    }
)
EARLIER_SCHEMA = pl.Schema({"item": pl.String, "shown": pl.Float64, "liked": pl.Float64})
_MAY_BE_EMPTY = {"events", "earlier"}
_NULLABLE = {"created_ms", "duration_s"}


class LogFault(RankerError):
    """A log that cannot be trained on; says which column, and why."""


class Log(msgspec.Struct, frozen=True, kw_only=True):
    """Frames in the schemas above; impressions and events ascend in time."""

    name: str
    items: pl.DataFrame
    impressions: pl.DataFrame
    """Those of one slate share `slate`, and are ranked at its first `at_ms`."""
    events: pl.DataFrame
    earlier: pl.DataFrame
    """Counts of items from before the log: shown, and liked by the measure of that time."""
    seeds: Mapping[str, tuple[Signal, ...]]
    """Each user's signals from before the log, newest first."""
    long_seed_ms: int | None = None
    """From which dwell on a seed was long; None where seeds are no labels, such as likes alone."""
    profiles: Mapping[str, Profile]
    validate_from_ms: int
    test_from_ms: int
    least_items: int = 1
    """Slates with fewer candidates are not evaluated."""

    def check(self) -> None:
        """Raise LogFault where a column is missing, empty, of another type, or tells nothing."""
        for name, frame, schema in (
            ("items", self.items, ITEM_SCHEMA),
            ("impressions", self.impressions, IMPRESSION_SCHEMA),
            ("events", self.events, EVENT_SCHEMA),
            ("earlier", self.earlier, EARLIER_SCHEMA),
        ):
            _check_frame(name, frame, schema)
        for column in ("click", "long_dwell"):
            if self.impressions[column].n_unique() < 2:
                raise LogFault(f"impressions.{column}: one class only, nothing to learn from")
        for name, frame in (("impressions", self.impressions), ("events", self.events)):
            if not frame["at_ms"].is_sorted():
                raise LogFault(f"{name}.at_ms: not ascending")
        if not self.items["id"].is_unique().all():
            raise LogFault("items.id: an id stands twice")
        strangers = self.impressions.join(self.items, left_on="item", right_on="id", how="anti")
        if not strangers.is_empty():
            raise LogFault(f"impressions.item: {strangers['item'][0]!r} is not among the items")
        strange = self.events.filter(~pl.col("action").is_in(["click", "dwell"]))
        if not strange.is_empty():
            raise LogFault(f"events.action: {strange['action'][0]!r} is neither click nor dwell")
        if self.events.filter(pl.col("dwell_ms") < 0).height:
            raise LogFault("events.dwell_ms: below 0")

    def before(self, at_ms: int) -> pl.DataFrame:
        """Impressions from before an instant."""
        return self.impressions.filter(pl.col("at_ms") < at_ms)

    def digest(self) -> str:
        """SHA-256 over all frames as CSV, and seeds where they are labels; hex."""
        digest = hashlib.sha256()
        for frame in (self.items, self.impressions, self.events, self.earlier):
            digest.update(frame.write_csv().encode())
        if self.long_seed_ms is not None:
            digest.update(msgspec.json.encode([self.long_seed_ms, self.seeds]))
        return digest.hexdigest()


def _check_frame(name: str, frame: pl.DataFrame, schema: pl.Schema) -> None:
    if frame.is_empty() and name not in _MAY_BE_EMPTY:
        raise LogFault(f"{name}: no rows")
    for column, kind in schema.items():
        if column not in frame.columns:
            raise LogFault(f"{name}.{column}: missing")
        values = frame[column]
        if values.dtype != kind:
            raise LogFault(f"{name}.{column}: type {values.dtype}, not {kind}")
        if column in _NULLABLE:
            continue
        if values.null_count():
            raise LogFault(f"{name}.{column}: {values.null_count()} values are missing")
        if kind == pl.Float64 and not values.is_finite().all():
            raise LogFault(f"{name}.{column}: not a finite number")
        if column in {"id", "user", "item"} and (values == "").any():
            raise LogFault(f"{name}.{column}: an empty id")
