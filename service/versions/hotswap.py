"""Bringing a version up: open, verify, load, golden parity, warm. Publishes nothing."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from service.bundle import Bundle
from service.domain import BackendChoice, PrecisionChoice
from service.encoding.batch import Batch, encode_batch
from service.encoding.items import ItemTable
from service.encoding.rows import RowSpace
from service.errors import BackendFault, BackendLost, ManifestFault
from service.inference.backends.select import build_later, open_rungs
from service.inference.batcher import BatchReport
from service.inference.executor import Executor
from service.inference.lane import Lane
from service.inference.outages import RungChange
from service.inference.parity import read_golden
from service.versions.loaded import LoadedVersion
from service.versions.traffic import Sample

_log = logging.getLogger("ranker.rungs")
_WARM_RUNS = 3
_REST = 8.0
"""Pause after a gentle warm-up run, as a multiple of its time."""


def open_version(
    bundle: Bundle,
    *,
    threads: int | None,
    max_queue_s: float,
    backend: BackendChoice = "auto",
    precision: PrecisionChoice = "auto",
    plans: Path | None = None,
    stall_s: float = 0.05,
    report: Callable[[BatchReport], None] = lambda _: None,
    changed: Callable[[RungChange], None] = lambda _: None,
    samples: Sequence[Sample] = (),
    gently: bool = False,
) -> LoadedVersion:
    """Load a bundle beside whatever runs; call it off the loop, as it takes seconds.

    It is warmed with `samples` of real requests, or with the golden ones if there are none;
    `gently` leaves the core to a running version most of the time.
    Raises BundleFault, with the reason, if the version must not be served.
    """
    manifest = bundle.manifest
    space = RowSpace(manifest.input)
    table = ItemTable.from_bytes(bundle.read(manifest.item_table), space)
    golden = read_golden(bundle)
    backends = open_rungs(
        bundle, golden, choice=backend, precision=precision, threads=threads, plans=plans
    )
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
            changed=changed,
        )
        rows = _sampled(version, samples) or golden.batch
        _warm(version, rows, rest=_REST if gently else 0.0)
    except BaseException:
        executor.close()
        raise
    if plans is not None and backend == "auto" and backends[0].kind != "tensorrt":
        build_later(bundle, golden, plans, version.add_rung, precision=precision)
    return version


def _sampled(version: LoadedVersion, samples: Sequence[Sample]) -> Batch | None:
    """Real requests as this version encodes them."""
    limits = version.manifest.batch
    chosen = samples[-limits.max_users :]
    if not chosen:
        return None
    people = [sample.person for sample in chosen]
    slates = [sample.slate for sample in chosen]
    return encode_batch(people, slates, table=version.table, space=version.space)[0]


def _warm(version: LoadedVersion, rows: Batch, *, rest: float) -> None:
    """Run every bucket, made of the given rows, and let the cost model learn from it."""
    limits = version.manifest.batch
    for bucket in limits.tile_buckets:
        users = np.arange(min(bucket, limits.max_users)) % len(rows.hist_ids)
        batch = Batch(
            rows.hist_ids[users],
            rows.hist_age[users],
            rows.hist_mask[users],
            rows.ctx_ids[users],
            rows.cand_ids[np.arange(bucket) % len(rows.cand_ids)],
            (np.arange(bucket) % len(users)).astype(np.int32),
        )
        for lane in version.batcher.ladder.lanes:
            if lane.usable():
                _warm_lane(lane, batch, bucket, rest=rest)
    if version.batcher.ladder.first() is None:
        raise ManifestFault("no engine scored the batches that warm it")


def _warm_lane(lane: Lane, batch: Batch, bucket: int, *, rest: float) -> None:
    """Run a bucket; a rung that fails takes no jobs until its breaker lets it try again."""
    try:
        for _ in range(_WARM_RUNS):
            started = time.monotonic()
            lane.rung.run(batch)
            seconds = time.monotonic() - started
            time.sleep(rest * seconds)
    except BackendFault as error:
        lane.breaker.trip()
        if isinstance(error, BackendLost):
            lane.lost_s = time.monotonic()
        _log.warning("rung fails while warmed", extra={"rung": lane.kind, "reason": str(error)})
        return
    lane.cost.learn(bucket, seconds)
