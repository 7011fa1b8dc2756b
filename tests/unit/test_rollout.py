"""Who gets the canary, what each act makes of a wish, and what the gates say."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.errors import RequestFault
from service.versions import rollout
from service.versions.gates import Counts, Gates, judge, psi, wilson
from service.versions.rollout import CanaryWish, ShadowWish, Wish, in_canary

USERS = [f"user-{number}" for number in range(100_000)]
BASE = Wish(primary="v1", previous="v0")


def test_five_percent_of_users_get_a_canary_of_five_percent() -> None:
    chosen = sum(in_canary(user, "v2", 5) for user in USERS)
    assert 4.7 <= chosen / len(USERS) * 100 <= 5.3


def test_a_user_keeps_the_canary_while_its_share_grows() -> None:
    for smaller, larger in ((1, 5), (5, 25), (25, 100)):
        chosen = [user for user in USERS[:5_000] if in_canary(user, "v2", smaller)]
        assert chosen
        assert all(in_canary(user, "v2", larger) for user in chosen)


def test_another_canary_draws_other_users() -> None:
    first = {user for user in USERS if in_canary(user, "v2", 5)}
    second = {user for user in USERS if in_canary(user, "v3", 5)}
    assert len(first & second) / len(first) == pytest.approx(0.05, abs=0.015)


def test_all_and_none() -> None:
    assert all(in_canary(user, "v2", 100) for user in USERS[:1_000])
    assert not any(in_canary(user, "v2", 0) for user in USERS[:1_000])


def test_a_promotion_remembers_the_way_back() -> None:
    wish = rollout.promoted(BASE, "v2")
    assert (wish.primary, wish.previous) == ("v2", "v1")
    assert rollout.rolled_back(wish).primary == "v1"


def test_a_promotion_ends_the_canary_and_its_own_shadow() -> None:
    canary = CanaryWish(version="v2", steps=(5.0,))
    wish = rollout.with_canary(BASE, canary, now_ms=1)
    wish = rollout.with_shadow(wish, ShadowWish(version="v2"))
    wish = rollout.promoted(wish, "v2")
    assert wish.canary is None
    assert wish.shadow is None


def test_a_rollback_ends_the_shadow_of_the_version_that_answers_again() -> None:
    shadowed = rollout.with_shadow(BASE, ShadowWish(version="v0"))
    assert rollout.rolled_back(shadowed).shadow is None
    other = rollout.with_shadow(BASE, ShadowWish(version="v2"))
    assert rollout.rolled_back(other).shadow == ShadowWish(version="v2")


def test_a_rollback_ends_the_canary_first() -> None:
    wish = rollout.with_canary(BASE, CanaryWish(version="v2", steps=(5.0,)), now_ms=1)
    wish = rollout.rolled_back(wish)
    assert (wish.canary, wish.primary) == (None, "v1")


def test_a_ramp_climbs_and_then_promotes() -> None:
    canary = CanaryWish(version="v2", steps=(1.0, 10.0), promote=True)
    wish = rollout.with_canary(BASE, canary, now_ms=1)
    assert wish.canary is not None
    assert wish.canary.percent == 1
    wish = rollout.advanced(wish, now_ms=2)
    assert wish.canary is not None
    assert (wish.canary.percent, wish.canary.since_ms) == (10, 2)
    assert rollout.advanced(wish, now_ms=3).primary == "v2"


@pytest.mark.parametrize("steps", [(), (0.0, 5.0), (5.0, 1.0), (5.0, 5.0), (50.0, 101.0)])
def test_steps_that_do_not_ascend_are_refused(steps: tuple[float, ...]) -> None:
    with pytest.raises(RequestFault, match="ascend"):
        rollout.with_canary(BASE, CanaryWish(version="v2", steps=steps), now_ms=1)


def test_acts_that_make_no_sense_are_refused() -> None:
    with pytest.raises(RequestFault, match="primary already"):
        rollout.promoted(BASE, "v1")
    with pytest.raises(RequestFault, match="is the primary"):
        rollout.with_canary(BASE, CanaryWish(version="v1", steps=(5.0,)), now_ms=1)
    with pytest.raises(RequestFault, match="go back to"):
        rollout.rolled_back(Wish(primary="v1"))


def counts(
    requests: int,
    *,
    failed: int = 0,
    degraded: int = 0,
    clicked: int = 0,
    seconds: float = 0.004,
    score: float = 0.2,
) -> Counts:
    chance = random.Random(requests)
    found = Counts(clicked=clicked)
    for number in range(requests):
        found.add(
            seconds=seconds * chance.uniform(0.5, 1.5),
            failed=number < failed,
            degraded=number < degraded,
            scores=[score * chance.uniform(0.5, 2)] * 10,
        )
    return found


PRIMARY = counts(20_000, failed=20, degraded=40, clicked=2_000)


@pytest.mark.parametrize(
    ("canary", "gate"),
    [
        (counts(1_000, failed=30), "errors"),
        (counts(1_000, degraded=60), "degraded"),
        (counts(1_000, seconds=0.008, clicked=100), "p99"),
        (counts(2_000, clicked=100), "click-through"),
        (counts(1_000, score=0.02, clicked=100), "score drift"),
    ],
    ids=["failing", "degraded", "slow", "unloved", "wrong"],
)
def test_each_gate_fails_a_canary_that_breaks_it(canary: Counts, gate: str) -> None:
    verdict = judge(canary, PRIMARY, Gates(), watched_s=1, step_s=60)
    assert (verdict.fate, verdict.reason.partition(":")[0]) == ("fail", gate)


def test_a_gate_that_is_off_fails_nobody() -> None:
    open_gates = Gates(max_p99_ratio=None)
    slow = counts(1_000, seconds=0.008, clicked=100)
    assert judge(slow, PRIMARY, open_gates, watched_s=1, step_s=60).fate == "wait"


def test_a_canary_like_the_primary_passes_when_its_time_is_over() -> None:
    good = counts(1_000, failed=1, degraded=2, clicked=100)
    assert judge(good, PRIMARY, Gates(), watched_s=59, step_s=60).fate == "wait"
    assert judge(good, PRIMARY, Gates(), watched_s=60, step_s=60).fate == "pass"


def test_nothing_is_decided_from_few_requests() -> None:
    assert judge(counts(199, failed=199), PRIMARY, Gates(), watched_s=99, step_s=60).fate == "wait"


def test_good_canaries_survive_many_looks() -> None:
    chance = random.Random(5)
    primary, canary = Counts(), Counts()
    for look in range(20_000):
        for found in (primary, canary):
            found.add(
                seconds=chance.lognormvariate(-5.5, 0.6),
                failed=chance.random() < 0.001,
                degraded=chance.random() < 0.002,
                scores=[chance.lognormvariate(-2, 0.5)],
            )
        if look % 100 == 0:
            verdict = judge(canary, primary, Gates(), watched_s=look / 100, step_s=1e9)
            assert verdict.fate == "wait", verdict.reason


def test_counts_of_replicas_add_up() -> None:
    both = counts(10, failed=1)
    both.merge(counts(30, clicked=4))
    assert (both.requests, both.failed, both.clicked) == (40, 1, 4)
    assert sum(both.latencies) == 40


@given(part=st.integers(0, 500), more=st.integers(0, 500))
def test_a_share_lies_within_its_bounds(part: int, more: int) -> None:
    lower, upper = wilson(part, part + more)
    share = part / (part + more) if part + more else 0.0
    assert 0 <= lower <= share + 1e-9
    assert share <= upper + 1e-9 <= 1 + 1e-6


def test_psi_is_nought_for_the_same_shape_and_grows_with_distance() -> None:
    assert psi([1, 2, 3], [10, 20, 30]) == pytest.approx(0)
    near, far = psi([30, 30, 40], [33, 33, 34]), psi([90, 5, 5], [33, 33, 34])
    assert 0 < near < 0.1
    assert far > 0.25
