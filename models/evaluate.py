"""Evaluation: a network and plain baselines on the same slates, with bootstrap intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from models.dataset import Examples, Shown, in_tiles
from models.log import Log
from models.metrics import SlateFigures, Values
from models.network import Network
from models.rates import item_columns
from models.tables import markdown
from models.train import score
from service.bundle import OutputSpec
from service.encoding.history import MASKED
from service.encoding.rows import PADDING_ROW
from service.encoding.slate import blend

BOOTSTRAPS = 200
LABELS = ("click", "long_dwell")
METRICS = ("ndcg10", "auc", "gauc")


class Figure(msgspec.Struct, frozen=True):
    """A metric's value and its 95% interval over resampled slates."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4f} ({self.low:.4f} to {self.high:.4f})"


Report = dict[str, dict[str, dict[str, Figure]]]
"""Scorer, then label, then metric."""


def evaluate(
    network: Network,
    examples: Examples,
    baselines: Mapping[str, Values],
    output: OutputSpec,
    *,
    seed: int = 1,
) -> Report:
    """The network with and without history, and baselines [N, T], on the same slates.

    The network's click figures are of the served score; those of long dwell, of its own logit.
    """
    scorers = {
        "network": _scores(network, examples, output),
        "network without history": _scores(network, without_history(examples), output),
        **{name: dict.fromkeys(LABELS, scores) for name, scores in baselines.items()},
    }
    return {
        name: {
            label: intervals(
                SlateFigures(
                    scores[label], getattr(examples, label).astype(np.float64), examples.tile_user
                ),
                seed=seed,
            )
            for label in LABELS
        }
        for name, scores in scorers.items()
    }


def intervals(figures: SlateFigures, *, seed: int) -> dict[str, Figure]:
    rng = np.random.default_rng(seed)
    draws = []
    for _ in range(BOOTSTRAPS):
        chosen = rng.integers(len(figures), size=len(figures))
        weights = np.bincount(chosen, minlength=len(figures)).astype(np.float64)
        draws.append(list(figures.summary(weights).values()))
    low, high = np.percentile(np.array(draws), (2.5, 97.5), axis=0)
    return {
        name: Figure(value, float(low[at]), float(high[at]))
        for at, (name, value) in enumerate(figures.summary().items())
    }


def paired_lead(ours: Values, theirs: Values, *, seed: int) -> Figure:
    """By how much a figure of each slate [S] is above another's, on average over slates."""
    lead = ours - theirs
    rng = np.random.default_rng(seed)
    draws = [lead[rng.integers(len(lead), size=len(lead))].mean() for _ in range(BOOTSTRAPS)]
    low, high = np.percentile(draws, (2.5, 97.5))
    return Figure(float(lead.mean()), float(low), float(high))


def plain_baselines(
    log: Log, slates: Sequence[Shown], width: int, *, seed: int
) -> dict[str, Values]:
    """Random order, and smoothed click-through as known when the test began: [N, T] each."""
    rng = np.random.default_rng(seed)
    columns = item_columns(log, log.test_from_ms, trained=frozenset())
    place = {item: at for at, item in enumerate(columns.ids)}
    return {
        "surface and item CTR": in_tiles(
            [
                [
                    float(columns.surface_ctr[surface][place[item]])
                    for item, surface in zip(slate.items, slate.surfaces, strict=True)
                ]
                for slate in slates
            ],
            width,
        ),
        "item CTR": in_tiles(
            [[float(columns.ctr[place[item]]) for item in slate.items] for slate in slates], width
        ),
        "random": in_tiles([rng.random(len(slate.items)).tolist() for slate in slates], width),
    }


def without_history(examples: Examples) -> Examples:
    return examples._replace(
        hist_ids=np.full_like(examples.hist_ids, PADDING_ROW),
        hist_age=np.zeros_like(examples.hist_age),
        hist_mask=np.full_like(examples.hist_mask, MASKED),
    )


def as_markdown(report: Report) -> str:
    rows = [
        (scorer, label, *(str(metrics[name]) for name in METRICS))
        for scorer, labels in report.items()
        for label, metrics in labels.items()
    ]
    return markdown(("scorer", "label", "NDCG@10", "AUC", "GAUC"), rows)


def _scores(network: Network, examples: Examples, output: OutputSpec) -> Mapping[str, Values]:
    logits = score(network, examples).numpy()
    return {"click": blend(logits, output), "long_dwell": logits[..., 1].astype(np.float64)}
