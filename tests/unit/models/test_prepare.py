"""A log of one's own: three formats give one log, and what is wrong is named or counted."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from models.cli import main
from models.log import Log, LogFault
from models.mapping import read_mapping
from models.prepare import prepare
from models.prepared import Summary, load

MAPPING = """
name = "own"
long_dwell_s = 20
test_share = 0.25
validate_share = 0.2

[impressions]
user = "user"
item = "item"
time = "at"
time_unit = "ms"
click = "click"
dwell = "dwell"
dwell_unit = "ms"
slate = "slate"
surface = "surface"
position = "position"
"""
ITEMS = """
[items]
id = "id"
title = "title"
category = "category"
author = "author"
created = "created_ms"
created_unit = "ms"
duration = "duration_s"
duration_unit = "s"
"""


def rows_of(log: Log) -> pl.DataFrame:
    """The invented log as somebody else would have written it, a row an impression."""
    dwells = (
        log.events.filter(pl.col("action") == "dwell")
        .select("user", "item", "dwell_ms", (pl.col("at_ms") - pl.col("dwell_ms")).alias("from"))
        .group_by("user", "item")
        .agg(pl.col("dwell_ms").first())
    )
    shown = log.impressions.join(dwells, on=["user", "item"], how="left", maintain_order="left")
    return shown.select(
        "slate",
        "user",
        "item",
        pl.col("at_ms").alias("at"),
        "surface",
        "position",
        pl.col("click").cast(pl.Int8),
        pl.when("click").then("dwell_ms").otherwise(0).alias("dwell"),
    )


WRITERS: dict[str, Callable[[pl.DataFrame, Path], None]] = {
    "csv": lambda frame, path: frame.write_csv(path),
    "parquet": lambda frame, path: frame.write_parquet(path),
    "jsonl": lambda frame, path: frame.write_ndjson(path),
}


class Desk:
    """A folder with a mapping and a log, prepared on demand."""

    def __init__(self, folder: Path, frame: pl.DataFrame, mapping: str = MAPPING) -> None:
        self.folder = folder
        self.frame = frame
        self.mapping = mapping
        self.files: dict[str, list[Path]] = {}

    def run(self, kind: str = "parquet", spoiled: Mapping[str, pl.Expr] | None = None) -> Summary:
        path = self.folder / f"log.{kind}"
        WRITERS[kind](self.frame.with_columns(**(spoiled or {})), path)
        mapping = self.folder / "map.toml"
        mapping.write_text(self.mapping)
        out = self.folder / f"out-{kind}"
        return prepare(read_mapping(mapping), {"impressions": [path], **self.files}, out)

    def log(self, kind: str = "parquet") -> Log:
        return load(self.folder / f"out-{kind}")


@pytest.fixture
def desk(log: Log, tmp_path: Path) -> Desk:
    return Desk(tmp_path, rows_of(log))


def test_the_invented_log_comes_back_as_it_was(desk: Desk, log: Log) -> None:
    summary = desk.run()
    again = desk.log()
    again.check()
    columns = ["user", "item", "at_ms", "surface", "position", "click"]
    order = ["at_ms", "user", "position"]
    assert (
        again.impressions.select(columns)
        .sort(order)
        .equals(log.impressions.select(columns).sort(order))
    )
    assert summary.counts["impressions"] == log.impressions.height
    assert summary.counts["slates"] == log.impressions["slate"].n_unique()
    tested = again.impressions.group_by("slate").agg(pl.col("at_ms").min())
    share = (tested["at_ms"] >= summary.test_from_ms).mean()
    assert share == pytest.approx(0.25, abs=0.01)
    assert summary.warnings == []
    clicks = again.events.filter(pl.col("action") == "click")
    assert clicks.height == log.impressions["click"].sum()


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_every_format_gives_the_same_log(desk: Desk, kind: str) -> None:
    desk.run("parquet")
    desk.run(kind)
    assert desk.log(kind).digest() == desk.log("parquet").digest()


def test_units_and_timestamps_tell_the_same_instants(desk: Desk) -> None:
    desk.run("parquet")
    frame, mapping = desk.frame, desk.mapping
    whole_s = pl.col("at") // 1_000 * 1_000
    desk.frame = frame.with_columns(whole_s.alias("at"))
    desk.run("csv")
    desk.frame = frame.with_columns(
        pl.from_epoch(whole_s, "ms").dt.strftime("%Y-%m-%dT%H:%M:%S+00:00").alias("at")
    )
    desk.mapping = mapping.replace('time_unit = "ms"\n', "")
    desk.run("jsonl")
    assert desk.log("csv").digest() == desk.log("jsonl").digest()


def test_items_histories_and_users_are_read_beside_it(desk: Desk, log: Log, tmp_path: Path) -> None:
    first_ms = int(desk.frame["at"].min())  # type: ignore[arg-type]
    items = log.items.head(150)
    items.vstack(items.head(2)).write_csv(tmp_path / "items.csv")
    pl.DataFrame(
        {
            "who": ["a", "b"],
            "what": [["x", "y", "z"], ["x"]],
            "when": [[first_ms - 5_000, first_ms - 9_000, first_ms + 1], [first_ms - 1]],
            "long": [[30, None, 4], [1]],
        }
    ).write_parquet(tmp_path / "histories.parquet")
    pl.DataFrame({"id": ["a", "b"], "age": ["18-24", None], "city": ["Kiel", "Bonn"]}).write_ndjson(
        tmp_path / "users.jsonl"
    )
    desk.mapping += ITEMS + (
        '[histories]\nuser = "who"\nitem = "what"\ntime = "when"\ntime_unit = "ms"\n'
        'dwell = "long"\ndwell_unit = "s"\n[users]\nid = "id"\nsegments = ["age", "city"]\n'
    )
    desk.files = {
        "items": [tmp_path / "items.csv"],
        "histories": [tmp_path / "histories.parquet"],
        "users": [tmp_path / "users.jsonl"],
    }
    summary = desk.run()
    again = desk.log()
    assert [(s.item_id, s.action, s.dwell_ms) for s in again.seeds["a"]] == [
        ("x", "dwell", 30_000),
        ("y", "click", 0),
    ]
    assert again.profiles["a"].segments == ("age=18-24", "city=Kiel")
    assert again.profiles["b"].segments == ("city=Bonn",)
    told = again.items.filter(pl.col("id").is_in(items["id"].to_list()))
    assert told.sort("id").equals(items.sort("id"))
    assert (
        again.items.height
        == log.impressions["item"].n_unique()
        + told.filter(~pl.col("id").is_in(log.impressions["item"].unique().to_list())).height
    )
    warnings = "\n".join(summary.warnings)
    assert "items told more than once, kept once: 2" in warnings
    assert "not among the items" in warnings
    assert (
        "events of the log's own days, left out, as they tell what is to be ranked: 1" in warnings
    )


def test_slates_are_found_by_pauses_where_no_column_tells_them(tmp_path: Path) -> None:
    minutes = [0, 1, 2, 30, 31, 90]
    frame = pl.DataFrame(
        {
            "user": ["a"] * 6 + ["b"] * 6,
            "item": [f"i{at}" for at in range(6)] * 2,
            "at": [1_700_000_000 + 60 * at for at in minutes] * 2,
            "click": [1, 0, 0, 1, 0, 0] * 2,
        }
    )
    mapping = (
        'name = "gaps"\nslate_gap_s = 300\ntest_share = 0.4\n[impressions]\nuser = "user"\n'
        'item = "item"\ntime = "at"\ntime_unit = "s"\nclick = "click"\n'
    )
    desk = Desk(tmp_path, frame, mapping)
    summary = desk.run()
    assert summary.counts["slates"] == 6
    sizes = desk.log().impressions.filter(pl.col("user") == "a").group_by("slate").len()
    assert sorted(sizes["len"]) == [1, 2, 3]
    assert summary.warnings == ["no dwell column: a click stands for a long dwell"]


def test_candidate_lists_become_slates_and_dwell_is_of_what_was_clicked(tmp_path: Path) -> None:
    frame = pl.DataFrame(
        {
            "user": ["a", "b", "a"],
            "at": ["2026-05-01 10:00:00", "2026-05-02 10:00:00", "2026-05-03 10:00:00"],
            "shown": [[1, 2, 3], [2, 3], [4, 5]],
            "clicked": [[2], [], [4]],
            "read": [40.0, 3.0, 1.0],
        }
    )
    mapping = (
        'name = "lists"\ntest_from = 2026-05-03T00:00:00Z\nvalidate_share = 0\n[impressions]\n'
        'user = "user"\ntime = "at"\nshown = "shown"\nclicked = "clicked"\ndwell = "read"\n'
        'dwell_unit = "s"\n'
    )
    desk = Desk(tmp_path, frame, mapping)
    summary = desk.run()
    assert summary.validate_from_ms == summary.test_from_ms == 1_777_766_400_000
    again = desk.log()
    assert again.impressions.select("slate", "item", "click", "long_dwell").rows() == [
        (1, "1", False, False),
        (1, "2", True, True),
        (1, "3", False, False),
        (2, "2", False, False),
        (2, "3", False, False),
        (3, "4", True, False),
        (3, "5", False, False),
    ]
    assert again.events.select("item", "action", "dwell_ms").rows() == [
        ("2", "click", 0),
        ("2", "dwell", 40_000),
        ("4", "click", 0),
        ("4", "dwell", 1_000),
    ]


def test_timestamps_of_every_fineness_tell_the_same_instants(desk: Desk) -> None:
    desk.mapping = desk.mapping.replace('time_unit = "ms"\n', "")
    mapping = desk.folder / "map.toml"
    mapping.write_text(desk.mapping)
    digests = set()
    for unit in ("ns", "us", "ms"):
        path = desk.folder / f"{unit}.parquet"
        at = pl.from_epoch("at", "ms").cast(pl.Datetime(unit))
        desk.frame.with_columns(at=at).write_parquet(path)
        prepare(read_mapping(mapping), {"impressions": [path]}, desk.folder / unit)
        digests.add(load(desk.folder / unit).digest())
    assert len(digests) == 1


def test_candidate_lists_told_twice_are_one_slate_and_counted(tmp_path: Path) -> None:
    frame = pl.DataFrame(
        {
            "user": ["a", "a", "a", "b", "c"],
            "at": [1_700_000_000, 1_700_000_000, 1_700_000_900, 1_700_000_800, 1_700_000_950],
            "shown": [[1, 2], [1, 2], [1, 2], [1, 2, 3], [1, 2]],
            "clicked": [[1], [1], [2], [3], None],
        }
    )
    mapping = (
        'name = "lists"\ntest_share = 0.4\n[impressions]\nuser = "user"\ntime = "at"\n'
        'time_unit = "s"\nshown = "shown"\nclicked = "clicked"\n'
    )
    summary = Desk(tmp_path, frame, mapping).run()
    assert (summary.counts["slates"], summary.counts["impressions"]) == (3, 7)
    assert "impressions told more than once, kept once: 2" in summary.warnings
    assert "clicked: rows without one, left out: 2" in summary.warnings


def test_no_slate_reaches_over_a_split(tmp_path: Path) -> None:
    """A visit across the test's first instant trains on nothing that comes after it."""
    frame = pl.DataFrame(
        {
            "user": ["a"] * 20 + ["b"] * 20,
            "item": [f"i{at}" for at in range(20)] * 2,
            "at": [1_700_000_000 + 60 * at for at in range(20)]
            + [1_700_000_600 + 60 * at for at in range(20)],
            "click": [int(at % 3 == 0) for at in range(40)],
        }
    )
    mapping = (
        'name = "visits"\ntest_from = 2023-11-14T22:23:20Z\nvalidate_share = 0\n[impressions]\n'
        'user = "user"\nitem = "item"\ntime = "at"\ntime_unit = "s"\nclick = "click"\n'
    )
    desk = Desk(tmp_path, frame, mapping)
    summary = desk.run()
    test_from = summary.test_from_ms
    assert test_from == 1_700_000_600_000
    told = "impressions from after a split, of slates from before it, left out of slates: 10"
    assert told in summary.warnings
    again = desk.log()
    slates = again.impressions.group_by("slate").agg(
        pl.col("at_ms").min().alias("first"), pl.col("at_ms").max().alias("last")
    )
    assert not slates.filter((pl.col("first") < test_from) & (pl.col("last") >= test_from)).height
    assert again.events.height == frame["click"].sum(), "what was clicked is still known later"


def test_a_file_is_itself_whatever_its_name(desk: Desk) -> None:
    desk.frame.head(desk.frame.height // 2).write_csv(desk.folder / "log1.csv")
    desk.frame.write_csv(desk.folder / "log[1].csv")
    mapping = desk.folder / "map.toml"
    mapping.write_text(desk.mapping)
    files = {"impressions": [desk.folder / "log[1].csv"]}
    summary = prepare(read_mapping(mapping), files, desk.folder / "out")
    assert summary.counts["impressions"] == desk.frame.height


def test_ids_of_several_types_in_one_column_stay_plain_words(tmp_path: Path) -> None:
    lines = [
        {"user": 7 if at % 2 else "seven", "item": f"i{at}", "at": 1_700_000_000 + 900 * at}
        | {"click": at % 3 == 0}
        for at in range(12)
    ]
    path, mapping = tmp_path / "log.jsonl", tmp_path / "map.toml"
    path.write_text("\n".join(map(json.dumps, lines)))
    mapping.write_text(
        'name = "ids"\n[impressions]\nuser = "user"\nitem = "item"\ntime = "at"\n'
        'time_unit = "s"\nclick = "click"\n'
    )
    prepare(read_mapping(mapping), {"impressions": [path]}, tmp_path / "out")
    assert set(load(tmp_path / "out").impressions["user"]) == {"7", "seven"}


def every(step: int, value: Any, column: str) -> pl.Expr:
    return pl.when(pl.int_range(pl.len()) % step == 0).then(value).otherwise(pl.col(column))


COUNTED: dict[str, pl.Expr] = {
    "user: rows without one, left out": every(10, None, "user"),
    "item: rows without one, left out": every(10, pl.lit(""), "item"),
    "slate: rows without one, left out": every(10, None, "slate"),
    "at: rows without one, left out": every(10, None, "at"),
    "click: rows without one, left out": every(10, float("nan"), "click"),
    "dwell: not a number from 0 up, taken as 0": every(2, -5, "dwell"),
}


@pytest.mark.parametrize("warning", COUNTED)
def test_rows_that_cannot_be_used_are_counted(desk: Desk, warning: str) -> None:
    column = warning.partition(":")[0]
    summary = desk.run(spoiled={column: COUNTED[warning]})
    (told,) = summary.warnings
    text, _, count = told.rpartition(": ")
    assert text == warning
    if column == "dwell":
        assert int(count.replace(",", "")) > 0
        return
    left_out = len(range(0, desk.frame.height, 10))
    assert int(count.replace(",", "")) == left_out
    assert summary.counts["impressions"] == desk.frame.height - left_out
    desk.log().check()


def test_a_tenth_told_twice_counts_once(desk: Desk) -> None:
    height = desk.frame.height
    desk.frame = pl.concat([desk.frame, desk.frame.gather_every(10)]).sample(
        fraction=1, shuffle=True, seed=1
    )
    summary = desk.run()
    again = len(range(0, height, 10))
    assert summary.warnings == [f"impressions told more than once, kept once: {again:,}"]
    assert summary.counts["impressions"] == height


REFUSED: dict[str, pl.Expr] = {
    "at: .* lie outside 1990 to 2100, as .*two units in one column": every(
        3, pl.col("at") // 1_000, "at"
    ),
    "at: .* are no times, as 'yesterday'": every(9, pl.lit("yesterday"), "at"),
    "click: .* are neither 0 nor 1, as '7'": every(5, 7, "click"),
    "click: 0 clicks in .* one class only": pl.lit(0).alias("click"),
    "dwell: 0 long_dwells in .* one class only": pl.lit(0).alias("dwell"),
    "rows can be used: user: rows without one, left out": pl.lit(None).alias("user"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_log_that_would_mislead_is_refused(desk: Desk, reason: str) -> None:
    column = "user" if reason.startswith("rows") else reason.partition(":")[0]
    spoiled = REFUSED[reason]
    if column == "at":
        desk.frame = desk.frame.with_columns(pl.col("at").cast(pl.String))
        spoiled = spoiled if "yesterday" in reason else every(3, pl.lit("1700000000"), "at")
    with pytest.raises(LogFault, match=reason) as raised:
        desk.run(spoiled={column: spoiled})
    assert "log.parquet" in str(raised.value)
    with pytest.raises(LogFault, match=r"holds no log\.json"):
        desk.log()


def test_a_column_that_is_not_there_is_named_with_those_that_are(desk: Desk) -> None:
    desk.mapping = desk.mapping.replace('click = "click"', 'click = "clicked"')
    with pytest.raises(LogFault, match=r"log\.csv: no column clicked; there are slate, user, item"):
        desk.run("csv")


def test_a_file_that_is_none_is_refused(desk: Desk, tmp_path: Path) -> None:
    desk.run()
    mapping = read_mapping(tmp_path / "map.toml")
    broken = tmp_path / "broken.parquet"
    broken.write_bytes((tmp_path / "log.parquet").read_bytes()[:500])
    with pytest.raises(LogFault, match=r"broken\.parquet: cannot be read"):
        prepare(mapping, {"impressions": [broken]}, tmp_path / "b")
    with pytest.raises(LogFault, match=r"nothing\.csv: no such file"):
        prepare(mapping, {"impressions": [tmp_path / "nothing.csv"]}, tmp_path / "c")
    desk.frame.write_csv(tmp_path / "more.csv")
    both = [tmp_path / "log.parquet", tmp_path / "more.csv"]
    with pytest.raises(LogFault, match="several kinds"):
        prepare(mapping, {"impressions": both}, tmp_path / "d")
    with pytest.raises(LogFault, match="items: both files and a section"):
        prepare(mapping, {"impressions": both[:1], "items": both[:1]}, tmp_path / "e")
    with pytest.raises(LogFault, match="not empty"):
        desk.run()


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('click = "click"', 'click = "click"\ncolour = "x"', "unknown field `colour`"),
        ('user = "user"\n', "", "missing required field `user`"),
        ('time_unit = "ms"', 'time_unit = "h"', "time_unit"),
        ('click = "click"\n', "", "either item and click, or shown and clicked"),
        ("test_share = 0.25", "test_share = 1.5", "test_share: not from 0 to below 1"),
        ('name = "own"', 'name = "../own"', "name: lower-case"),
        ('name = "own"', "name = own", "is not TOML"),
    ],
)
def test_a_wrong_mapping_names_the_key(desk: Desk, old: str, new: str, reason: str) -> None:
    assert old in desk.mapping
    desk.mapping = desk.mapping.replace(old, new, 1)
    with pytest.raises(LogFault, match=reason):
        desk.run()


def test_the_commands_lead_from_a_log_to_a_checkpoint(
    desk: Desk, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    desk.run("csv")
    out = tmp_path / "own"
    mapping = ["--mapping", str(tmp_path / "map.toml")]
    assert main(["prepare", *mapping, "--out", str(out), str(tmp_path / "log.csv")]) == 0
    assert "impressions" in capsys.readouterr().out
    assert json.loads((out / "log.json").read_text())["name"] == "own"
    checkpoint = str(tmp_path / "own.pt")
    source = ["--log", "prepared", "--data", str(out)]
    assert main(["train", *source, "--epochs", "1", "--checkpoint", checkpoint]) == 0
    assert main(["evaluate", *source, "--checkpoint", checkpoint]) == 0
    assert "test slates of own" in capsys.readouterr().out
    assert main(["prepare", *mapping, "--out", str(out), str(tmp_path / "log.csv")]) == 1
    assert "not empty" in capsys.readouterr().err
