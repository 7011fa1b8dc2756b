"""Sizes of the network: tiny is shipped and trained here, base serves on a CPU, large on a GPU."""

from __future__ import annotations

import msgspec

from service.bundle import InputSpec

HASH_SEED = 2026


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
    head_width: int | None = None
    """Of heads that are not folded; width / heads if None."""

    @property
    def inner_width(self) -> int:
        """How wide a head is that is not folded."""
        return self.head_width or self.width // self.heads

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
        tile_width=104,
        folded=False,
    ),
}
