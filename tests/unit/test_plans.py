"""The plan cache: a plan is read only if every part of its key is the same."""

import threading
from pathlib import Path

import msgspec
import pytest

from service.errors import PlanFault
from service.inference.backends.plans import PlanCache, PlanKey, Profile

KEY = PlanKey(
    product="tensorrt_rtx",
    version="1.7.1",
    sm="8.6",
    device="",
    platform="Linux-x86_64",
    graph_sha256="ab" * 32,
    precision="fp16",
    profiles=(Profile(1, 1), Profile(2, 2)),
)
PLAN = b"a plan's bytes"


@pytest.fixture
def plans(tmp_path: Path) -> PlanCache:
    return PlanCache(tmp_path / "plans")


def test_a_plan_comes_back_as_it_was_written(plans: PlanCache) -> None:
    path = plans.write("shop-1", KEY, PLAN)
    assert plans.read("shop-1", KEY) == PLAN
    assert sorted(file.name for file in path.parent.iterdir()) == [
        "shop-1-fp16.json",
        "shop-1-fp16.plan",
    ]


def test_one_writer_at_a_time_keeps_a_plan_whole(plans: PlanCache) -> None:
    """Two workers of a host: the second waits, and then finds what the first has built."""
    order: list[str] = []
    first_is_in = threading.Event()

    def second() -> None:
        first_is_in.wait(30)
        with PlanCache(plans.folder).only_writer("shop-1", KEY.precision):
            order.append("second reads")
            assert plans.read("shop-1", KEY) == PLAN

    waiting = threading.Thread(target=second)
    waiting.start()
    with plans.only_writer("shop-1", KEY.precision):
        first_is_in.set()
        waiting.join(0.2)
        order.append("first writes")
        plans.write("shop-1", KEY, PLAN)
    waiting.join(30)
    assert order == ["first writes", "second reads"]


def test_a_plan_that_is_not_there_is_named(plans: PlanCache) -> None:
    with pytest.raises(PlanFault, match=r"no plan shop-1-fp16\.plan"):
        plans.read("shop-1", KEY)


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("sm", "8.0", "sm is 8.6, not 8.0"),
        ("version", "1.8.0", "version is 1.7.1, not 1.8.0"),
        ("product", "tensorrt", "product is tensorrt_rtx, not tensorrt"),
        ("graph_sha256", "cd" * 32, "graph_sha256 is abab.*, not cdcd"),
        ("profiles", (Profile(1, 1),), r"profiles is 2 profiles \[\(1, 1\), \(2, 2\)\], not 1"),
    ],
)
def test_a_mismatch_says_which_part_differs(
    plans: PlanCache, part: str, value: object, message: str
) -> None:
    plans.write("shop-1", KEY, PLAN)
    with pytest.raises(PlanFault, match=message):
        plans.read("shop-1", msgspec.structs.replace(KEY, **{part: value}))


def test_a_plan_that_was_changed_is_refused(plans: PlanCache) -> None:
    path = plans.write("shop-1", KEY, PLAN)
    path.write_bytes(PLAN[:-1] + b"X")
    with pytest.raises(PlanFault, match="digest"):
        plans.read("shop-1", KEY)


def test_a_plan_that_others_may_write_is_refused(plans: PlanCache) -> None:
    path = plans.write("shop-1", KEY, PLAN)
    path.chmod(0o666)
    with pytest.raises(PlanFault, match="written by others"):
        plans.read("shop-1", KEY)


def test_a_plan_behind_a_link_is_refused(plans: PlanCache, tmp_path: Path) -> None:
    path = plans.write("shop-1", KEY, PLAN)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PlanFault, match="symbolic link"):
        plans.read("shop-1", KEY)


def test_a_new_plan_takes_the_place_of_the_old_one(plans: PlanCache) -> None:
    newer = msgspec.structs.replace(KEY, sm="8.9")
    plans.write("shop-1", KEY, PLAN)
    plans.write("shop-1", newer, b"newer")
    assert plans.read("shop-1", newer) == b"newer"
    with pytest.raises(PlanFault, match=r"sm is 8\.9, not 8\.6"):
        plans.read("shop-1", KEY)
