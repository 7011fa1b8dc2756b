"""The ranking transformer in PyTorch: a user's history is encoded once, candidates attend to it.

Candidates never attend to each other, so a score does not depend on what shares the batch.
Shapes: B users, L history_len, K = L + 1 keys (the last is the context), N tiles, T tile_width,
D width, H heads.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from models.blocks import Block
from models.presets import Preset
from service.encoding.history import HISTORY_WIDTH
from service.encoding.items import CANDIDATE_WIDTH
from service.encoding.rows import (
    AGE_BUCKETS,
    BLOCK_SIZES,
    BLOCK_START,
    HASHED_ROWS_START,
    PADDING_ROW,
)

MAX_POSITION = 128
ORDERED_BLOCKS = ("gap", "item_age", "popularity", "ctr", "duration")
CURVE_ORDERS = 4
ITEM_COLUMNS = 2
"""The first columns of history and candidate ids: rows of the item tables 1 and 2."""


@cache
def bucket_curves() -> NDArray[np.float32]:
    """Chebyshev polynomials over each block of ordered buckets: [HASHED_ROWS_START, curves]."""
    columns = []
    for block in ORDERED_BLOCKS:
        size = BLOCK_SIZES[block]
        for order in range(1, CURVE_ORDERS + 1):
            column = np.zeros(HASHED_ROWS_START, np.float32)
            start = BLOCK_START[block]
            column[start : start + size] = np.cos(order * np.linspace(np.pi, 0, size))
            columns.append(column)
    return np.stack(columns, axis=1)


class Scales(NamedTuple):
    """Standard deviations that embedded values begin with."""

    items: float = 0.05
    words: float = 0.4
    curves: float = 0.1


class EncodedUsers(NamedTuple):
    """What scoring needs of B users."""

    keys: list[Tensor]
    """Of each cross layer."""
    values: list[Tensor]
    mask: Tensor  # [B, K]
    head_weight: Tensor  # [B, D, hidden]
    head_bias: Tensor  # [B, hidden]

    def of_tiles(self, tile_user: Tensor) -> EncodedUsers:
        return EncodedUsers(
            [keys[tile_user] for keys in self.keys],
            [values[tile_user] for values in self.values],
            self.mask[tile_user],
            self.head_weight[tile_user],
            self.head_bias[tile_user],
        )


class Inputs(NamedTuple):
    """A batch's arrays, in the order of the service's `Batch` and of the exported inputs."""

    hist_ids: Tensor
    hist_age: Tensor
    hist_mask: Tensor
    ctx_ids: Tensor
    cand_ids: Tensor
    tile_user: Tensor

    def to(self, device: torch.device | str) -> Inputs:
        return Inputs(*(column.to(device) for column in self))


class Network(nn.Module):
    """Logits of click and long dwell for tiles of candidates."""

    curves: Tensor

    def __init__(self, preset: Preset, scales: Scales | None = None) -> None:
        super().__init__()
        self.preset = preset
        scales = scales or Scales()
        width, hidden = preset.width, preset.width
        starts = [0, preset.item1_rows, preset.item1_rows + preset.item2_rows]
        rows = starts[2] + preset.feature_rows
        self.starts = starts
        self.free_rows = nn.Parameter(torch.randn(rows, preset.embedding) * scales.items)
        curves = torch.from_numpy(bucket_curves())
        self.curve = nn.Parameter(torch.randn(curves.shape[1], preset.embedding) * scales.curves)
        """Of ordered buckets: neighbours share what they learn."""
        self.register_buffer("curves", curves, persistent=False)
        ordered = curves.any(1).nonzero().squeeze(1)
        with torch.no_grad():
            self.free_rows[starts[2] :] *= scales.words / scales.items
            self.free_rows[starts[2] + ordered] = 0.0
            self.free_rows[[start + PADDING_ROW for start in starts]] = 0.0
        self.project = (
            nn.Identity()
            if preset.embedding == width
            else nn.Linear(preset.embedding, width, bias=False)
        )
        self.place = nn.Parameter(torch.randn(preset.history_len, width) * 0.02)
        self.age = nn.Parameter(torch.randn(AGE_BUCKETS, width) * 0.02)
        self.history_norm = nn.LayerNorm(width)
        self.encoder = nn.ModuleList(Block(preset) for _ in range(preset.encoder_layers))
        self.pool = nn.Parameter(torch.randn(width) * 0.02)
        self.context_norm = nn.LayerNorm(width)
        self.cross = nn.ModuleList(Block(preset) for _ in range(preset.cross_layers))
        self.head_context = nn.Linear(width, hidden)
        self.head_candidate = nn.Parameter(torch.randn(width, hidden) / math.sqrt(2 * width))
        self.head_product = nn.Parameter(torch.randn(width, hidden) / math.sqrt(2 * width))
        self.head_out = nn.Linear(hidden, 2)
        self.dropout = 0.0
        """Share of embedded values dropped in training."""
        self.position = nn.Parameter(torch.zeros(MAX_POSITION, 2))
        """Bias of the shown position: used in training, dropped at export."""

    def table(self) -> Tensor:
        """All rows [rows, E]: each row of its own, and ordered buckets on curves besides."""
        on_curves = self.curves @ self.curve  # [HASHED_ROWS_START, E]
        before = self.starts[2]
        after = len(self.free_rows) - before - len(on_curves)
        return self.free_rows + functional.pad(on_curves, (0, 0, before, after))

    def row_starts(self, columns: int) -> list[int]:
        """Where each column of ids begins in the one table: items 1, items 2, then features."""
        return [*self.starts[:ITEM_COLUMNS], *[self.starts[2]] * (columns - ITEM_COLUMNS)]

    def embed(self, table: Tensor, ids: Tensor, starts: list[int]) -> Tensor:
        """The sum of the rows of `ids` [..., columns]: [..., D]."""
        flat = (ids + torch.tensor(starts, dtype=ids.dtype, device=ids.device)).flatten(0, -2)
        summed = functional.embedding_bag(flat, table, mode="sum")
        summed = functional.dropout(summed, self.dropout, self.training)
        return cast(Tensor, self.project(summed.reshape(*ids.shape[:-1], -1)))

    def encode(self, batch: Inputs) -> EncodedUsers:
        """Encode B users: history, then the context token that pools it."""
        table = self.table()
        x = self.embed(table, batch.hist_ids, self.row_starts(HISTORY_WIDTH)) + self.place
        x = self.history_norm(x)
        for block in self.encoder:
            assert isinstance(block, Block)
            rows = block.norm1(x)
            attention = block.attention
            x = x + attention(rows, attention.keys(rows), attention.values(rows), batch.hist_mask)
            x = block.feed(x)
        aged = x + self.age[batch.hist_age]
        pooling = (batch.hist_mask + aged @ self.pool).softmax(-1)
        pooled = (pooling.unsqueeze(1) @ x).squeeze(1)
        context = self.embed(table, batch.ctx_ids, [self.starts[2]] * batch.ctx_ids.shape[-1])
        context = self.context_norm(context + pooled)  # [B, D]
        key_rows = torch.cat([aged, context.unsqueeze(1)], 1)
        value_rows = torch.cat([x, context.unsqueeze(1)], 1)
        attentions = [block.attention for block in self.cross if isinstance(block, Block)]
        return EncodedUsers(
            [attention.keys(key_rows) for attention in attentions],
            [attention.values(value_rows) for attention in attentions],
            functional.pad(batch.hist_mask, (0, 1)),
            self.head_candidate + context.unsqueeze(-1) * self.head_product,
            self.head_context(context),
        )

    def score(self, users: EncodedUsers, cand_ids: Tensor) -> Tensor:
        """Logits [N, T, 2] of tiles, given the encoded user of each tile."""
        x = self.embed(self.table(), cand_ids, self.row_starts(CANDIDATE_WIDTH))
        for block, keys, values in zip(self.cross, users.keys, users.values, strict=True):
            assert isinstance(block, Block)
            x = x + block.attention(block.norm1(x), keys, values, users.mask)
            x = block.feed(x)
        hidden = (x @ users.head_weight + users.head_bias.unsqueeze(1)).relu()
        return cast(Tensor, self.head_out(hidden))

    def forward(self, batch: Inputs) -> Tensor:
        """Logits [N, T, 2] of a batch."""
        return self.score(self.encode(batch).of_tiles(batch.tile_user), batch.cand_ids)
