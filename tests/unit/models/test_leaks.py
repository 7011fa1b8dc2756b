"""Leaks of the future, planted: the check of every build names each."""

from __future__ import annotations

import msgspec
import polars as pl
import pytest

from models import dataset, leaks
from models.build import EvaluatedSlates
from models.dataset import Tables
from models.leaks import check_no_leak
from models.log import Log, LogFault
from models.presets import Preset
from service.domain import Signal
from service.encoding.items import ItemTable
from service.encoding.rows import RowSpace


@pytest.fixture
def space(preset: Preset) -> RowSpace:
    return RowSpace(preset.input_spec())


def test_a_sound_log_has_none(log: Log, space: RowSpace, slates: EvaluatedSlates) -> None:
    check_no_leak(log, space, slates.shown)


def test_an_item_table_that_knows_the_test_days_is_found(
    log: Log, space: RowSpace, slates: EvaluatedSlates, monkeypatch: pytest.MonkeyPatch
) -> None:
    class TablesOfLater(Tables):
        def of(self, day_ms: int) -> ItemTable:
            return super().of(day_ms + 30 * dataset.DAY_MS)

    monkeypatch.setattr(leaks, "Tables", TablesOfLater)
    with pytest.raises(LogFault, match="a leak: cand_ids of slate"):
        check_no_leak(log, space, slates.shown)


def test_a_history_that_holds_what_was_clicked_next_is_found(
    log: Log, space: RowSpace, slates: EvaluatedSlates
) -> None:
    told = log.impressions.filter(pl.col("click")).group_by("user").agg(pl.all().last())
    seeds = {
        row["user"]: (Signal(row["item"], "click", row["at_ms"] + 1),)
        for row in told.iter_rows(named=True)
    }
    with pytest.raises(LogFault, match="a leak: hist_"):
        check_no_leak(msgspec.structs.replace(log, seeds=seeds), space, slates.shown)


def test_a_history_that_ends_after_the_slate_began_is_found(
    log: Log, space: RowSpace, slates: EvaluatedSlates, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replay_late(log: Log, shown: list[dataset.Shown]) -> object:
        later = [slate._replace(at_ms=slate.at_ms + 600_000) for slate in shown]
        for slate, (_, signals) in zip(shown, replay(log, later), strict=True):
            yield slate, signals

    replay = dataset.replay
    monkeypatch.setattr(dataset, "replay", replay_late)
    with pytest.raises(LogFault, match="a leak: hist_"):
        check_no_leak(log, space, slates.shown)
