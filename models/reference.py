"""Reference distributions of a version: what live values are compared with to see drift."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.dataset import Examples
from service.bundle import OutputSpec
from service.domain import Float32Array
from service.encoding.slate import blend

BINS = 10


def reference_of(
    logits: Float32Array, examples: Examples, output: OutputSpec
) -> dict[str, dict[str, Any]]:
    """Distributions of scores, events of history, and candidates of slates, by name."""
    real = ~np.isnan(examples.click)
    slate = np.bincount(examples.tile_user, real.sum(axis=1), len(examples.at_ms))
    return {
        "score": distribution(blend(logits, output)[real]),
        "history": distribution((examples.hist_mask == 0).sum(axis=1)),
        "slate": distribution(slate),
    }


def distribution(values: NDArray[np.generic]) -> dict[str, Any]:
    """Inner edges at the quantiles, each once, and the share of values in each bin."""
    inner = np.quantile(values.astype(np.float64), np.arange(1, BINS) / BINS)
    edges = np.unique(inner)
    bins = np.searchsorted(edges, values.astype(np.float64), side="right")
    shares = np.bincount(bins, minlength=len(edges) + 1) / len(values)
    return {
        "edges": [round(float(edge), 6) for edge in edges],
        "shares": [round(float(share), 6) for share in shares],
    }
