"""A check that no feature tells the future: a slate looks the same if nothing came after it."""

from __future__ import annotations

import msgspec
import numpy as np
import polars as pl

from models.dataset import Examples, Shown, Tables, encode_log
from models.log import Log, LogFault
from service.encoding.rows import RowSpace

SAMPLE = 6
FEATURES = ("hist_ids", "hist_age", "hist_mask", "ctx_ids", "cand_ids")


def check_no_leak(log: Log, space: RowSpace, slates: list[Shown]) -> None:
    """Raise LogFault where an input of a slate depends on what the log tells of later.

    Encodes some of the test's slates twice, from the whole log and from a log that ends where
    the slate begins. Which ids the network was trained on is known before the test in both.
    """
    trained = Tables(log, space).trained
    last = len(slates) - 1
    for at in sorted({round(share * last) for share in np.linspace(0, 1, SAMPLE)}):
        slate = slates[at]
        mine = pl.col("user") == slate.user
        whole = msgspec.structs.replace(log, events=log.events.filter(mine))
        past = msgspec.structs.replace(
            log,
            impressions=log.before(slate.at_ms),
            events=whole.events.filter(pl.col("at_ms") < slate.at_ms),
            seeds={
                slate.user: tuple(
                    signal for signal in log.seeds.get(slate.user, ()) if signal.at_ms < slate.at_ms
                )
            },
        )
        compare(
            slate,
            encode_log(whole, space, [slate], Tables(log, space, trained)),
            encode_log(past, space, [slate], Tables(past, space, trained)),
        )


def compare(slate: Shown, whole: Examples, past: Examples) -> None:
    """Raise LogFault that names the first input by which two encodings of a slate differ."""
    for name in FEATURES:
        if not np.array_equal(getattr(whole, name), getattr(past, name)):
            raise LogFault(
                f"a leak: {name} of slate {slate.number} depends on what the log tells of later"
            )
