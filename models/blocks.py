"""Layers of the ranking transformer. Shapes as in `network`."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.presets import Preset


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
        tiles, width, _ = queries.shape
        scores = (queries @ keys.mT).reshape(tiles, width, self.heads, -1)  # [N, T, H, K]
        weights = (scores + mask[:, None, None, :]).softmax(-1)
        return weights.flatten(2) @ values  # [N, T, D]


class HeadedAttention(nn.Module):
    """The usual attention: heads of width W with query, key, value and output projections."""

    def __init__(self, preset: Preset) -> None:
        super().__init__()
        width = preset.width
        self.heads = preset.heads
        inner = preset.heads * preset.inner_width
        self.query = nn.Linear(width, inner, bias=False)
        self.key = nn.Linear(width, inner, bias=False)
        self.value = nn.Linear(width, inner, bias=False)
        self.out = nn.Linear(inner, width, bias=False)

    def keys(self, rows: Tensor) -> Tensor:  # [B, K, D] -> [B, H, W, K]
        return self._split(self.key(rows)).mT

    def values(self, rows: Tensor) -> Tensor:  # [B, K, D] -> [B, H, K, W]
        return self._split(self.value(rows))

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        split = self._split(self.query(queries))
        scores = split @ keys / math.sqrt(split.shape[-1])  # [N, H, T, K]
        weights = (scores + mask[:, None, None, :]).softmax(-1)
        mixed = (weights @ values).transpose(1, 2)  # [N, T, H, W]
        return cast(Tensor, self.out(mixed.flatten(2)))

    def _split(self, rows: Tensor) -> Tensor:  # [B, K, H * W] -> [B, H, K, W]
        users, keys, width = rows.shape
        return rows.reshape(users, keys, self.heads, width // self.heads).transpose(1, 2)


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
        return x + cast(Tensor, self.down(hidden))
