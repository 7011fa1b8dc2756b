"""Ranking metrics over slates: AUC, GAUC and NDCG@10, with bootstrap intervals."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from models.dataset import Examples

Values = NDArray[np.float64]
TOP = 10


def auc(scores: Values, labels: Values) -> float:
    """Area under the ROC curve by ranks, ties shared; NaN with one class only."""
    positives = labels.sum()
    negatives = len(labels) - positives
    if not positives or not negatives:
        return float("nan")
    _, tied, counts = np.unique(scores, return_inverse=True, return_counts=True)
    rank = (np.cumsum(counts) - (counts - 1) / 2)[tied]
    return float(
        (rank[labels > 0].sum() - positives * (positives + 1) / 2) / (positives * negatives)
    )


def ndcg(scores: Values, labels: Values, *, top: int = TOP) -> float:
    """NDCG@top of one slate with binary labels; ties break by input order; NaN without a hit."""
    positives = int(labels.sum())
    if not positives:
        return float("nan")
    order = np.argsort(-scores, kind="stable")[:top]
    discount = 1 / np.log2(np.arange(2, top + 2))
    return float((labels[order] * discount[: len(order)]).sum() / discount[:positives].sum())


def per_slate(scores: Values, labels: Values, tile_user: NDArray[np.int32]) -> Values:
    """NDCG@10, AUC and size of each slate: [S, 3], from tiles [N, T] with NaN labels as padding."""
    bounds = np.flatnonzero(np.diff(tile_user, prepend=-1, append=tile_user[-1] + 1))
    rows = []
    for start, end in zip(bounds[:-1], bounds[1:], strict=True):
        label, given = labels[start:end].ravel(), scores[start:end].ravel()
        real = ~np.isnan(label)
        rows.append((ndcg(given[real], label[real]), auc(given[real], label[real]), real.sum()))
    return np.array(rows)


def gauc(slates: Values) -> float:
    """AUC inside slates, weighted by their size, over slates with both classes."""
    usable = ~np.isnan(slates[:, 1])
    return float(np.average(slates[usable, 1], weights=slates[usable, 2]))


def slate_report(logits: Tensor, examples: Examples) -> dict[str, float]:
    """AUC, GAUC and NDCG@10 of click and long dwell, each by its own logit."""
    report = {}
    for at, (name, labels) in enumerate(
        (("click", examples.click), ("long_dwell", examples.long_dwell))
    ):
        scores, truth = logits[..., at].numpy().astype(np.float64), labels.astype(np.float64)
        real = ~np.isnan(truth)
        slates = per_slate(scores, truth, examples.tile_user)
        report[f"{name}_auc"] = auc(scores[real], truth[real])
        report[f"{name}_gauc"] = gauc(slates)
        report[f"{name}_ndcg10"] = float(np.nanmean(slates[:, 0]))
    return report
