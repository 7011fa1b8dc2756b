"""What a batch is predicted to cost, learnt from the batches that ran."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

_WEIGHT = 0.1
_UNKNOWN_S = 0.002


class CostModel:
    """A moving average of seconds for each bucket of tiles.

    A slow batch counts at once in part, not in full: one stall must not close the door.
    """

    def __init__(self, tile_buckets: Sequence[int]) -> None:
        self._buckets = tuple(tile_buckets)
        self._seconds: list[float | None] = [None] * len(self._buckets)

    def _bucket(self, tiles: int) -> int:
        return min(bisect_left(self._buckets, tiles), len(self._buckets) - 1)

    def learn(self, tiles: int, seconds: float) -> None:
        """Take one measured batch into account."""
        at = self._bucket(tiles)
        known = self._seconds[at]
        self._seconds[at] = seconds if known is None else known + _WEIGHT * (seconds - known)

    def predict_s(self, tiles: int) -> float:
        """Seconds for one batch of so many tiles."""
        at = self._bucket(tiles)
        known = self._seconds[at]
        if known is not None:
            return known
        for bucket, seconds in zip(self._buckets, self._seconds, strict=True):
            if seconds is not None:
                return seconds * max(1.0, self._buckets[at] / bucket)
        return _UNKNOWN_S

    def drain_s(self, tiles: int) -> float:
        """Seconds until so many queued tiles are scored, in batches of the largest bucket."""
        full, rest = divmod(tiles, self._buckets[-1])
        seconds = full * self.predict_s(self._buckets[-1])
        return seconds + (self.predict_s(rest) if rest else 0.0)
