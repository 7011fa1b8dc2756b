"""Tuning: a bundle is run in every way that this CPU offers, and the times are kept.

Graphs, engines and thread counts take turns, so that a machine that is busy for a while slows
all of them alike.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from statistics import geometric_mean
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from models.tables import markdown
from service.bundle import Bundle, Timing, Tuning
from service.domain import BackendKind
from service.encoding.batch import Batch
from service.errors import BackendFault, BundleFault, ManifestFault
from service.inference.backends.base import Backend
from service.inference.backends.buckets import Bucket, resized
from service.inference.backends.cuda import Unavailable
from service.inference.backends.select import Source, open_backend, read_graph
from service.inference.backends.ways import ON_CPU, cpu_model, graph_names, precision_of
from service.inference.parity import Golden, check_parity, read_golden

TUNE_S = 3.0
"""Default of seconds for each way."""
CANDIDATES = 100
"""Of a usual request."""
ROUNDS = 10
LIBRARIES = ("onnxruntime", "openvino")


class Way(NamedTuple):
    """One way to run the bundle."""

    backend: BackendKind
    graph: str
    threads: int

    def __str__(self) -> str:
        return f"{self.backend} {self.graph} threads={self.threads}"


def tune(bundle: Bundle, *, each_s: float = TUNE_S) -> Tuning:
    """Time every way for `each_s` seconds, print the table; raises ManifestFault if none runs.

    All ways are open at once: so many times the graph's size must fit into memory.
    """
    sizes = sizes_of(bundle)
    golden = read_golden(bundle)
    batches = [resized(golden.batch, size) for size in sizes]
    cpu = cpu_model()
    if not cpu:
        raise ManifestFault("--tune: /proc/cpuinfo does not tell what this CPU is")
    with ExitStack() as opened:
        engines = {}
        for way in ways(bundle):
            try:
                engines[way] = opened.enter_context(closing(_open(bundle, way, golden)))
                for batch in batches:
                    engines[way].score(batch)
            except (Unavailable, BundleFault, BackendFault) as error:
                engines.pop(way, None)
                tqdm.write(f"{way}: left out: {str(error).splitlines()[0]}")
        if not engines:
            raise ManifestFault("--tune: no engine runs this bundle")
        timings = [
            Timing(backend=way.backend, graph=way.graph, threads=way.threads, p50_ms=p50_ms)
            for way, p50_ms in _time(engines, batches, each_s).items()
        ]
    found = Tuning(
        cpu=cpu,
        libraries=dict(libraries()),
        sizes=tuple((size.users, size.tiles) for size in sizes),
        timings=tuple(sorted(timings, key=cost)),
    )
    tqdm.write(as_table(found))
    return found


def cost(timing: Timing) -> float:
    """Geometric mean of the times in ms, times the root of the threads.

    Twice the threads must save 29% of the time, as they are taken from other work.
    """
    return geometric_mean(timing.p50_ms) * math.sqrt(timing.threads)


def ways(bundle: Bundle) -> list[Way]:
    """Engines, graphs of the bundle that they run, and threads up to this process's cores."""
    threads = sorted({count for count in (1, 2, cores()) if count <= cores()})
    return [
        Way(kind, graph, count)
        for kind in ON_CPU
        for graph, count in product(graph_names(kind), threads)
        if graph in bundle.manifest.graphs
    ]


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0))


def sizes_of(bundle: Bundle) -> list[Bucket]:
    """Three buckets of the manifest, from few tiles to many, filled with usual requests."""
    limits = bundle.manifest.batch
    per_user = max(1, round(CANDIDATES / bundle.manifest.input.tile_width))
    last = len(limits.tile_buckets) - 1
    return [
        Bucket(min(max(1, tiles // per_user), limits.max_users), tiles)
        for tiles in dict.fromkeys(
            limits.tile_buckets[math.ceil(last * part / 4)] for part in (1, 2, 3)
        )
    ]


def as_table(tuning: Tuning) -> str:
    """Markdown; the best first."""
    sizes = [f"p50 ms, users {users}, tiles {tiles}" for users, tiles in tuning.sizes]
    head = ["engine", "graph", "threads", *sizes]
    rows = [
        [entry.backend, entry.graph, str(entry.threads), *(f"{ms:.3f}" for ms in entry.p50_ms)]
        for entry in tuning.timings
    ]
    versions = ", ".join(f"{name} {number}" for name, number in tuning.libraries.items())
    return f"{tuning.cpu}; {versions}\n{markdown(head, rows)}"


def _open(bundle: Bundle, way: Way, golden: Golden) -> Backend:
    """An engine within its golden tolerance."""
    manifest = bundle.manifest
    source = Source(
        name=f"{manifest.name}-{manifest.version}",
        graph=read_graph(bundle, manifest.graphs[way.graph]),
        precision=precision_of(way.graph),
        spec=manifest.input,
        limits=manifest.batch,
        threads=way.threads,
    )
    backend = open_backend(way.backend, source)
    try:
        check_parity(backend, golden)
    except BundleFault:
        backend.close()
        raise
    return backend


def _time(
    engines: dict[Way, Backend], batches: list[Batch], each_s: float
) -> dict[Way, tuple[float, ...]]:
    """Median milliseconds of each way and batch."""
    slice_s = each_s / (ROUNDS * len(batches))
    times_ms: dict[tuple[Way, int], list[float]] = {
        (way, at): [] for way in engines for at in range(len(batches))
    }
    for _ in tqdm(range(ROUNDS), desc=f"tune {len(engines)} ways", leave=False):
        for at, batch in enumerate(batches):
            for way, engine in engines.items():
                times_ms[way, at] += _runs_ms(engine, batch, slice_s)
    return {
        way: tuple(float(np.median(times_ms[way, at])) for at in range(len(batches)))
        for way in engines
    }


def _runs_ms(engine: Backend, batch: Batch, slice_s: float) -> Iterator[float]:
    """Times of runs after an untimed one, until the slice is over; at least one."""
    engine.score(batch)
    ends_s = time.perf_counter() + slice_s
    while True:
        start_s = time.perf_counter()
        engine.score(batch)
        now_s = time.perf_counter()
        yield (now_s - start_s) * 1e3
        if now_s >= ends_s:
            return


def libraries() -> Iterator[tuple[str, str]]:
    """Names and versions of the engines that are installed."""
    for name in LIBRARIES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue
