"""The reader of KuaiRand-Pure, on a handful of rows in the set's own shape."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from models.dataset import shown_slates
from models.kuairand import (
    FIRST_WATCH_MS,
    HISTORIES,
    IMPRESSIONS,
    ITEMS,
    LONG_WATCH_MS,
    SHORT_WATCH_MS,
    USERS,
    load,
)
from models.log import LogFault
from models.replay import known_before, mixed_slates
from service.domain import Profile, Signal

MAY_1_MS = 1_651_334_400_000  # in China
HOUR_MS = 3_600_000

# hours from 1 May, user, video, tab, click, long view, play time
SHOWN = [
    (-60, 1, 10, 0, 0, 0, 0),
    (-59, 1, 11, 1, 1, 1, 26_000),
    (-30, 2, 10, 1, 0, 0, 1_500),
    *[(at, 1, 10 + at, at % 2, at % 3 == 0, 0, 0) for at in range(12)],
    (13, 2, 11, 1, 1, 1, 9_000),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    columns = ("time_ms", "user_id", "video_id", "tab", "is_click", "long_view", "play_time_ms")
    rows = [(MAY_1_MS + at * HOUR_MS, *map(int, row)) for at, *row in SHOWN]
    split = pl.when(pl.col("time_ms") < MAY_1_MS).then(pl.lit("val")).otherwise(pl.lit("test"))
    pl.DataFrame(rows, columns, orient="row").with_columns(split.alias("split")).write_parquet(
        tmp_path / IMPRESSIONS
    )
    pl.DataFrame(
        {
            "user_id": [1],
            "history_len": [4],
            "last_time_ms": [FIRST_WATCH_MS + 4 * HOUR_MS],
            "watch_seq": [[10, 12, 11]],
            "long_watch_flag": [[0, 0, 1]],
        }
    ).write_parquet(tmp_path / HISTORIES)
    videos = list(range(10, 25))
    pl.DataFrame(
        {
            "video_id": videos,
            "author_id": [7] * len(videos),
            "upload_dt": ["2022-04-10"] * len(videos),
            "video_duration": [None, *[8_500.0] * (len(videos) - 1)],
            "tag": [None, *["39"] * (len(videos) - 1)],
        }
    ).write_parquet(tmp_path / ITEMS)
    pl.DataFrame(
        {
            "user_id": [1, 2],
            "register_days_range": ["730+", None],
            "is_video_author": [1, 0],
        }
    ).write_parquet(tmp_path / USERS)
    return tmp_path


def test_histories_become_signals_spread_over_the_days_they_took(folder: Path) -> None:
    log = load(folder)
    log.check()
    last_ms = FIRST_WATCH_MS + 4 * HOUR_MS
    assert log.seeds["u1"] == (
        Signal("v11", "dwell", last_ms, LONG_WATCH_MS),
        Signal("v12", "dwell", last_ms - HOUR_MS, SHORT_WATCH_MS),
        Signal("v10", "dwell", last_ms - 2 * HOUR_MS, SHORT_WATCH_MS),
    )
    assert log.earlier.sort("item").rows() == [("v10", 1, 0), ("v11", 1, 1), ("v12", 1, 0)]


def test_a_click_is_told_when_seen_and_a_dwell_when_it_ends(folder: Path) -> None:
    mine = load(folder).events.filter(pl.col("user") == "u1").head(2).rows()
    seen_ms = MAY_1_MS - 59 * HOUR_MS
    assert mine == [
        ("u1", "v11", seen_ms, "click", 0, "tab1"),
        ("u1", "v11", seen_ms + 26_000, "dwell", 26_000, "tab1"),
    ]


def test_what_is_known_when_the_test_begins(folder: Path) -> None:
    known = {known.user: known for known in known_before(load(folder), ["u1", "u2"])}
    seen_ms = MAY_1_MS - 59 * HOUR_MS
    assert known["u1"].signals[0] == Signal("v11", "click", seen_ms, 26_000, "tab1")
    assert known["u1"].signals[1].at_ms == FIRST_WATCH_MS + 4 * HOUR_MS
    assert known["u1"].profile == Profile(("register=730+", "author=1"))
    assert known["u2"].profile == Profile(("author=0",))
    assert [signal.item_id for signal in known["u2"].signals] == ["v10"]


def test_a_test_slate_is_all_of_a_users_impressions_at_the_first_ones_time(folder: Path) -> None:
    (slate,) = mixed_slates(load(folder))
    assert (slate.user, slate.at_ms, len(slate.items)) == ("u1", MAY_1_MS, 12)
    assert slate.surface == ""
    features = slate.features()
    assert features is not None
    assert [given.surface for given in features if given] == [f"tab{at % 2}" for at in range(12)]


def test_training_slates_are_days_and_held_out_ones_whole_periods(folder: Path) -> None:
    def slates(held_out_days: int) -> list[tuple[str, int]]:
        log = load(folder, held_out_days=held_out_days)
        return [
            (slate.user, len(slate.items))
            for slate in shown_slates(log.impressions)
            if slate.at_ms < log.test_from_ms
        ]

    assert slates(0) == [("u1", 2), ("u2", 1)]
    assert slates(3) == [("u1", 2), ("u2", 1)]
    log = load(folder, held_out_days=3)
    assert log.validate_from_ms == MAY_1_MS - 3 * 24 * HOUR_MS


@pytest.mark.parametrize(
    ("file", "column"),
    [(IMPRESSIONS, "is_click"), (HISTORIES, "watch_seq"), (ITEMS, "tag"), (USERS, "user_id")],
)
def test_a_missing_column_is_named(folder: Path, file: str, column: str) -> None:
    path = folder / file
    pl.read_parquet(path).drop(column).write_parquet(path)
    with pytest.raises(LogFault, match=rf"{file}: no column {column}"):
        load(folder)


def test_missing_empty_and_broken_files_are_named(folder: Path) -> None:
    path = folder / USERS
    pl.read_parquet(path).clear().write_parquet(path)
    with pytest.raises(LogFault, match=rf"{USERS}: no rows"):
        load(folder)
    path.write_bytes(b"not parquet")
    with pytest.raises(LogFault, match=rf"{USERS} is not a readable Parquet file"):
        load(folder)
    path.unlink()
    with pytest.raises(LogFault, match=rf"holds no {USERS}"):
        load(folder)


def test_without_test_rows_the_split_is_named(folder: Path) -> None:
    path = folder / IMPRESSIONS
    pl.read_parquet(path).with_columns(pl.lit("val").alias("split")).write_parquet(path)
    with pytest.raises(LogFault, match="split: no rows of test"):
        load(folder)
