"""Bringing a version up: open, verify, load, golden parity, warm. Publishes nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from service.bundle import Bundle
from service.domain import BackendChoice
from service.encoding.batch import Batch
from service.encoding.items import ItemTable
from service.encoding.rows import RowSpace
from service.inference.backends.select import build_later, open_rungs
from service.inference.batcher import BatchReport
from service.inference.executor import Executor
from service.inference.parity import read_golden
from service.versions.loaded import LoadedVersion

_WARM_RUNS = 3


def open_version(
    bundle: Bundle,
    *,
    threads: int,
    max_queue_s: float,
    backend: BackendChoice = "auto",
    plans: Path | None = None,
    stall_s: float = 0.05,
    report: Callable[[BatchReport], None] = lambda _: None,
) -> LoadedVersion:
    """Load a bundle beside whatever runs; call it off the loop, as it takes seconds.

    Raises BundleFault, with the reason, if the version must not be served.
    """
    manifest = bundle.manifest
    space = RowSpace(manifest.input)
    table = ItemTable.from_bytes(bundle.read(manifest.item_table), space)
    golden = read_golden(bundle)
    backends = open_rungs(bundle, golden, choice=backend, threads=threads, plans=plans)
    executor = Executor(backends, name=manifest.version)
    try:
        version = LoadedVersion(
            manifest=manifest,
            space=space,
            table=table,
            executor=executor,
            max_queue_s=max_queue_s,
            stall_s=stall_s,
            report=report,
        )
        _warm(version, golden.batch)
    except BaseException:
        executor.close()
        raise
    if plans is not None and backend == "auto" and backends[0].kind != "tensorrt":
        build_later(bundle, golden, plans, version.add_rung)
    return version


def _warm(version: LoadedVersion, golden: Batch) -> None:
    """Run every bucket, made of golden rows, and let the cost model learn from it."""
    limits = version.manifest.batch
    for bucket in limits.tile_buckets:
        users = np.arange(min(bucket, limits.max_users)) % len(golden.hist_ids)
        batch = Batch(
            golden.hist_ids[users],
            golden.hist_age[users],
            golden.hist_mask[users],
            golden.ctx_ids[users],
            golden.cand_ids[np.arange(bucket) % len(golden.cand_ids)],
            (np.arange(bucket) % len(users)).astype(np.int32),
        )
        for lane in version.batcher.ladder.lanes:
            for _ in range(_WARM_RUNS):
                started = time.monotonic()
                lane.rung.run(batch)
                seconds = time.monotonic() - started
            lane.cost.learn(bucket, seconds)
