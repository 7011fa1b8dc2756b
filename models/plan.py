"""Engine plans ahead of time: TensorRT for RTX builds for devices that this host does not have.

A plan lies in `OUT/<compute capability>/`, which a host of that kind names in RANKER_PLANS.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

from service.bundle import Bundle
from service.errors import PlanFault
from service.inference.backends import cuda, side_process, tensorrt
from service.inference.backends.plans import PlanCache, PlanKey

SMS = ("8.0", "8.6", "8.9", "12.0")
PRECISIONS = ("fp16", "int8", "fp8")
_LEAST_FP8 = 8.9


def build_plans(
    bundle: Bundle, sms: Sequence[str], cache: Path, *, precisions: Sequence[str] = PRECISIONS
) -> Iterator[str]:
    """Build what the cache lacks; one line for each plan. Raises PlanFault.

    A precision that the bundle has no graph for, or that a device lacks, is told and left out.
    """
    try:
        lib = tensorrt.library()
    except cuda.Unavailable as error:
        raise PlanFault(str(error)) from error
    if lib.product != tensorrt.RTX:
        raise PlanFault(f"{lib.product} builds for the device at hand alone; the service does it")
    wanted = [(sm, precision) for sm in sms for precision in precisions]
    for sm, precision in tqdm(wanted, desc="plan", leave=False):
        if precision not in bundle.manifest.graphs:
            yield f"{sm} {precision}: the bundle has no such graph"
        elif precision == "fp8" and float(sm) < _LEAST_FP8:
            yield f"{sm} {precision}: no such units before {_LEAST_FP8}"
        else:
            yield f"{sm} {precision}: {_build(bundle, lib, precision, sm=sm, cache=cache)}"


def _build(bundle: Bundle, lib: tensorrt.Library, precision: str, *, sm: str, cache: Path) -> str:
    manifest = bundle.manifest
    graph = bundle.read(manifest.graphs[precision])
    device = cuda.Device(name="", sm=sm, total_bytes=0, driver=0)
    key: PlanKey = tensorrt.plan_key(lib, device, graph, precision=precision, limits=manifest.batch)
    plans, name = PlanCache(cache / sm), f"{manifest.name}-{manifest.version}"
    try:
        return f"{len(plans.read(name, key)) / 1e6:.1f} MB, in the cache already"
    except PlanFault:
        start = time.perf_counter()
    plan = side_process.build(graph, spec=manifest.input, profiles=key.profiles, sm=sm)
    path = plans.write(name, key, plan)
    return f"{len(plan) / 1e6:.1f} MB in {time.perf_counter() - start:.1f} s, {path}"
