from typing import Any

import msgspec
import polars as pl
import pytest

from models.log import Log, LogFault
from models.synthetic import Size, generate

TINY = Size(items=40, shoppers=12, days=8)


@pytest.fixture(scope="module")
def tiny_log() -> Log:
    return generate(1, TINY)


def test_the_same_seed_gives_the_same_log_and_another_seed_another(tiny_log: Log) -> None:
    assert generate(1, TINY).digest() == tiny_log.digest()
    assert generate(2, TINY).digest() != tiny_log.digest()


def test_an_invented_log_passes_its_own_check(tiny_log: Log) -> None:
    tiny_log.check()
    assert tiny_log.items["title"].is_unique().sum() > 30
    assert tiny_log.items["id"].str.contains(r"^sku-\d{5}$").all()
    assert set(tiny_log.impressions["surface"].unique()) == {"home", "search", "product"}


def test_a_dwell_follows_its_click_by_the_time_dwelt(tiny_log: Log) -> None:
    user = tiny_log.events["user"][0]
    mine = tiny_log.events.filter(pl.col("user") == user).head(2)
    assert mine["action"].to_list() == ["click", "dwell"]
    assert mine["at_ms"][1] - mine["at_ms"][0] == mine["dwell_ms"][1]


def nulled(frame: pl.DataFrame, column: str) -> pl.DataFrame:
    return frame.with_columns(
        pl.when(pl.int_range(pl.len()) == 3).then(None).otherwise(pl.col(column)).alias(column)
    )


SPOILED: dict[str, tuple[str, Any]] = {
    "impressions.click: missing": ("impressions", lambda f: f.drop("click")),
    "impressions.item: 1 values are missing": ("impressions", lambda f: nulled(f, "item")),
    "impressions.user: an empty id": (
        "impressions",
        lambda f: f.with_columns(pl.lit("").alias("user")),
    ),
    "impressions.position: type String": (
        "impressions",
        lambda f: f.with_columns(pl.col("position").cast(pl.String)),
    ),
    "impressions.click: one class only": (
        "impressions",
        lambda f: f.with_columns(pl.lit(value=False).alias("click")),
    ),
    "impressions.at_ms: not ascending": ("impressions", lambda f: f.reverse()),
    "impressions: no rows": ("impressions", lambda f: f.clear()),
    "events.at_ms: not ascending": ("events", lambda f: f.reverse()),
    "events.action: 'buy' is neither click nor dwell": (
        "events",
        lambda f: f.with_columns(pl.lit("buy").alias("action")),
    ),
    "events.dwell_ms: below 0": (
        "events",
        lambda f: f.with_columns(pl.lit(-1, pl.Int64).alias("dwell_ms")),
    ),
    "items.id: an id stands twice": ("items", lambda f: pl.concat([f, f.head(1)])),
    "impressions.item: 'sku-00000' is not among the items": ("items", lambda f: f.tail(-1)),
    "earlier.shown: not a finite number": (
        "earlier",
        lambda f: pl.DataFrame(
            {"item": ["sku-00000"], "shown": [float("nan")], "liked": [0.0]}, schema=f.schema
        ),
    ),
}


@pytest.mark.parametrize("message", SPOILED)
def test_a_bad_log_is_refused_and_the_column_named(tiny_log: Log, message: str) -> None:
    frame, spoil = SPOILED[message]
    spoiled = msgspec.structs.replace(tiny_log, **{frame: spoil(getattr(tiny_log, frame))})
    with pytest.raises(LogFault, match=f"^{message}"):
        spoiled.check()
