"""Ranking metrics over slates: AUC, GAUC and NDCG@10. Pure."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from service.domain import Int32Array, Int64Array

Values = NDArray[np.float64]
TOP = 10


def auc(scores: Values, labels: Values, weights: Values | None = None) -> float:
    """Area under the ROC curve, ties counted half; NaN with one class only."""
    return auc_of_places(places(scores), labels, weights)


def places(scores: Values) -> Int64Array:
    """Each score's place among the distinct ones, lowest first."""
    return np.unique(scores, return_inverse=True)[1].astype(np.int64)


def auc_of_places(places: Int64Array, labels: Values, weights: Values | None = None) -> float:
    """The same as `auc`, for resampling: the scores' order is found once."""
    weight = np.ones(len(labels)) if weights is None else weights
    positives = np.bincount(places, weight * labels)
    negatives = np.bincount(places, weight * (1 - labels))
    pairs = positives.sum() * negatives.sum()
    if not pairs:
        return float("nan")
    below = np.cumsum(negatives) - negatives
    return float((positives * (below + negatives / 2)).sum() / pairs)


def ndcg(scores: Values, labels: Values, *, top: int = TOP) -> float:
    """NDCG@top of one slate with binary labels; ties break by input order; NaN without a hit."""
    positives = int(labels.sum())
    if not positives:
        return float("nan")
    order = np.argsort(-scores, kind="stable")[:top]
    discount = 1 / np.log2(np.arange(2, top + 2))
    return float((labels[order] * discount[: len(order)]).sum() / discount[:positives].sum())


class SlateFigures:
    """NDCG@10 and AUC of each slate that has both classes, from tiles [N, T].

    NaN labels are padding; `tile_user` [N] ascends and says which slate a tile belongs to.
    """

    def __init__(self, scores: Values, labels: Values, tile_user: Int32Array) -> None:
        slates = int(tile_user[-1]) + 1
        starts = np.searchsorted(tile_user, np.arange(slates + 1))
        kept: list[tuple[Values, Values]] = []
        ndcgs: list[float] = []
        aucs: list[float] = []
        owners: list[Int64Array] = []
        for start, end in pairwise(starts.tolist()):
            label, given = labels[start:end].ravel(), scores[start:end].ravel()
            real = ~np.isnan(label)
            label, given = label[real], given[real]
            if 0 < label.sum() < len(label):
                owners.append(np.full(len(label), len(aucs)))
                kept.append((given, label))
                ndcgs.append(ndcg(given, label))
                aucs.append(auc(given, label))
        self.ndcg = np.array(ndcgs)
        self.auc = np.array(aucs)
        self.scores, self.labels = (np.concatenate(column) for column in zip(*kept, strict=True))
        self.owner = np.concatenate(owners)
        self.size = np.bincount(self.owner)
        self._places = places(self.scores)

    def __len__(self) -> int:
        return len(self.auc)

    def summary(self, weights: Values | None = None) -> dict[str, float]:
        """Mean NDCG@10, AUC over all candidates, and AUC inside slates weighted by size."""
        weight = np.ones(len(self)) if weights is None else weights
        return {
            "ndcg10": float(np.average(self.ndcg, weights=weight)),
            "auc": auc_of_places(self._places, self.labels, weight[self.owner]),
            "gauc": float(np.average(self.auc, weights=self.size * weight)),
        }
