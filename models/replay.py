"""The test days of a log as a client would live them: what was known, asked and told, in order.

And what a bundle scores offline for the same requests, to compare a live service with.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import onnxruntime
import polars as pl

from models.dataset import KEEP_SIGNALS, Shown, replay, shown_slates, signal_of
from models.log import Log
from models.metrics import Values
from service.bundle import Bundle
from service.domain import Context, Event, Profile, Signal
from service.encoding.batch import Batch, encode_batch
from service.encoding.history import Person, fold
from service.encoding.items import ItemTable
from service.encoding.rows import RowSpace
from service.encoding.slate import Slate, blend

CHUNK = 256


class Step(NamedTuple):
    """What happened since the slate before, and the slate that is asked for next."""

    events: list[Event]
    slate: Shown


class Known(NamedTuple):
    """One user when the test days begin."""

    user: str
    signals: list[Signal]
    profile: Profile


def mixed_slates(log: Log) -> list[Shown]:
    """Slates of the test days with enough candidates, some clicked and some not."""
    return [
        slate
        for slate in shown_slates(log.impressions.filter(pl.col("at_ms") >= log.test_from_ms))
        if len(slate.items) >= log.least_items and 0 < sum(slate.click) < len(slate.click)
    ]


def known_before(log: Log, users: Sequence[str]) -> Iterator[Known]:
    """The state of some users when the test days begin."""
    signals = defaultdict(list, {user: list(log.seeds.get(user, ())) for user in users})
    wanted = pl.col("user").is_in(list(signals)) & (pl.col("at_ms") < log.test_from_ms)
    for event in log.events.filter(wanted).iter_rows(named=True):
        user = event["user"]
        signals[user] = fold(signals[user], signal_of(event), keep=KEEP_SIGNALS)
    for user, known in signals.items():
        yield Known(user, known, log.profiles.get(user, Profile()))


def steps(log: Log, slates: Sequence[Shown]) -> Iterator[Step]:
    """The slates in order of time, each with the events of their users that came before it."""
    users = list({slate.user for slate in slates})
    wanted = pl.col("user").is_in(users) & (pl.col("at_ms") >= log.test_from_ms)
    rows = log.events.filter(wanted).iter_rows(named=True)
    row = next(rows, None)
    for slate in slates:
        events = []
        while row is not None and row["at_ms"] < slate.at_ms:
            events.append(
                Event(
                    row["user"],
                    row["item"],
                    row["action"],
                    row["at_ms"],
                    row["dwell_ms"],
                    surface=row["surface"],
                )
            )
            row = next(rows, None)
        yield Step(events, slate)


def offline_scores(bundle: Bundle, log: Log, slates: Sequence[Shown]) -> list[Values]:
    """Scores of each slate's candidates by the bundle's own graph and item table."""
    manifest = bundle.manifest
    space = RowSpace(manifest.input)
    table = ItemTable.from_bytes(bundle.read(manifest.item_table), space)
    session = onnxruntime.InferenceSession(
        bundle.read(manifest.graphs["fp32"]), providers=["CPUExecutionProvider"]
    )
    asked = [
        (
            Person(
                signals,
                log.profiles.get(slate.user, Profile()),
                Context(surface=slate.surface),
                slate.at_ms,
            ),
            Slate(slate.items, slate.features(), slate.surface, slate.at_ms),
        )
        for slate, signals in replay(log, list(slates))
    ]
    scores: list[Values] = []
    for start in range(0, len(asked), CHUNK):
        people, shown = zip(*asked[start : start + CHUNK], strict=True)
        batch, _ = encode_batch(people, shown, table=table, space=space)
        inputs = {name: getattr(batch, name) for name in Batch.__struct_fields__}
        blended = blend(session.run(None, inputs)[0], manifest.output)
        ends = np.searchsorted(batch.tile_user, np.arange(len(shown)))
        tiles = np.split(blended, ends[1:])
        scores += [tile.ravel()[: len(slate.ids)] for tile, slate in zip(tiles, shown, strict=True)]
    return scores
