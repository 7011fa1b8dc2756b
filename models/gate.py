"""The gate: a variant's scores against fp32 on the same slates, and limits it must keep."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import numpy as np

from models.dataset import Examples
from models.metrics import TOP, SlateFigures, Values
from service.bundle import OutputSpec
from service.domain import Float32Array
from service.encoding.slate import blend
from service.errors import RankerError

BOOTSTRAPS = 1_000
_EVEN = 1e-9
"""Losses below this are rounding of the sums."""


class GateFault(RankerError):
    """A variant that must not be served; says by how much it fails."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What a variant may lose; a loss is held to the upper end of its 95% interval."""

    max_ndcg_loss: float
    """Relative, of NDCG@10."""
    min_overlap: float = 0.95
    """Of the first ten."""
    min_auc_share: float = 0.999


LIMITS = {
    "fp16": Limits(max_ndcg_loss=0.001),
    "int8": Limits(max_ndcg_loss=0.005),
    "fp8": Limits(max_ndcg_loss=0.005),
}
"""By precision."""


class Paired(msgspec.Struct, frozen=True):
    """A difference and its 95% interval over resampled slates."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3%} ({self.low:.3%} to {self.high:.3%})"


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What a variant does to the ranking, and whether it may be served."""

    slates: int
    ndcg10: float
    ndcg_loss: Paired
    """1 - variant / fp32."""
    auc_loss: Paired
    gauc_loss: Paired
    overlap: float
    """Share of fp32's first ten that the variant's hold, over slates of more than ten."""
    kendall_tau: float
    """Mean over slates."""
    max_logit_change: float
    limits: Limits
    failures: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.failures


def judge(
    reference: Float32Array,
    variant: Float32Array,
    examples: Examples,
    output: OutputSpec,
    limits: Limits,
    *,
    seed: int = 1,
) -> Verdict:
    """Compare logits [N, T, 2] of the same slates by their served score and clicks."""
    label = examples.click.astype(np.float64)
    real = ~np.isnan(examples.click)
    spoilt = int((~np.isfinite(variant[real])).any(axis=-1).sum())
    variant = np.nan_to_num(variant)
    before, after = blend(reference, output), blend(variant, output)
    figures = [SlateFigures(scores, label, examples.tile_user) for scores in (before, after)]
    ndcg_loss, auc_loss, gauc_loss = _losses(*figures, seed=seed)
    overlap, tau = _agreement(before, after, examples)
    found = {
        "NDCG@10 loses up to": (ndcg_loss.high, limits.max_ndcg_loss),
        "AUC loses up to": (auc_loss.high, 1 - limits.min_auc_share),
        "the first ten differ by": (1 - overlap, 1 - limits.min_overlap),
    }
    failures = tuple(
        f"{what} {loss:.3%}, at most {allowed:.3%} is allowed"
        for what, (loss, allowed) in found.items()
        if not loss <= allowed + _EVEN
    )
    if spoilt:
        told = f"{spoilt:,} of {int(real.sum()):,} candidates have no finite score"
        failures = (told, *failures)
    return Verdict(
        slates=len(figures[0]),
        ndcg10=figures[1].summary()["ndcg10"],
        ndcg_loss=ndcg_loss,
        auc_loss=auc_loss,
        gauc_loss=gauc_loss,
        overlap=overlap,
        kendall_tau=tau,
        max_logit_change=float(np.abs(variant - reference)[real].max()),
        limits=limits,
        failures=failures,
    )


def _losses(before: SlateFigures, after: SlateFigures, *, seed: int) -> list[Paired]:
    """Relative losses of NDCG@10, AUC and GAUC; the same draws for both."""
    rng = np.random.default_rng(seed)
    draws = []
    for _ in range(BOOTSTRAPS):
        weights = np.bincount(
            rng.integers(len(before), size=len(before)), minlength=len(before)
        ).astype(np.float64)
        draws.append(_relative(before, after, weights))
    low, high = np.percentile(np.array(draws), (2.5, 97.5), axis=0)
    values = _relative(before, after, None)
    return [Paired(*map(float, figures)) for figures in zip(values, low, high, strict=True)]


def _relative(before: SlateFigures, after: SlateFigures, weights: Values | None) -> list[float]:
    pairs = zip(before.summary(weights).values(), after.summary(weights).values(), strict=True)
    return [1 - new / old for old, new in pairs]


def _agreement(before: Values, after: Values, examples: Examples) -> tuple[float, float]:
    """Mean overlap of the first ten, and mean Kendall tau; 1 where no slate can differ."""
    overlaps, taus = [], []
    for old, new in zip(*(by_slate(scores, examples) for scores in (before, after)), strict=True):
        if len(old) > TOP:
            firsts = [set(np.argsort(-scores, kind="stable")[:TOP]) for scores in (old, new)]
            overlaps.append(len(firsts[0] & firsts[1]) / TOP)
        if len(old) > 1:
            taus.append(kendall_tau(old, new))
    return float(np.mean(overlaps or [1.0])), float(np.mean(taus or [1.0]))


def by_slate(scores: Values, examples: Examples) -> list[Values]:
    """The real candidates' scores of each slate, from tiles [N, T]."""
    real = ~np.isnan(examples.click)
    starts = np.searchsorted(examples.tile_user, np.arange(len(examples.at_ms) + 1))
    return [scores[start:end][real[start:end]] for start, end in pairwise(starts.tolist())]


def kendall_tau(first: Values, second: Values) -> float:
    """Agreeing pairs less disagreeing ones, over all pairs; a tie counts as neither."""
    above = np.triu_indices(len(first), 1)
    signs = [
        np.sign(scores[:, None] - scores[None, :])[above].astype(int) for scores in (first, second)
    ]
    return float((signs[0] * signs[1]).mean())
