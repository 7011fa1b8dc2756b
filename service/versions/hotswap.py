"""Bringing a version up: open, verify, load, golden parity, warm. Publishes nothing."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from service.bundle import Bundle
from service.encoding.batch import Batch, encode_batch
from service.encoding.items import ItemTable
from service.encoding.rows import RowSpace
from service.errors import BackendFault, GoldenFault, ManifestFault
from service.inference.backends.onnx import OnnxCpu
from service.inference.batcher import BatchReport
from service.inference.executor import Executor
from service.versions.loaded import LoadedVersion
from service.versions.traffic import Sample

_WARM_RUNS = 3
_REST = 3.0
"""Pause after a gentle warm-up run, as a multiple of its time."""
_WINDOW_BYTES = 1 << 20
_EXTERNAL = b"\x0a\x08location"
"""The key of an ONNX tensor's external file, as protobuf writes it."""


def open_version(
    bundle: Bundle,
    *,
    threads: int,
    max_queue_s: float,
    report: Callable[[BatchReport], None] = lambda _: None,
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
    golden, expected = _read_golden(bundle)
    precision, file = _best_graph(manifest.graphs)
    backend = OnnxCpu(read_graph(bundle, file), precision=precision, threads=threads)
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
        _warm(version, _sampled(version, samples) or golden, rest=_REST if gently else 0.0)
    except BaseException:
        executor.close()
        raise
    return version


def _best_graph(graphs: dict[str, str]) -> tuple[str, str]:
    if "fp32" not in graphs:
        raise ManifestFault(f"no fp32 graph for the CPU among {sorted(graphs)}")
    return "fp32", graphs["fp32"]


def read_graph(bundle: Bundle, file: str) -> bytes:
    """A graph's verified bytes; raises ManifestFault if it would read further files."""
    graph = bundle.read(file)
    # in windows, as one search holds the interpreter lock to its end
    for start in range(0, len(graph), _WINDOW_BYTES):
        if graph.find(_EXTERNAL, start, start + _WINDOW_BYTES + len(_EXTERNAL)) >= 0:
            raise ManifestFault(f"{file} keeps tensors in external files")
    return graph


def _sampled(version: LoadedVersion, samples: Sequence[Sample]) -> Batch | None:
    """Real requests as this version encodes them."""
    limits = version.manifest.batch
    chosen = samples[-limits.max_users :]
    if not chosen:
        return None
    people = [sample.person for sample in chosen]
    slates = [sample.slate for sample in chosen]
    return encode_batch(people, slates, table=version.table, space=version.space)[0]


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
        for _ in range(_WARM_RUNS):
            started = time.monotonic()
            version.executor.run(batch)
            seconds = time.monotonic() - started
            time.sleep(rest * seconds)
        version.batcher.cost.learn(bucket, seconds)
