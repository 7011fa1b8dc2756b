"""Histories: how events fold into a user's signals, and how signals become tensors. Pure.

Training and serving share this module, so encoding cannot drift between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from operator import attrgetter

import msgspec
import numpy as np

from service.domain import (
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

_item_id = attrgetter("item_id")
_action = attrgetter("action")
_at_ms = attrgetter("at_ms")
_dwell_ms = attrgetter("dwell_ms")
_surface = attrgetter("surface")


class History(msgspec.Struct, frozen=True):
    """One user's encoded state, L = history_len."""

    ids: Int32Array  # [L, 6]
    age: Int32Array  # [L]
    mask: Float32Array  # [L]
    context: Int32Array  # [16]


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


def encode_history(
    signals: Sequence[Signal],
    profile: Profile,
    context: Context,
    *,
    now_ms: int,
    table: ItemTable,
    space: RowSpace,
) -> History:
    """Encode the newest `history_len` signals, whatever order producers pushed them in."""
    length = space.spec.history_len
    ids = np.zeros((length, HISTORY_WIDTH), np.int32)
    age = np.zeros(length, np.int32)
    mask = _all_masked(length).copy()
    signals, at = _newest(signals, length)
    count = len(signals)
    if count:
        found = table.locate(list(map(_item_id, signals)), space)
        ids[:count, :3] = table.rows.take(found, axis=0)[:, :3]  # item 1, item 2, category
        dwell = np.fromiter(map(_dwell_ms, signals), np.int64, count)
        action = np.fromiter(map(_ACTION_START.__getitem__, map(_action, signals)), np.int64, count)
        ids[:count, 3] = r.DWELL_EDGES_MS.searchsorted(dwell, "right") + action
        ids[: count - 1, 4] = r.AGE_EDGES_MS.searchsorted(at[:-1] - at[1:], "right") + _GAP_START
        ids[count - 1, 4] = UNKNOWN_ROW
        words = list(map(_surface, signals))
        ids[:count, 5] = (
            [space.word_row("surface", word) for word in words] if any(words) else UNKNOWN_ROW
        )
        age[:count] = r.AGE_EDGES_MS.searchsorted(now_ms - at, "right")
        mask[:count] = 0.0
    return History(ids, age, mask, encode_context(profile, context, now_ms=now_ms, space=space))


def _newest(signals: Sequence[Signal], length: int) -> tuple[Sequence[Signal], Int64Array]:
    """The newest signals, newest first whatever order they were pushed in, and their times."""
    at = np.fromiter(map(_at_ms, signals), np.int64, len(signals))
    if (at[1:] > at[:-1]).any():
        order = (-at).argsort(kind="stable")[:length]
        return [signals[i] for i in order], at[order]
    return signals[:length], at[:length]


@cache
def _all_masked(length: int) -> Float32Array:
    return np.full(length, MASKED, np.float32)


def encode_context(
    profile: Profile, context: Context, *, now_ms: int, space: RowSpace
) -> Int32Array:
    """Rows of surface, device, locale, hour of the week, then segments: int32 [16]."""
    word_row = space.word_row
    words = [
        word_row("surface", context.surface),
        word_row("device", context.device),
        word_row("locale", context.locale),
        r.hour_row(now_ms),
    ]
    segments = (*context.segments, *profile.segments)[: space.spec.segment_slots]
    words += [word_row("segment", segment) for segment in segments]
    words += [PADDING_ROW] * (CONTEXT_WIDTH - len(words))
    return np.array(words, np.int32)
