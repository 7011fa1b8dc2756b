from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from service.versions.shadow import kendall_tau, top_overlap


@given(st.permutations(range(7)))
def test_tau_is_concordant_less_discordant_pairs(places: list[int]) -> None:
    pairs = list(combinations(places, 2))
    expected = sum(1 if one < other else -1 for one, other in pairs) / len(pairs)
    assert abs(kendall_tau(places) - expected) < 1e-12


def test_tau_of_the_same_and_of_the_reverse_order() -> None:
    assert kendall_tau(range(1_000)) == 1
    assert kendall_tau(range(999, -1, -1)) == -1
    assert kendall_tau([3]) == 1


def test_overlap_counts_the_top_alone() -> None:
    assert top_overlap([1, 2, 3, 4], [2, 1, 9, 8], 2) == 1
    assert top_overlap([1, 2, 3, 4], [9, 2, 8, 1], 2) == 0.5
    assert top_overlap([1, 2], [2, 1, 3], 10) == 1
