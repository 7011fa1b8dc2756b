import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.evaluate import intervals
from models.metrics import SlateFigures, auc, ndcg

LABELLED = st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=2, max_size=30)


@given(LABELLED)
def test_auc_is_the_share_of_pairs_in_the_right_order(rows: list[tuple[int, bool]]) -> None:
    scores = np.array([score for score, _ in rows], float)
    labels = np.array([label for _, label in rows], float)
    pairs = list(itertools.product(scores[labels == 1], scores[labels == 0]))
    if not pairs:
        assert math.isnan(auc(scores, labels))
        return
    right = sum((a > b) + 0.5 * (a == b) for a, b in pairs)
    assert auc(scores, labels) == pytest.approx(right / len(pairs))


@given(LABELLED)
def test_a_weight_of_two_counts_like_two_rows(rows: list[tuple[int, bool]]) -> None:
    scores = np.array([score for score, _ in rows], float)
    labels = np.array([label for _, label in rows], float)
    weights = np.array([1.0 + at % 2 for at in range(len(rows))])
    twice = np.repeat(np.arange(len(rows)), weights.astype(int))
    assert auc(scores, labels, weights) == pytest.approx(
        auc(scores[twice], labels[twice]), nan_ok=True
    )


def test_ndcg_of_a_known_order() -> None:
    labels = np.array([0.0, 1.0, 1.0])
    assert ndcg(np.array([3.0, 2.0, 1.0]), labels) == pytest.approx(
        (1 / math.log2(3) + 1 / math.log2(4)) / (1 + 1 / math.log2(3))
    )
    assert ndcg(np.array([1.0, 2.0, 2.0]), labels) == 1
    assert math.isnan(ndcg(labels, np.zeros(3)))


def test_figures_leave_out_padding_and_slates_of_one_class() -> None:
    scores = np.array([[2.0, 1.0, 9.0], [1.0, 2.0, 9.0], [5.0, 4.0, 3.0]])
    labels = np.array([[1.0, 0.0, np.nan], [0.0, 0.0, np.nan], [0.0, 1.0, 1.0]])
    figures = SlateFigures(scores, labels, np.array([0, 1, 2], np.int32))
    assert len(figures) == 2
    assert figures.size.tolist() == [2, 3]
    summary = figures.summary()
    assert summary["gauc"] == pytest.approx((2 * 1 + 3 * 0) / 5)
    assert summary["auc"] == pytest.approx(auc(scores[[0, 0, 2, 2, 2], [0, 1, 0, 1, 2]],
                                              np.array([1.0, 0.0, 0.0, 1.0, 1.0])))  # fmt: skip


def test_an_interval_holds_its_value_and_narrows_with_more_slates() -> None:
    rng = np.random.default_rng(2)

    def interval_of(slates: int) -> tuple[float, float, float]:
        labels = rng.integers(0, 2, (slates, 10)).astype(float)
        labels[:, :2] = 0, 1
        figures = SlateFigures(
            labels + rng.normal(size=labels.shape), labels, np.arange(slates, dtype=np.int32)
        )
        figure = intervals(figures, seed=1)["gauc"]
        return figure.low, figure.value, figure.high

    low, value, high = interval_of(30)
    assert low < value < high
    more_low, _, more_high = interval_of(600)
    assert more_high - more_low < (high - low) / 2
