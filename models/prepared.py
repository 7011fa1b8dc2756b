"""The folder that `prepare` writes, read back as a log."""

from __future__ import annotations

from pathlib import Path

import msgspec
import polars as pl

from models.log import (
    EARLIER_SCHEMA,
    EVENT_SCHEMA,
    IMPRESSION_SCHEMA,
    ITEM_SCHEMA,
    Log,
    LogFault,
)
from service.domain import Profile, Signal

SUMMARY = "log.json"
"""Written last: a folder without it is not complete."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What `prepare` found, and how the log is cut."""

    name: str
    validate_from_ms: int
    test_from_ms: int
    least_items: int
    counts: dict[str, int]
    warnings: list[str]


def load(folder: Path) -> Log:
    """The log in `folder`; raises LogFault where `prepare` has not finished there."""
    try:
        summary = msgspec.json.decode((folder / SUMMARY).read_bytes(), type=Summary)
    except OSError as error:
        raise LogFault(f"{folder} holds no {SUMMARY}: prepare writes it last") from error
    except msgspec.DecodeError as error:
        raise LogFault(f"{folder / SUMMARY}: {error}") from error
    return Log(
        name=summary.name,
        items=_read(folder, "items", ITEM_SCHEMA),
        impressions=_read(folder, "impressions", IMPRESSION_SCHEMA),
        events=_read(folder, "events", EVENT_SCHEMA),
        earlier=EARLIER_SCHEMA.to_frame(),
        seeds=_seeds(folder / "seeds.parquet"),
        profiles=_profiles(folder / "profiles.parquet"),
        validate_from_ms=summary.validate_from_ms,
        test_from_ms=summary.test_from_ms,
        least_items=summary.least_items,
    )


def _read(folder: Path, name: str, schema: pl.Schema) -> pl.DataFrame:
    path = folder / f"{name}.parquet"
    try:
        return pl.read_parquet(path).select(schema.names()).cast(schema)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise LogFault(f"{path}: {error}") from error


def _seeds(path: Path) -> dict[str, tuple[Signal, ...]]:
    if not path.exists():
        return {}
    seeds: dict[str, list[Signal]] = {}
    columns = ("user", "item", "action", "at_ms", "dwell_ms")
    for user, item, action, at_ms, dwell_ms in pl.read_parquet(path).select(columns).iter_rows():
        seeds.setdefault(user, []).append(Signal(item, action, at_ms, dwell_ms))
    return {user: tuple(signals) for user, signals in seeds.items()}


def _profiles(path: Path) -> dict[str, Profile]:
    if not path.exists():
        return {}
    rows = pl.read_parquet(path).select("user", "words").iter_rows()
    return {user: Profile(tuple(words)) for user, words in rows}
