"""Drift: how far the live distribution of a value is from the one in training.

Measured as the population stability index, PSI = sum((p - q) ln(p / q)) over bins of the
training reference; by convention below 0.1 is stable and above 0.25 is another population.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from service.errors import ManifestFault

_WINDOW_S = 300.0
_ENOUGH = 500
"""Values below which PSI says more of chance than of drift."""
_LEAST_SHARE = 1e-4


class Reference(msgspec.Struct, frozen=True):
    """A training distribution: ascending inner edges, and one share more than edges."""

    edges: tuple[float, ...]
    shares: tuple[float, ...]

    def __post_init__(self) -> None:
        """Refuse what is no distribution over these bins."""
        if len(self.shares) != len(self.edges) + 1 or list(self.edges) != sorted(self.edges):
            raise ValueError("a reference needs ascending edges and one share more than edges")


def references(metrics: dict[str, Any]) -> dict[str, Reference]:
    """The references of a manifest's `metrics["reference"]`, by name; none if it has none.

    Raises ManifestFault for what is no reference.
    """
    try:
        return msgspec.convert(metrics.get("reference", {}), dict[str, Reference])
    except msgspec.ValidationError as error:
        raise ManifestFault(f"metrics.reference: {error}") from error


class Drift:
    """Live counts in the reference's bins, over the last one to two windows of 5 minutes."""

    def __init__(self, reference: Reference, clock: Callable[[], float] = time.monotonic) -> None:
        self._edges = list(reference.edges)
        self._expected = np.maximum(np.array(reference.shares), _LEAST_SHARE)
        self._clock = clock
        self._now = [0] * len(reference.shares)
        self._before = self._now.copy()
        self._turns_s = clock() + _WINDOW_S

    def observe(self, values: Iterable[float] | NDArray[np.float64]) -> None:
        """Count values."""
        self._turn()
        at = np.searchsorted(self._edges, np.asarray(values, np.float64), side="right")
        for bin_at, count in enumerate(np.bincount(at).tolist()):
            self._now[bin_at] += count

    def observe_one(self, value: float) -> None:
        """Count one value."""
        self._now[bisect_right(self._edges, value)] += 1

    def psi(self) -> float:
        """The index now; NaN where too few values were seen."""
        self._turn()
        counts = np.add(self._now, self._before)
        total = int(counts.sum())
        if total < _ENOUGH:
            return math.nan
        found = np.maximum(counts / total, _LEAST_SHARE)
        return float(((found - self._expected) * np.log(found / self._expected)).sum())

    def _turn(self) -> None:
        now_s = self._clock()
        if now_s < self._turns_s:
            return
        idle = now_s >= self._turns_s + _WINDOW_S
        self._before = [0] * len(self._now) if idle else self._now
        self._now = [0] * len(self._before)
        self._turns_s = now_s + _WINDOW_S
