"""Breaker, tokens, local copies and keys: the parts of the signal store that need no server."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.errors import RequestFault
from service.signals import token
from service.signals.breaker import Breaker
from service.signals.keys import keys_of
from service.signals.local import ENTRY_BYTES, LocalCopies


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_breaker_opens_after_failures_in_a_row() -> None:
    breaker = Breaker(failures=3, open_s=1.0, clock=Clock())
    for outcome in "ffsff":
        breaker.failed() if outcome == "f" else breaker.succeeded()
        assert breaker.state == "closed"
    breaker.failed()
    assert (breaker.state, breaker.opened, breaker.allow()) == ("open", 1, False)


def test_an_open_breaker_lets_one_probe_through_after_its_delay() -> None:
    clock = Clock()
    breaker = Breaker(failures=1, open_s=1.0, clock=clock)
    breaker.failed()
    clock.now_s += 1.0
    assert [breaker.allow() for _ in range(3)] == [True, False, False]
    assert breaker.state == "half_open"
    breaker.failed()
    assert (breaker.state, breaker.allow()) == ("open", False)
    clock.now_s += 1.0
    assert breaker.allow()
    breaker.succeeded()
    assert (breaker.state, breaker.allow()) == ("closed", True)


def test_a_probe_that_never_reports_gives_its_place_to_the_next() -> None:
    clock = Clock()
    breaker = Breaker(failures=1, open_s=1.0, clock=clock)
    breaker.failed()
    clock.now_s += 1.0
    assert breaker.allow()
    clock.now_s += 1.0
    assert [breaker.allow(), breaker.allow()] == [True, False]


def test_failures_of_attempts_already_under_way_do_not_prolong_an_open_breaker() -> None:
    clock = Clock()
    breaker = Breaker(failures=1, open_s=1.0, clock=clock)
    breaker.failed()
    clock.now_s += 0.9
    breaker.failed()
    clock.now_s += 0.1
    assert breaker.allow()


@given(st.dictionaries(st.text(max_size=20), st.integers(0, 2**52), min_size=1, max_size=20))
def test_a_token_gives_back_each_users_write_number(written: dict[str, int]) -> None:
    covered = token.parse(token.encode(written))
    assert covered == {token.user_hash(user): number for user, number in written.items()}


def test_a_token_of_one_user_is_short_and_url_safe() -> None:
    text = token.encode({"user-12345": 1000})
    assert len(text) == 12
    assert text.endswith("-3e8")
    assert text.replace("-", "").isalnum()


def test_a_token_of_a_thousand_users_is_accepted() -> None:
    written = {f"user-{n}": 2**27 + n for n in range(1000)}
    assert len(token.parse(token.encode(written))) == 1000


@given(st.text(max_size=40))
def test_any_text_is_a_token_or_a_fault_that_names_the_field(text: str) -> None:
    try:
        covered = token.parse(text)
    except RequestFault as fault:
        assert fault.field == "min_signal_token"  # noqa: PT017 - most texts fault, not all
    else:
        assert all(0 <= number < 2**63 for number in covered.values())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "!",
        "0123abcd",
        "0123abcd-",
        "0123ABCD-1",
        "0123abcd-1.",
        "0123abcd-1\n",
        "0123abcd-1." * 9_000,
    ],
)
def test_a_damaged_token_is_refused(text: str) -> None:
    with pytest.raises(RequestFault):
        token.parse(text)


def test_local_copies_stay_under_their_bytes_oldest_use_first_out() -> None:
    size = ENTRY_BYTES + 1 + 10
    copies = LocalCopies(max_bytes=3 * size)
    for user in "abc":
        copies.put(user, b"0123456789", b"")
    assert copies.get("a") is not None
    copies.put("d", b"0123456789", b"")
    assert copies.get("b") is None
    assert [copies.get(user) is not None for user in "acd"] == [True] * 3
    assert copies.held_bytes == 3 * size
    copies.put("d", b"", b"")
    copies.discard("a")
    copies.discard("a")
    assert copies.held_bytes == 2 * size - 10


def test_a_copy_larger_than_the_limit_is_not_kept() -> None:
    copies = LocalCopies(max_bytes=500)
    copies.put("a", b"x" * 200, b"")
    assert (len(copies), copies.held_bytes) == (0, 0)


def test_a_copy_past_its_age_is_dropped() -> None:
    clock = Clock()
    copies = LocalCopies(max_bytes=5000, max_age_s=60.0, clock=clock)
    copies.put("a", b"[]", b"")
    clock.now_s += 61
    assert copies.get("a") is None
    assert copies.held_bytes == 0


def test_keys_are_those_that_a_foreign_producer_writes() -> None:
    keys = keys_of("u1")
    assert keys == (b"signals:{u1}", b"profile:{u1}", b"seen:{u1}", b"written:{u1}")


@given(st.text(), st.text())
def test_two_users_never_share_a_key(one: str, other: str) -> None:
    assert (keys_of(one) == keys_of(other)) == (one == other)


@given(st.text())
def test_a_users_keys_have_one_hash_tag(user: str) -> None:
    def hash_tag(key: bytes) -> bytes:
        start = key.index(b"{") + 1
        end = key.find(b"}", start)
        return key[start:end] if end > start else key

    # The empty id has an empty tag; the routes refuse it.
    assert len({hash_tag(key) for key in keys_of(user)}) == 1 or user == ""
