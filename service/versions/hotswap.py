"""Bringing a version up: open, verify, load, golden parity, warm. Publishes nothing."""

from __future__ import annotations

import io
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from service.bundle import Bundle
from service.encoding.batch import Batch
from service.encoding.items import ItemTable
from service.encoding.rows import RowSpace
from service.errors import BackendFault, GoldenFault, ManifestFault
from service.inference.backends.onnx import OnnxCpu
from service.inference.batcher import BatchReport
from service.inference.executor import Executor
from service.versions.loaded import LoadedVersion

_WARM_RUNS = 3


def open_version(
    bundle: Bundle,
    *,
    threads: int,
    max_queue_s: float,
    report: Callable[[BatchReport], None] = lambda _: None,
) -> LoadedVersion:
    """Load a bundle beside whatever runs; call it off the loop, as it takes seconds.

    Raises BundleFault, with the reason, if the version must not be served.
    """
    manifest = bundle.manifest
    space = RowSpace(manifest.input)
    table = ItemTable.from_bytes(bundle.read(manifest.item_table), space)
    golden, expected = _read_golden(bundle)
    precision, file = _best_graph(manifest.graphs)
    backend = OnnxCpu(bundle.read(file), precision=precision, threads=threads)
    executor = Executor([backend], name=manifest.version)
    try:
        check_golden(executor, golden, expected, manifest.golden.max_abs_error)
        version = LoadedVersion(
            manifest=manifest,
            space=space,
            table=table,
            executor=executor,
            max_queue_s=max_queue_s,
            report=report,
        )
        _warm(version, golden)
    except BaseException:
        executor.close()
        raise
    return version


def _best_graph(graphs: dict[str, str]) -> tuple[str, str]:
    if "fp32" not in graphs:
        raise ManifestFault(f"no fp32 graph for the CPU among {sorted(graphs)}")
    return "fp32", graphs["fp32"]


def _read_golden(bundle: Bundle) -> tuple[Batch, NDArray[np.float32]]:
    content = bundle.read(bundle.manifest.golden.file)
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            batch = Batch(**{name: file[name] for name in Batch.__struct_fields__})
            return batch, file["logits"]
    except (KeyError, ValueError, OSError) as error:
        raise GoldenFault(f"the golden requests cannot be read: {error}") from error


def check_golden(
    executor: Executor, golden: Batch, expected: NDArray[np.float32], max_abs_error: float
) -> None:
    """Score the golden requests; raises GoldenFault, with the distance, if they differ."""
    try:
        logits = executor.run(golden).logits
    except BackendFault as error:
        raise GoldenFault(f"the golden requests cannot be scored: {error}") from error
    if logits.shape != expected.shape:
        raise GoldenFault(f"golden logits have shape {logits.shape}, not {expected.shape}")
    error_found = float(np.abs(logits - expected).max())
    if not error_found <= max_abs_error:
        raise GoldenFault(
            f"golden logits are off by {error_found:.2g}, at most {max_abs_error:.2g} is allowed"
        )


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
        for _ in range(_WARM_RUNS):
            started = time.monotonic()
            version.executor.run(batch)
            seconds = time.monotonic() - started
        version.batcher.cost.learn(bucket, seconds)
