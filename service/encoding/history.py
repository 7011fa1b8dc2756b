"""Histories: how events fold into a user's signals, and how signals become tensors. Pure.

Training and serving share this module, so encoding cannot drift between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, compress
from operator import attrgetter

import msgspec
import numpy as np
from msgspec.structs import astuple

from service.domain import (
    EMPTY_CONTEXT,
    EMPTY_PROFILE,
    Context,
    Float32Array,
    Int32Array,
    Int64Array,
    Profile,
    Signal,
)
from service.encoding import rows as r
from service.encoding.items import ItemTable
from service.encoding.rows import PADDING_ROW, UNKNOWN_ROW, RowSpace

HISTORY_WIDTH = 6
CONTEXT_WIDTH = 16
MASKED = -50.0
"""Not -inf (NaN) and not -1e4 (denormals in softmax); exp(-50) is nothing beside exp(0)."""
VISIT_MS = 30 * 60 * 1000
VISIT_RECORDS = 16

_GAP_START = r.BLOCK_START["gap"]
_ACTION_START = {
    action: r.BLOCK_START["action_dwell"] + at * r.DWELL_BUCKETS
    for action, at in r.ACTION_INDEX.items()
}

_at_ms = attrgetter("at_ms")


class Person(msgspec.Struct, frozen=True):
    """All that encoding needs to know of whom a slate is for."""

    signals: Sequence[Signal]
    profile: Profile = EMPTY_PROFILE
    context: Context = EMPTY_CONTEXT
    now_ms: int = 0


class EncodedPeople(msgspec.Struct, frozen=True):
    """Users' tensors, L = history_len."""

    ids: Int32Array  # [B, L, 6]
    age: Int32Array  # [B, L]
    mask: Float32Array  # [B, L]
    context: Int32Array  # [B, 16]


def fold(signals: Sequence[Signal], event: Signal, *, keep: int) -> list[Signal]:
    """Signals, newest first, after one event; what the store's script does in Redis.

    One record a visit to an item: an event within VISIT_MS of a record of the same item,
    among the VISIT_RECORDS newest, joins it. The longest dwell stays; a click outranks a dwell.
    """
    for i, known in enumerate(signals[:VISIT_RECORDS]):
        if known.item_id == event.item_id and abs(event.at_ms - known.at_ms) < VISIT_MS:
            joined = msgspec.structs.replace(
                known,
                action="click" if "click" in (known.action, event.action) else "dwell",
                dwell_ms=max(known.dwell_ms, event.dwell_ms),
            )
            return [*signals[:i], joined, *signals[i + 1 :]]
    return [event, *signals][:keep]


def encode_people(people: Sequence[Person], *, table: ItemTable, space: RowSpace) -> EncodedPeople:
    """Encode the newest `history_len` signals of each, whatever order they were pushed in.

    All signals of a batch go through numpy together: for short histories the calls, not
    the elements, are the cost.
    """
    length = space.spec.history_len
    ids = np.zeros((len(people), length, HISTORY_WIDTH), np.int32)
    age = np.zeros((len(people), length), np.int32)
    mask = np.full((len(people), length), MASKED, np.float32)
    signals, at, user, place = _newest(people, length)
    if signals:
        rows = np.empty((len(signals), HISTORY_WIDTH), np.int32)
        item_ids, actions, _, dwells, surfaces = zip(*map(astuple, signals), strict=True)
        found = table.locate(item_ids, space)
        rows[:, :3] = table.rows.take(found, axis=0)[:, :3]  # item 1, item 2, category
        start = map(_ACTION_START.__getitem__, actions)
        rows[:, 3] = np.fromiter(start, np.int32, len(signals))
        rows[:, 3] += r.DWELL_EDGES_MS.searchsorted(np.array(dwells), "right")
        rows[:-1, 4] = r.AGE_EDGES_MS.searchsorted(at[:-1] - at[1:], "right")
        rows[:, 4] += _GAP_START
        last = np.append((user[1:] != user[:-1]).nonzero()[0], len(signals) - 1)
        rows[last, 4] = UNKNOWN_ROW  # nothing came before
        rows[:, 5] = space.word_rows("surface", surfaces)
        now = np.array([person.now_ms for person in people])
        slot = user * length + place
        ids.reshape(-1, HISTORY_WIDTH)[slot] = rows
        age.reshape(-1)[slot] = r.AGE_EDGES_MS.searchsorted(now[user] - at, "right")
        mask.reshape(-1)[slot] = 0.0
    return EncodedPeople(ids, age, mask, _contexts(people, space))


def _newest(
    people: Sequence[Person], length: int
) -> tuple[list[Signal], Int64Array, Int64Array, Int64Array]:
    """Each one's newest signals, newest first, end to end; their times, users and places."""
    counts = np.array([len(person.signals) for person in people], np.int64)
    signals = list(chain.from_iterable(person.signals for person in people))
    at = np.fromiter(map(_at_ms, signals), np.int64, len(signals))
    user = np.arange(len(people)).repeat(counts)
    if ((at[1:] > at[:-1]) & (user[1:] == user[:-1])).any():
        order = np.lexsort((-at, user))
        signals, at = [signals[i] for i in order], at[order]
    place = np.arange(len(signals)) - (counts.cumsum() - counts).repeat(counts)
    if signals and counts.max() > length:
        kept = place < length
        signals = list(compress(signals, kept))
        at, user, place = at[kept], user[kept], place[kept]
    return signals, at, user, place


def _contexts(people: Sequence[Person], space: RowSpace) -> Int32Array:
    """Rows of surface, device, locale, hour of the week, then segments: int32 [B, 16]."""
    word_row, slots = space.word_row, space.spec.segment_slots
    rows = np.full((len(people), CONTEXT_WIDTH), PADDING_ROW, np.int32)
    for at, person in enumerate(people):
        context = person.context
        segments = (*context.segments, *person.profile.segments)[:slots]
        words = [
            word_row("surface", context.surface),
            word_row("device", context.device),
            word_row("locale", context.locale),
            r.hour_row(person.now_ms),
            *[word_row("segment", segment) for segment in segments],
        ]
        rows[at, : len(words)] = words
    return rows
