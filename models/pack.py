"""Packing: a bundle is written into a folder beside its place, then renamed into it."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnxruntime

from models.dataset import Examples
from models.export import to_onnx
from models.golden import golden_batch, golden_bytes
from models.log import Log
from models.network import Network
from models.tune import tune
from service.bundle import (
    SCHEMA,
    BatchSpec,
    Bundle,
    GoldenSpec,
    Manifest,
    OutputSpec,
    describe_files,
    write_manifest,
)
from service.encoding.batch import Batch
from service.encoding.items import ItemTable
from service.encoding.rows import RowSpace
from service.errors import GoldenFault, ManifestFault

GRAPH, ITEMS, GOLDEN, TITLES = "rank.onnx", "items.npz", "golden.npz", "titles.json"
MAX_ABS_ERROR = 1e-3
DIGEST_LETTERS = 8
SAMPLE_ITEMS = 5


class Ingredients(msgspec.Struct, frozen=True, kw_only=True):
    """What a bundle is made of."""

    log: Log
    network: Network
    table: ItemTable
    examples: Examples
    """Where golden requests are taken from."""
    variants: Mapping[str, bytes] = {}
    """Further graphs that passed the gate, by their names in the manifest."""
    output: OutputSpec
    batch: BatchSpec
    metrics: dict[str, Any]
    provenance: dict[str, Any]


def pack(
    parts: Ingredients, store: Path, *, version: str = "", tune_s: float | None = None
) -> Bundle:
    """Write `store/<name>/<version>`; raises GoldenFault or ManifestFault.

    The first where ONNX Runtime differs from PyTorch, the second where the version exists.
    A version left out is the day after the log's last event and a digest of the content.
    With `tune_s`, every way to run it on this CPU is timed for so long.
    """
    shelf = store / parts.log.name
    shelf.mkdir(parents=True, exist_ok=True)
    space = RowSpace(parts.network.preset.input_spec())
    golden = golden_batch(parts.examples, max_tiles=parts.batch.tile_buckets[-1])
    with tempfile.TemporaryDirectory(prefix=".packing-", dir=shelf) as staged:
        folder = Path(staged) / "bundle"
        folder.mkdir()
        (folder / GRAPH).write_bytes(to_onnx(parts.network))
        graphs = {"fp32": GRAPH}
        for name, graph in parts.variants.items():
            graphs[name] = f"rank-{name}.onnx"
            (folder / graphs[name]).write_bytes(graph)
        (folder / ITEMS).write_bytes(parts.table.to_bytes(space))
        (folder / GOLDEN).write_bytes(golden_bytes(parts.network, golden))
        (folder / TITLES).write_text(_titles(parts.log))
        check_golden(folder / GRAPH, folder / GOLDEN)
        files = describe_files(folder)
        day = _last_day(parts.log)
        content = "".join(entry.sha256 for entry in files.values())
        digest = hashlib.sha256(content.encode()).hexdigest()[:DIGEST_LETTERS]
        manifest = Manifest(
            schema=SCHEMA,
            name=parts.log.name,
            version=version or f"{day}-{digest}",
            created_at=f"{day}T00:00:00Z",
            input=space.spec,
            output=parts.output,
            batch=parts.batch,
            graphs=graphs,
            item_table=ITEMS,
            golden=GoldenSpec(file=GOLDEN, max_abs_error=MAX_ABS_ERROR),
            files=files,
            sample_items=tuple(parts.log.items["id"][:SAMPLE_ITEMS]),
            metrics=parts.metrics,
            provenance=parts.provenance,
        )
        if tune_s is not None:
            tuning = tune(Bundle(folder, manifest), each_s=tune_s)
            manifest = msgspec.structs.replace(manifest, tuning=tuning)
        write_manifest(folder, manifest)
        place = shelf / manifest.version
        if place.exists():
            raise ManifestFault(f"{place} exists already")
        folder.rename(place)
    return Bundle.open(place)


def check_golden(graph: Path, golden: Path) -> float:
    """The largest difference of ONNX Runtime from the golden logits; raises GoldenFault."""
    session = onnxruntime.InferenceSession(graph.read_bytes(), providers=["CPUExecutionProvider"])
    with np.load(golden, allow_pickle=False) as file:
        inputs = {name: file[name] for name in Batch.__struct_fields__}
        worst = float(np.abs(session.run(None, inputs)[0] - file["logits"]).max())
    if not worst <= MAX_ABS_ERROR:
        raise GoldenFault(f"{graph.name} differs from PyTorch by {worst}")
    return worst


def _titles(log: Log) -> str:
    titles = dict(log.items.select("id", "title").iter_rows())
    return json.dumps(titles, ensure_ascii=False, indent=0, sort_keys=True) + "\n"


def _last_day(log: Log) -> str:
    last_ms = log.impressions["at_ms"].max()
    assert isinstance(last_ms, int)
    day = dt.datetime.fromtimestamp(last_ms / 1000, dt.UTC).date()
    return (day + dt.timedelta(days=1)).isoformat()
