"""A batch: the arrays that an engine reads, and how people and slates become one. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from service.domain import Float32Array, Int32Array, Int64Array
from service.encoding.history import Person, encode_people
from service.encoding.items import ItemTable
from service.encoding.rows import RowSpace
from service.encoding.slate import Slate, encode_slates


class Batch(msgspec.Struct, frozen=True):
    """Tiles of several requests; B users, N tiles, L history_len, T tile_width."""

    hist_ids: Int32Array  # [B, L, 6]
    hist_age: Int32Array  # [B, L]
    hist_mask: Float32Array  # [B, L]
    ctx_ids: Int32Array  # [B, 16]
    cand_ids: Int32Array  # [N, T, 9]
    tile_user: Int32Array  # [N], tile to row of its user


def encode_batch(
    people: Sequence[Person], slates: Sequence[Slate], *, table: ItemTable, space: RowSpace
) -> tuple[Batch, Int64Array]:
    """One batch of people with a slate each, and how many of each slate are unknown."""
    users = encode_people(people, table=table, space=space)
    candidates = encode_slates(slates, table=table, space=space)
    batch = Batch(
        users.ids,
        users.age,
        users.mask,
        users.context,
        candidates.tiles,
        candidates.tile_slate,
    )
    return batch, candidates.unknown
