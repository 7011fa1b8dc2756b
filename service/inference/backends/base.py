"""What the batcher asks of an engine, and the arrays that pass between them."""

from __future__ import annotations

from typing import Protocol

import msgspec

from service.domain import BackendName, Float32Array, Int32Array


class Batch(msgspec.Struct, frozen=True):
    """Tiles of several requests; B users, N tiles, L history_len, T tile_width."""

    hist_ids: Int32Array  # [B, L, 6]
    hist_age: Int32Array  # [B, L]
    hist_mask: Float32Array  # [B, L]
    ctx_ids: Int32Array  # [B, 16]
    cand_ids: Int32Array  # [N, T, 9]
    tile_user: Int32Array  # [N], tile to row of its user


class Backend(Protocol):
    """One engine with one model version; used by one thread at a time."""

    @property
    def name(self) -> BackendName:
        """The word for this engine in answers."""
        ...

    @property
    def precision(self) -> str:
        """Precision of the graph, such as fp32 or int8."""
        ...

    def score(self, batch: Batch) -> Float32Array:
        """Logits [N, T, 2]; raises BackendRecoverable or BackendLost."""
        ...

    def close(self) -> None:
        """Free what the engine holds; the last call."""
        ...
