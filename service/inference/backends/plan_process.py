"""The side process that builds plans and tries them out; what happens in it harms nobody.

`python -m service.inference.backends.plan_process build|check FOLDER_OR_FILE`
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from service.bundle import InputSpec
from service.errors import PlanFault, RankerError
from service.inference.backends.plans import Profile

_BUILD_S, _CHECK_S = 3_600.0, 120.0
_FAILED = 3


class _Order(msgspec.Struct, frozen=True):
    """What to build; beside it lies the graph."""

    spec: InputSpec
    profiles: tuple[Profile, ...]
    sm: str


def build(graph: bytes, *, spec: InputSpec, profiles: Sequence[Profile], sm: str) -> bytes:
    """A plan, built in a niced process; raises PlanFault with the reason."""
    with tempfile.TemporaryDirectory(prefix="ranker-plan-") as name:
        folder = Path(name)
        (folder / "rank.onnx").write_bytes(graph)
        order = msgspec.json.encode(_Order(spec, tuple(profiles), sm))
        (folder / "order.json").write_bytes(order)
        _run("build", folder, _BUILD_S)
        return (folder / "rank.plan").read_bytes()


def check(plan: Path) -> None:
    """Load a plan in a process of its own; raises PlanFault if it fails or takes it down."""
    _run("check", plan, _CHECK_S)


def _run(what: str, path: Path, limit_s: float) -> None:
    command = [sys.executable, "-m", __name__, what, str(path)]
    try:
        done = subprocess.run(  # noqa: S603  our own module
            command, capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise PlanFault(f"{what} of a plan took longer than {limit_s:.0f} s") from error
    if done.returncode < 0:
        raise PlanFault(f"{what} of a plan was ended by signal {-done.returncode}")
    if done.returncode:
        reason = done.stderr.strip().rpartition("\n")[2]
        raise PlanFault(f"{what} of a plan failed: {reason}")


def main(what: str, path: Path) -> int:
    """Build or check; the exit status is 3 for a reason that is told on the last line."""
    from service.inference.backends import cuda, tensorrt, tensorrt_build  # noqa: PLC0415

    os.nice(10)
    try:
        if what == "build":
            order = msgspec.json.decode((path / "order.json").read_bytes(), type=_Order)
            plan = tensorrt_build.build_plan(
                tensorrt.library(),
                (path / "rank.onnx").read_bytes(),
                spec=order.spec,
                profiles=order.profiles,
                sm=order.sm,
            )
            (path / "rank.plan").write_bytes(plan)
        else:
            tensorrt.try_plan(path.read_bytes())
    except (RankerError, cuda.Unavailable) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return _FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
