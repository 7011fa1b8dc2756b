"""The mapping file: which columns of a user's own log mean what."""

from __future__ import annotations

import datetime as dt
import re
import tomllib
from pathlib import Path
from typing import Literal

import msgspec

from models.log import LogFault

Unit = Literal["s", "ms", "us"]


class Impressions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Columns of the impressions.

    One row an item (`item`, `click`), or one row a slate (`shown`, `clicked`: lists of ids).
    """

    user: str
    time: str
    time_unit: Unit | None = None
    """None: the column holds timestamps, or ISO 8601 as text (UTC where no zone is told)."""
    item: str | None = None
    click: str | None = None
    shown: str | None = None
    clicked: str | None = None
    dwell: str | None = None
    """How long the item was looked at; in a row of a slate, each clicked item."""
    dwell_unit: Unit = "ms"
    slate: str | None = None
    """None: a user's impressions without a pause of `slate_gap_s` are one slate."""
    surface: str | None = None
    position: str | None = None


class Items(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Columns of the items."""

    id: str
    title: str | None = None
    category: str | None = None
    author: str | None = None
    created: str | None = None
    created_unit: Unit | None = None
    duration: str | None = None
    duration_unit: Unit = "s"


class Histories(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Columns of what users did before the log: one row an event, or lists, one row a user."""

    user: str
    item: str
    time: str
    time_unit: Unit | None = None
    dwell: str | None = None
    dwell_unit: Unit = "ms"


class Users(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Columns of the users; each segment becomes a word `column=value` of the profile."""

    id: str
    segments: tuple[str, ...]


class Mapping(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One log: its columns, and how it is cut."""

    name: str
    impressions: Impressions
    items: Items | None = None
    histories: Histories | None = None
    users: Users | None = None
    long_dwell_s: float = 20.0
    """The shortest dwell that counts as long."""
    slate_gap_s: float = 300.0
    test_share: float = 0.2
    """The last share of slates, by time; `test_from` overrides it."""
    validate_share: float = 0.1
    """The last share of the slates before the test."""
    test_from: dt.datetime | None = None
    validate_from: dt.datetime | None = None
    least_items: int = 2
    """Slates with fewer candidates are not evaluated."""


def read_mapping(path: Path) -> Mapping:
    """The mapping in a TOML file; raises LogFault that names the key and the reason."""
    try:
        mapping = msgspec.convert(tomllib.loads(path.read_text()), Mapping)
    except OSError as error:
        raise LogFault(f"{path}: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise LogFault(f"{path} is not TOML: {error}") from error
    except msgspec.ValidationError as error:
        raise LogFault(f"{path}: {error}") from error
    fault = _fault(mapping)
    if fault:
        raise LogFault(f"{path}: {fault}")
    return mapping


def _fault(mapping: Mapping) -> str:
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,63}", mapping.name):
        return "name: lower-case letters, digits, dots and dashes are needed; it names the model"
    shown = mapping.impressions
    by_item, by_slate = (shown.item, shown.click), (shown.shown, shown.clicked)
    if any(by_item) == any(by_slate) or not (all(by_item) or all(by_slate)):
        return "impressions: either item and click, or shown and clicked"
    if shown.shown and (shown.position or shown.slate):
        return "impressions: a row of shown and clicked is a slate; no slate or position column"
    for name in ("test_share", "validate_share"):
        if not 0 <= getattr(mapping, name) < 1:
            return f"{name}: not from 0 to below 1"
    if not mapping.test_share and mapping.test_from is None:
        return "test_share: 0, and no test_from: nothing to evaluate on"
    for name in ("test_from", "validate_from"):
        instant = getattr(mapping, name)
        if instant is not None and instant.tzinfo is None:
            return f"{name}: without a time zone; write 2026-05-01T00:00:00Z"
    for name in ("long_dwell_s", "slate_gap_s", "least_items"):
        if getattr(mapping, name) <= 0:
            return f"{name}: not above 0"
    return ""
