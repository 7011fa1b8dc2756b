"""The ranking transformer in PyTorch: a user's history is encoded once, candidates attend to it.

Candidates never attend to each other, so a score does not depend on what shares the batch.
Shapes: B users, L history_len, K = L + 1 keys (the last is the context), N tiles, T tile_width,
D width, H heads.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional

from service.bundle import InputSpec
from service.encoding.history import HISTORY_WIDTH
from service.encoding.items import CANDIDATE_WIDTH
from service.encoding.rows import AGE_BUCKETS, PADDING_ROW

HASH_SEED = 2026
MAX_POSITION = 128
ITEM_COLUMNS = 2
"""The first columns of history and candidate ids: rows of the item tables 1 and 2."""


class Preset(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a network."""

    width: int
    heads: int
    encoder_layers: int
    cross_layers: int
    ffn: int
    activation: str
    embedding: int
    item1_rows: int
    item2_rows: int
    feature_rows: int
    history_len: int
    tile_width: int
    folded: bool
    """Attention with one D x D matrix a head for query and key together, and one for value and
    output: fewer operations where H * D is small, too much arithmetic where it is not."""

    def input_spec(self) -> InputSpec:
        return InputSpec(
            hash_seed=HASH_SEED,
            item1_rows=self.item1_rows,
            item2_rows=self.item2_rows,
            feature_rows=self.feature_rows,
            history_len=self.history_len,
            tile_width=self.tile_width,
        )


PRESETS = {
    "tiny": Preset(
        width=32,
        heads=2,
        encoder_layers=1,
        cross_layers=1,
        ffn=64,
        activation="relu",
        embedding=32,
        item1_rows=8_192,
        item2_rows=4_096,
        feature_rows=2_048,
        history_len=31,
        tile_width=20,
        folded=True,
    ),
    "base": Preset(
        width=128,
        heads=4,
        encoder_layers=2,
        cross_layers=1,
        ffn=256,
        activation="relu",
        embedding=64,
        item1_rows=65_536,
        item2_rows=32_768,
        feature_rows=16_384,
        history_len=63,
        tile_width=20,
        folded=False,
    ),
    "large": Preset(
        width=1_024,
        heads=16,
        encoder_layers=12,
        cross_layers=6,
        ffn=4_096,
        activation="gelu",
        embedding=64,
        item1_rows=524_288,
        item2_rows=524_288,
        feature_rows=131_072,
        history_len=255,
        tile_width=128,
        folded=False,
    ),
}


class FoldedAttention(nn.Module):
    """Attention of H heads, each with a full D x D matrix for keys and one for values."""

    def __init__(self, preset: Preset) -> None:
        super().__init__()
        width, heads = preset.width, preset.heads
        self.heads = heads
        like = torch.eye(width) / math.sqrt(width)  # at first, like attends to like
        self.key = nn.Parameter(like + torch.randn(heads, width, width) * 0.5 / width)
        self.value = nn.Parameter(torch.randn(heads, width, width) / math.sqrt(width * heads))

    def keys(self, rows: Tensor) -> Tensor:  # [B, K, D] -> [B, H * K, D]
        return (rows.unsqueeze(1) @ self.key).flatten(1, 2)

    def values(self, rows: Tensor) -> Tensor:  # [B, K, D] -> [B, H * K, D]
        return (rows.unsqueeze(1) @ self.value).flatten(1, 2)

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        scores = (queries @ keys.mT).unflatten(-1, (self.heads, -1))  # [N, T, H, K]
        weights = (scores + mask[:, None, None, :]).softmax(-1)
        return weights.flatten(2) @ values  # [N, T, D]


class HeadedAttention(nn.Module):
    """The usual attention: D / H wide heads with query, key, value and output projections."""

    def __init__(self, preset: Preset) -> None:
        super().__init__()
        width = preset.width
        self.heads = preset.heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def keys(self, rows: Tensor) -> Tensor:  # [B, K, D] -> [B, H, D / H, K]
        return self.key(rows).unflatten(-1, (self.heads, -1)).permute(0, 2, 3, 1)  # type: ignore[no-any-return]

    def values(self, rows: Tensor) -> Tensor:  # [B, K, D] -> [B, H, K, D / H]
        return self.value(rows).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # type: ignore[no-any-return]

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        split = self.query(queries).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        scores = split @ keys / math.sqrt(split.shape[-1])  # [N, H, T, K]
        weights = (scores + mask[:, None, None, :]).softmax(-1)
        return self.out((weights @ values).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    """One pre-norm layer: attention to given keys and values, then a feed-forward net."""

    def __init__(self, preset: Preset) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(preset.width)
        self.attention = (FoldedAttention if preset.folded else HeadedAttention)(preset)
        self.norm2 = nn.LayerNorm(preset.width)
        self.up = nn.Linear(preset.width, preset.ffn)
        self.down = nn.Linear(preset.ffn, preset.width)
        self.activation = preset.activation

    def feed(self, x: Tensor) -> Tensor:
        hidden = getattr(functional, self.activation)(self.up(self.norm2(x)))
        return x + self.down(hidden)  # type: ignore[no-any-return]


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


class Network(nn.Module):
    """Logits of click and long dwell for tiles of candidates."""

    def __init__(self, preset: Preset) -> None:
        super().__init__()
        self.preset = preset
        width, hidden = preset.width, preset.width
        starts = [0, preset.item1_rows, preset.item1_rows + preset.item2_rows]
        rows = starts[2] + preset.feature_rows
        self.starts = starts
        self.table = nn.Parameter(torch.randn(rows, preset.embedding) * 0.05)
        with torch.no_grad():
            self.table[[start + PADDING_ROW for start in starts]] = 0.0
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
        self.position = nn.Parameter(torch.zeros(MAX_POSITION, 2))
        """Bias of the shown position: used in training, dropped at export."""

    def row_starts(self, columns: int) -> list[int]:
        """Where each column of ids begins in the one table: items 1, items 2, then features."""
        return [*self.starts[:ITEM_COLUMNS], *[self.starts[2]] * (columns - ITEM_COLUMNS)]

    def embed(self, ids: Tensor, starts: list[int]) -> Tensor:
        """The sum of the rows of `ids` [..., columns]: [..., D]."""
        flat = (ids + torch.tensor(starts, dtype=ids.dtype)).flatten(0, -2)
        summed = functional.embedding_bag(flat, self.table, mode="sum")
        return self.project(summed.unflatten(0, ids.shape[:-1]))  # type: ignore[no-any-return]

    def encode(
        self, hist_ids: Tensor, hist_age: Tensor, hist_mask: Tensor, ctx_ids: Tensor
    ) -> EncodedUsers:
        """Encode B users: history, then the context token that pools it."""
        x = self.embed(hist_ids, self.row_starts(HISTORY_WIDTH)) + self.place
        x = self.history_norm(x)
        for block in self.encoder:
            assert isinstance(block, Block)
            rows = block.norm1(x)
            attention = block.attention
            x = x + attention(rows, attention.keys(rows), attention.values(rows), hist_mask)
            x = block.feed(x)
        aged = x + self.age[hist_age]
        pooling = (hist_mask + aged @ self.pool).softmax(-1)
        pooled = (pooling.unsqueeze(1) @ x).squeeze(1)
        context = self.embed(ctx_ids, [self.starts[2]] * ctx_ids.shape[-1])
        context = self.context_norm(context + pooled)  # [B, D]
        key_rows = torch.cat([aged, context.unsqueeze(1)], 1)
        value_rows = torch.cat([x, context.unsqueeze(1)], 1)
        attentions = [block.attention for block in self.cross if isinstance(block, Block)]
        return EncodedUsers(
            [attention.keys(key_rows) for attention in attentions],
            [attention.values(value_rows) for attention in attentions],
            functional.pad(hist_mask, (0, 1)),
            self.head_candidate + context.unsqueeze(-1) * self.head_product,
            self.head_context(context),
        )

    def score(self, users: EncodedUsers, cand_ids: Tensor) -> Tensor:
        """Logits [N, T, 2] of tiles, given the encoded user of each tile."""
        x = self.embed(cand_ids, self.row_starts(CANDIDATE_WIDTH))
        for block, keys, values in zip(self.cross, users.keys, users.values, strict=True):
            assert isinstance(block, Block)
            x = x + block.attention(block.norm1(x), keys, values, users.mask)
            x = block.feed(x)
        hidden = (x @ users.head_weight + users.head_bias.unsqueeze(1)).relu()
        return self.head_out(hidden)  # type: ignore[no-any-return]

    def forward(
        self,
        hist_ids: Tensor,
        hist_age: Tensor,
        hist_mask: Tensor,
        ctx_ids: Tensor,
        cand_ids: Tensor,
        tile_user: Tensor,
    ) -> Tensor:
        """What is exported: a batch's arrays, in the order of `Batch`, to logits [N, T, 2]."""
        users = self.encode(hist_ids, hist_age, hist_mask, ctx_ids)
        return self.score(users.of_tiles(tile_user), cand_ids)
