"""Every engine that this host can run, on one model: parity, latency, throughput, memory, energy.

Needs no server. On a GPU host: `pip install '.[gpu,train]'`, then
`python -m loadtests backends --preset base`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter

import msgspec
import numpy as np

from loadtests.engine_subjects import Subject, from_bundle, from_preset, random_batch
from service.bundle import Bundle
from service.domain import BackendKind
from service.encoding.batch import Batch
from service.errors import BackendFault, BundleFault, GoldenFault
from service.inference.backends import cuda
from service.inference.backends.base import Backend
from service.inference.backends.pipeline import PLACES
from service.inference.backends.plans import PlanCache
from service.inference.backends.select import Source, open_backend
from service.inference.parity import check_parity

_WARM_RUNS = 3 * PLACES
_MOST_RUNS = 2_000
_KINDS: tuple[BackendKind, ...] = ("tensorrt", "onnx-cuda", "openvino", "onnx-cpu")


class Line(msgspec.Struct, kw_only=True):
    """One engine at one batch size."""

    model: str
    backend: str
    precision: str
    graphs: bool
    users: int
    runs: int
    p50_ms: float
    p99_ms: float
    users_s: float
    two_users_s: float | None = None
    """With a second batch begun while the first one runs, where the engine can."""
    floor_share: float | None = None
    device_mb: float | None = None
    joule_a_user: float | None = None
    error: float
    """The largest difference of a golden logit."""


class Variant(msgspec.Struct, frozen=True):
    """One way to open a subject."""

    kind: BackendKind
    precision: str
    graphs: bool
    source: Source


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--bundle", type=Path, help="a bundle's folder")
    what.add_argument("--preset", nargs="+", help="sizes to fill with random weights")
    parser.add_argument("--backend", nargs="+", choices=_KINDS, default=_KINDS)
    parser.add_argument("--precision", nargs="+", help="of the graphs; all if absent")
    parser.add_argument("--users", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--threads", type=int, default=1, help="of a CPU engine")
    parser.add_argument("--for-s", type=float, default=1.0, help="time for each batch size")
    parser.add_argument("--copies", type=int, default=1, help="models held at once")
    parser.add_argument("--peak-tflops", type=float, help="measured fp16 rate, for the floor")
    parser.add_argument("--plans", type=Path, help="folder where TensorRT's plans are kept")
    parser.add_argument("--out", type=Path, help="also write the lines as JSON")


def run(args: argparse.Namespace) -> int:
    lines: list[Line] = []
    failures = 0
    for subject in _subjects(args):
        print(f"\n{subject.name}; history {subject.spec.history_len}, slates of 100")
        print(_HEAD)
        for variant in _variants(subject, args):
            try:
                for line in _measure(subject, variant, args):
                    lines.append(line)
                    print(_row(line), flush=True)
            except cuda.Unavailable as reason:
                print(f"{variant.kind:10} {variant.precision:11} not here: {reason}")
            except (BackendFault, BundleFault) as error:
                failures += 1
                print(f"{variant.kind:10} {variant.precision:11} FAILED: {str(error)[:300]}")
    if args.out is not None:
        args.out.write_bytes(msgspec.json.format(msgspec.json.encode(lines)))
    return min(failures, 1)


def _subjects(args: argparse.Namespace) -> Iterator[Subject]:
    for preset in args.preset or ():
        print(f"preparing {preset} ...", file=sys.stderr)
        yield from_preset(preset, threads=args.threads)
    if not args.preset:
        shipped = sorted(Path("models/store/shop").glob("*/manifest.json"))
        yield from_bundle(Bundle.open(args.bundle or shipped[-1].parent))


def _variants(subject: Subject, args: argparse.Namespace) -> Iterator[Variant]:
    for kind in args.backend:
        for precision, graph in subject.graphs.items():
            if args.precision and precision not in args.precision:
                continue
            if "fused" in precision and kind != "onnx-cuda":
                continue
            if kind in {"onnx-cpu", "openvino"} and precision != "fp32":
                continue
            for graphs in (False, True) if kind == "onnx-cuda" else (kind == "tensorrt",):
                source = Source(
                    name=subject.name.partition(",")[0].replace(" ", "-"),
                    graph=graph,
                    precision=precision.partition("+")[0],
                    spec=subject.spec,
                    limits=subject.limits,
                    threads=args.threads,
                    graphs=graphs,
                    build=True,
                )
                yield Variant(kind, precision, graphs, source)


def _measure(subject: Subject, variant: Variant, args: argparse.Namespace) -> Iterator[Line]:
    gauge = _Gauge()
    before = gauge.free_mb()
    plans = PlanCache(args.plans) if args.plans else None
    backend, *others = (
        open_backend(variant.kind, variant.source, plans) for _ in range(args.copies)
    )
    try:
        error = check_parity(backend, subject.golden)
        for users in args.users:
            batch = random_batch(subject.spec, users=users)
            _check_alone(backend, batch)
            for other in others:
                other.score(batch)
            joules = gauge.joules()
            times_s = _time(backend, batch, args.for_s)
            joules = gauge.joules() - joules
            p50_s = float(np.median(times_s))
            peak = args.peak_tflops if variant.precision.startswith("fp16") else None
            floor_s = users * subject.flop_a_user / (peak or np.inf) / 1e12
            yield Line(
                model=subject.name,
                backend=variant.kind,
                precision=variant.precision,
                graphs=bool(getattr(backend, "graphs", variant.graphs)),
                users=users,
                runs=len(times_s),
                p50_ms=p50_s * 1e3,
                p99_ms=float(np.quantile(times_s, 0.99)) * 1e3,
                users_s=users / float(np.mean(times_s)),
                two_users_s=_overlapped(backend, batch, args.for_s, users),
                floor_share=floor_s / p50_s or None,
                device_mb=before - gauge.free_mb() if gauge.present else None,
                joule_a_user=joules / len(times_s) / users if gauge.present else None,
                error=error,
            )
    finally:
        for each in (backend, *others):
            each.close()


def _check_alone(backend: Backend, batch: Batch) -> None:
    """Raise GoldenFault if the last user's scores depend on who shares the batch."""
    tiles = int((batch.tile_user == batch.tile_user[-1]).sum())
    alone = Batch(
        batch.hist_ids[-1:],
        batch.hist_age[-1:],
        batch.hist_mask[-1:],
        batch.ctx_ids[-1:],
        batch.cand_ids[-tiles:],
        np.zeros(tiles, np.int32),
    )
    for _ in range(_WARM_RUNS):  # a captured graph must say the same as the plain run
        together, single = backend.score(batch)[-tiles:], backend.score(alone)
    off = float(np.abs(together - single).max())
    if not off < 0.02:
        raise GoldenFault(f"scores alone and in a crowd differ by {off:.2g}")


def _time(backend: Backend, batch: Batch, for_s: float) -> list[float]:
    """Seconds of each run, the first ones left out."""
    times_s: list[float] = []
    started = perf_counter()
    while len(times_s) < _MOST_RUNS and (not times_s or perf_counter() - started < for_s):
        before = perf_counter()
        backend.score(batch)
        times_s.append(perf_counter() - before)
    return times_s


def _overlapped(backend: Backend, batch: Batch, for_s: float, users: int) -> float | None:
    """Users a second with two batches on the device at once; None where it takes only one."""
    begin: Callable[[Batch], Callable[[], object]] | None = getattr(backend, "begin", None)
    if begin is None:
        return None
    runs = 0
    started = perf_counter()
    end = begin(batch)
    while runs < _MOST_RUNS and perf_counter() - started < for_s:
        end, end_last = begin(batch), end
        end_last()
        runs += 1
    end()
    return users * (runs + 1) / (perf_counter() - started)


class _Gauge:
    """Device memory and energy, where there is a device and its driver tells."""

    def __init__(self) -> None:
        self.present = False
        try:
            cuda.probe()
            import pynvml  # noqa: PLC0415  an extra

            pynvml.nvmlInit()
            self._device = pynvml.nvmlDeviceGetHandleByIndex(0)
            self._nvml = pynvml
            self.present = True
        except (cuda.Unavailable, ImportError):
            pass

    def free_mb(self) -> float:
        return cuda.free_bytes() / 1e6 if self.present else 0.0

    def joules(self) -> float:
        if not self.present:
            return 0.0
        return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._device)) / 1e3


_HEAD = (
    f"{'backend':10} {'precision':11} {'graphs':6} {'users':>5} {'p50 ms':>9} {'p99 ms':>9} "
    f"{'users/s':>9} {'at two':>9} {'floor':>6} {'MB':>7} {'J/user':>8} {'error':>8}"
)


def _row(line: Line) -> str:
    floor = "" if line.floor_share is None else f"{line.floor_share:.0%}"
    two = "" if line.two_users_s is None else f"{line.two_users_s:.0f}"
    memory = "" if line.device_mb is None else f"{line.device_mb:.0f}"
    energy = "" if line.joule_a_user is None else f"{line.joule_a_user:.4f}"
    return (
        f"{line.backend:10} {line.precision:11} {'yes' if line.graphs else 'no':6} "
        f"{line.users:5} {line.p50_ms:9.3f} {line.p99_ms:9.3f} {line.users_s:9.0f} {two:>9} "
        f"{floor:>6} {memory:>7} {energy:>8} {line.error:8.1e}"
    )
