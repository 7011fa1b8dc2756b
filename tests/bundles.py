"""Bundles for tests: copies of the shipped one under other names, whole or spoilt."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import msgspec
import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper

from service.bundle import Bundle, describe_files, write_manifest
from service.encoding.batch import Batch
from tests.live import ROOT

SHIPPED = next((ROOT / "models/store/shop").glob("*/manifest.json")).parent


def copy_bundle(store: Path, version: str) -> Path:
    """The shipped bundle as another version; versions sort as newer by their names."""
    folder = store / "shop" / version
    shutil.copytree(SHIPPED, folder)
    seal(folder, version)
    return folder


def other_bundle(store: Path, version: str) -> Path:
    """A version that scores otherwise, and whose golden requests agree with it."""
    folder = copy_bundle(store, version)
    scramble(folder)
    return folder


def scramble(folder: Path) -> None:
    """Turn the weights over, and take golden scores from the outcome."""
    model = onnx.load(folder / "rank.onnx")
    for tensor in model.graph.initializer:
        values = numpy_helper.to_array(tensor)
        if values.dtype == np.float32 and values.ndim == 2:
            turned = np.ascontiguousarray(-3 * values)
            tensor.CopyFrom(numpy_helper.from_array(turned, tensor.name))
    graph = model.SerializeToString()
    (folder / "rank.onnx").write_bytes(graph)
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    with np.load(folder / "golden.npz") as file:
        inputs = {name: file[name] for name in Batch.__struct_fields__}
    buffer = io.BytesIO()
    np.savez_compressed(buffer, logits=session.run(None, inputs)[0], **inputs)
    (folder / "golden.npz").write_bytes(buffer.getvalue())
    seal(folder, folder.name)


def seal(folder: Path, version: str) -> None:
    """Write the manifest of what the folder holds now."""
    manifest = Bundle.open(folder).manifest
    write_manifest(
        folder,
        msgspec.structs.replace(
            manifest,
            version=version,
            created_at=f"2026-01-01T00:00:00Z-{version}",
            files=describe_files(folder),
        ),
    )
