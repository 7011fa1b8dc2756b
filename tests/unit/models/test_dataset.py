"""What a slate is encoded from: the past alone, and the same tensors as in serving."""

import msgspec
import numpy as np
import polars as pl
from numpy.testing import assert_array_equal

from models.dataset import KEEP_SIGNALS, Examples, Shown, encode_log, replay, shown_slates
from models.log import EVENT_SCHEMA, IMPRESSION_SCHEMA, Log
from models.presets import PRESETS
from models.rates import item_columns
from models.synthetic import Size, generate
from service.encoding.rows import RowSpace

SPACE = RowSpace(PRESETS["tiny"].input_spec())
LOG = generate(5, Size(items=80, shoppers=30, days=8))
SLATES = shown_slates(LOG.impressions)


def arrays_of(examples: Examples) -> dict[str, np.ndarray]:
    return {name: value for name, value in examples._asdict().items() if name != "long_dwell"}


def with_more(log: Log, slate: Shown, at_ms: int) -> Log:
    """The log with clicks of the slate's user on all its items, shown and clicked at an instant."""
    items = slate.items
    same = {"user": slate.user, "item": items, "at_ms": at_ms, "surface": "home"}
    shown = {"slate": 10**6, "position": 0, "click": True, "long_dwell": True}
    clicked = {"action": "click", "dwell_ms": 90_000}
    return msgspec.structs.replace(
        log,
        impressions=joined(log.impressions, pl.DataFrame(same | shown), IMPRESSION_SCHEMA),
        events=joined(log.events, pl.DataFrame(same | clicked), EVENT_SCHEMA),
    )


def joined(frame: pl.DataFrame, more: pl.DataFrame, schema: pl.Schema) -> pl.DataFrame:
    rows = pl.concat([frame, more.select(*schema).cast(schema)])
    return rows.sort("at_ms", maintain_order=True)


def test_nothing_of_the_future_reaches_a_slate() -> None:
    at = len(SLATES) // 2
    known = encode_log(LOG, SPACE, SLATES[: at + 1])
    for future_ms in (SLATES[at].at_ms, LOG.test_from_ms + 1):
        planted = with_more(LOG, SLATES[at], future_ms)
        again = encode_log(planted, SPACE, SLATES[: at + 1])
        for name, value in arrays_of(known).items():
            assert_array_equal(value, getattr(again, name), err_msg=name)


def test_the_same_plant_in_the_past_is_seen() -> None:
    known = encode_log(LOG, SPACE, SLATES)
    last = len(SLATES) - 1
    seen_at_ms = SLATES[last].at_ms - 1
    for name, at_ms in (("hist_ids", seen_at_ms), ("cand_ids", SLATES[0].at_ms)):
        again = encode_log(with_more(LOG, SLATES[last], at_ms), SPACE, SLATES)
        assert (getattr(known, name)[-1] != getattr(again, name)[-1]).any(), name


def test_the_served_table_knows_nothing_of_the_test_days() -> None:
    last = int(LOG.impressions["at_ms"][-1])
    planted = with_more(LOG, SLATES[0], last)
    before, after = (
        item_columns(each, LOG.test_from_ms, trained=frozenset()) for each in (LOG, planted)
    )
    assert_array_equal(before.popularity, after.popularity)
    assert_array_equal(before.surface_ctr["home"], after.surface_ctr["home"])


def test_click_through_is_shrunk_towards_what_the_surface_gives() -> None:
    columns = item_columns(LOG, LOG.test_from_ms, trained=frozenset())
    past = LOG.before(LOG.test_from_ms)
    counted = past.group_by("item").agg(pl.len(), pl.col("click").mean()).sort("len")
    for surface, rates in columns.surface_ctr.items():
        average = past.filter(pl.col("surface") == surface)["click"].mean()
        assert isinstance(average, float)
        assert abs(np.mean(rates) - average) < 0.03, surface
    item, _, rate = counted.row(-1)
    assert abs(columns.ctr[columns.ids.index(item)] - rate) < 0.05


def test_a_users_signals_are_kept_to_the_newest() -> None:
    signals = [signals for _, signals in replay(LOG, SLATES)]
    assert max(map(len, signals)) <= KEEP_SIGNALS
    for slate, known in zip(SLATES, signals, strict=True):
        assert all(signal.at_ms < slate.at_ms for signal in known)


def test_choosing_slates_keeps_their_tiles_and_labels_together() -> None:
    examples = encode_log(LOG, SPACE, SLATES)
    chosen = np.arange(len(SLATES)) % 3 == 1
    some = examples.slates(chosen)
    slates = [slate for slate, kept in zip(SLATES, chosen, strict=True) if kept]
    clicks = [some.click[some.tile_user == at].ravel() for at in range(len(slates))]
    for slate, click in zip(slates, clicks, strict=True):
        assert click[~np.isnan(click)].tolist() == slate.click
    assert_array_equal(some.hist_ids, examples.hist_ids[chosen])
