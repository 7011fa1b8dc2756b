"""Reader of KuaiRand-Pure: short-video impressions of 25 April to 8 May 2022 as a Log.

Training slates are a user's impressions of one day; held-out and test slates are all of a
user's impressions of those days, ranked at the first of them. Times are China's (UTC+8).
"""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import polars as pl

from models.log import EARLIER_SCHEMA, EVENT_SCHEMA, IMPRESSION_SCHEMA, ITEM_SCHEMA, Log, LogFault
from service.domain import Profile, Signal

IMPRESSIONS = "impressions_20220425_20220508.parquet"
HISTORIES = "histories_until_20220424.parquet"
ITEMS = "items.parquet"
USERS = "users.parquet"
COLUMNS = {
    IMPRESSIONS: (
        "user_id", "video_id", "time_ms", "tab", "is_click", "long_view", "play_time_ms", "split"
    ),
    HISTORIES: ("user_id", "history_len", "last_time_ms", "watch_seq", "long_watch_flag"),
    ITEMS: ("video_id", "author_id", "upload_dt", "video_duration", "tag"),
    USERS: ("user_id",),
}  # fmt: skip
SEGMENTS = {
    "user_active_degree": "active",
    "register_days_range": "register",
    "follow_user_num_range": "follows",
    "fans_user_num_range": "fans",
    "friend_user_num_range": "friends",
    "is_video_author": "author",
    "onehot_feat0": "f0",
    "onehot_feat1": "f1",
    "onehot_feat6": "f6",
    "onehot_feat9": "f9",
    "onehot_feat10": "f10",
    "onehot_feat11": "f11",
}
DAY_MS = 86_400_000
FIRST_WATCH_MS = int(dt.datetime(2022, 4, 8, 16, tzinfo=dt.UTC).timestamp()) * 1000
"""9 April in China: histories hold watches from then on."""
LONG_WATCH_MS, SHORT_WATCH_MS = 30_000, 3_000
"""Histories say whether a watch was long, not how long: these stand for the two."""
LONGEST_DWELL_MS = 600_000
LEAST_ITEMS = 10
TEST_SPLIT = "test"


def load(folder: Path, *, held_out_days: int = 3) -> Log:
    """The log in `folder`; raises LogFault naming a file or column that is missing.

    The last `held_out_days` before the test are for validation; with 0 all days train.
    """
    shown = _read(folder, IMPRESSIONS).sort("time_ms", maintain_order=True)
    histories = _read(folder, HISTORIES)
    test_from_ms = _instant(shown.filter(pl.col("split") == TEST_SPLIT)["time_ms"].min())
    validate_from_ms = test_from_ms - held_out_days * DAY_MS
    # a few impressions of the training split lie after the first of the test split
    shown = shown.filter((pl.col("split") == TEST_SPLIT) | (pl.col("time_ms") < test_from_ms))
    return Log(
        name="kuairand",
        items=_items(_read(folder, ITEMS)),
        impressions=_impressions(shown, validate_from_ms, test_from_ms),
        events=_events(shown),
        earlier=_earlier(histories),
        seeds=_seeds(histories),
        long_seed_ms=LONG_WATCH_MS,
        profiles=_profiles(_read(folder, USERS)),
        validate_from_ms=validate_from_ms,
        test_from_ms=test_from_ms,
        least_items=LEAST_ITEMS,
    )


def _read(folder: Path, file: str) -> pl.DataFrame:
    try:
        frame = pl.read_parquet(folder / file)
    except FileNotFoundError as error:
        raise LogFault(f"{folder} holds no {file}") from error
    except pl.exceptions.PolarsError as error:
        raise LogFault(f"{file} is not a readable Parquet file: {error}") from error
    for column in COLUMNS[file]:
        if column not in frame.columns:
            raise LogFault(f"{file}: no column {column}")
    if frame.is_empty():
        raise LogFault(f"{file}: no rows")
    return frame


def _instant(value: object) -> int:
    if not isinstance(value, int):
        raise LogFault(f"{IMPRESSIONS}: split: no rows of {TEST_SPLIT}")
    return value


def _user() -> pl.Expr:
    return pl.format("u{}", "user_id").alias("user")


def _surface() -> pl.Expr:
    return pl.format("tab{}", "tab").alias("surface")


def _items(items: pl.DataFrame) -> pl.DataFrame:
    uploaded = pl.col("upload_dt").str.to_datetime("%Y-%m-%d", time_zone="Asia/Shanghai")
    return items.select(
        pl.format("v{}", "video_id").alias("id"),
        pl.format("video {}", "video_id").alias("title"),
        pl.col("tag").fill_null("").alias("category"),
        pl.format("a{}", "author_id").alias("author"),
        uploaded.dt.epoch("ms").alias("created_ms"),
        (pl.col("video_duration") / 1000).alias("duration_s"),
    ).cast(ITEM_SCHEMA)


def _impressions(shown: pl.DataFrame, validate_from_ms: int, test_from_ms: int) -> pl.DataFrame:
    at = pl.col("time_ms")
    days_back = (test_from_ms - 1 - at) // DAY_MS
    period = pl.when(at >= test_from_ms).then(-1).when(at >= validate_from_ms).then(-2)
    return shown.select(
        pl.struct("user_id", period.otherwise(days_back))
        .rank("dense")
        .cast(pl.Int64)
        .alias("slate"),
        _user(),
        pl.format("v{}", "video_id").alias("item"),
        at.alias("at_ms"),
        _surface(),
        pl.lit(0).alias("position"),
        (pl.col("is_click") > 0).alias("click"),
        (pl.col("long_view") > 0).alias("long_dwell"),
    ).cast(IMPRESSION_SCHEMA)


def _events(shown: pl.DataFrame) -> pl.DataFrame:
    """A click when it is seen, a dwell when it ends."""
    dwell_ms = pl.col("play_time_ms").clip(0, LONGEST_DWELL_MS).cast(pl.Int64)
    common = (_user(), pl.format("v{}", "video_id").alias("item"))
    clicks = shown.filter(pl.col("is_click") > 0).select(
        *common,
        pl.col("time_ms").alias("at_ms"),
        pl.lit("click").alias("action"),
        pl.lit(0).alias("dwell_ms"),
        _surface(),
    )
    dwells = shown.filter(pl.col("play_time_ms") > 0).select(
        *common,
        (pl.col("time_ms") + dwell_ms).alias("at_ms"),
        pl.lit("dwell").alias("action"),
        dwell_ms.alias("dwell_ms"),
        _surface(),
    )
    events = pl.concat([clicks.cast(EVENT_SCHEMA), dwells.cast(EVENT_SCHEMA)])
    return events.sort("at_ms", maintain_order=True)


def _earlier(histories: pl.DataFrame) -> pl.DataFrame:
    watches = histories.explode("watch_seq", "long_watch_flag")
    counted = watches.group_by("watch_seq", maintain_order=True).agg(
        pl.len().alias("shown"), pl.col("long_watch_flag").sum().alias("liked")
    )
    return counted.select(pl.format("v{}", "watch_seq").alias("item"), "shown", "liked").cast(
        EARLIER_SCHEMA
    )


def _seeds(histories: pl.DataFrame) -> dict[str, tuple[Signal, ...]]:
    """The last watches as dwell signals, spread evenly over the days that they took."""
    seeds = {}
    columns = ("user_id", "history_len", "last_time_ms", "watch_seq", "long_watch_flag")
    for user, total, last_ms, watched, long_watch in histories.select(columns).iter_rows():
        gap_ms = max(1, (last_ms - FIRST_WATCH_MS) // total)
        newest_first = zip(reversed(watched), reversed(long_watch), strict=True)
        seeds[f"u{user}"] = tuple(
            Signal(
                f"v{item}",
                "dwell",
                last_ms - at * gap_ms,
                LONG_WATCH_MS if long else SHORT_WATCH_MS,
            )
            for at, (item, long) in enumerate(newest_first)
        )
    return seeds


def _profiles(users: pl.DataFrame) -> dict[str, Profile]:
    known = {column: word for column, word in SEGMENTS.items() if column in users.columns}
    words = users.select(
        pl.format("u{}", "user_id"),
        *(
            pl.format(f"{word}={{}}", pl.col(column).cast(pl.String))
            for column, word in known.items()
        ),
    )
    return {
        user: Profile(tuple(word for word in segments if word is not None))
        for user, *segments in words.iter_rows()
    }
