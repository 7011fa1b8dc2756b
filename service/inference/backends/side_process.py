"""The side process that builds plans and tries things out; what happens in it harms nobody.

`python -m service.inference.backends.side_process build|check|capture FOLDER_OR_FILE`
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from service.bundle import BatchSpec, InputSpec
from service.errors import PlanFault, RankerError
from service.inference.backends.plans import Profile

_BUILD_S, _CHECK_S, _CAPTURE_S = 3_600.0, 120.0, 300.0
_FAILED = 3


class _Order(msgspec.Struct, frozen=True):
    """What to build or to capture; beside it lies the graph."""

    spec: InputSpec
    profiles: tuple[Profile, ...] = ()
    sm: str = ""
    limits: BatchSpec | None = None


def build(graph: bytes, *, spec: InputSpec, profiles: Sequence[Profile], sm: str) -> bytes:
    """A plan, built in a niced process; raises PlanFault with the reason."""
    with tempfile.TemporaryDirectory(prefix="ranker-plan-") as folder:
        _place(Path(folder), graph, _Order(spec, tuple(profiles), sm))
        _run("build", Path(folder), _BUILD_S)
        return (Path(folder) / "rank.plan").read_bytes()


def check(plan: Path) -> None:
    """Load a plan in a process of its own; raises PlanFault if it fails or takes it down."""
    _run("check", plan, _CHECK_S)


def capture(graph: bytes, *, spec: InputSpec, limits: BatchSpec) -> None:
    """Capture a graph's launches on the device for each bucket; raises PlanFault.

    ONNX Runtime ends the process where a kernel does what a capture forbids.
    """
    with tempfile.TemporaryDirectory(prefix="ranker-capture-") as folder:
        _place(Path(folder), graph, _Order(spec, limits=limits))
        _run("capture", Path(folder), _CAPTURE_S)


def _place(folder: Path, graph: bytes, order: _Order) -> None:
    (folder / "rank.onnx").write_bytes(graph)
    (folder / "order.json").write_bytes(msgspec.json.encode(order))


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
    """Carry one order out; the exit status is 3 for a reason that is told on the last line."""
    from service.inference.backends.cuda import Unavailable  # noqa: PLC0415  a child's own

    os.nice(10)
    try:
        _ORDERS[what](path)
    except (RankerError, Unavailable) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return _FAILED
    return 0


def _build(folder: Path) -> None:
    from service.inference.backends import tensorrt, tensorrt_build  # noqa: PLC0415

    order, graph = _taken(folder)
    plan = tensorrt_build.build_plan(
        tensorrt.library(), graph, spec=order.spec, profiles=order.profiles, sm=order.sm
    )
    (folder / "rank.plan").write_bytes(plan)


def _check(plan: Path) -> None:
    from service.inference.backends import tensorrt  # noqa: PLC0415

    tensorrt.try_plan(plan.read_bytes())


def _capture(folder: Path) -> None:
    from service.inference.backends import onnx  # noqa: PLC0415

    order, graph = _taken(folder)
    assert order.limits is not None
    backend = onnx.OnnxCuda(graph, precision="", spec=order.spec, limits=order.limits)
    backend.capture()
    backend.close()


def _taken(folder: Path) -> tuple[_Order, bytes]:
    order = msgspec.json.decode((folder / "order.json").read_bytes(), type=_Order)
    return order, (folder / "rank.onnx").read_bytes()


_ORDERS = {"build": _build, "check": _check, "capture": _capture}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
