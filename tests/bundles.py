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

from service.bundle import Bundle, GoldenSpec, describe_files, write_manifest
from service.encoding.batch import Batch
from tests.live import ROOT

SHIPPED = next((ROOT / "models/store/shop").glob("*/manifest.json")).parent


def copy_bundle(store: Path, version: str, *, max_abs_error: float = 1e-3) -> Path:
    """The shipped bundle as another version; versions sort as newer by their names."""
    folder = store / "shop" / version
    shutil.copytree(SHIPPED, folder)
    _seal(folder, version, max_abs_error=max_abs_error)
    return folder


def other_bundle(store: Path, version: str) -> Path:
    """A version that scores otherwise, and whose golden requests agree with it."""
    folder = copy_bundle(store, version)
    model = onnx.load(folder / "rank.onnx")
    for tensor in model.graph.initializer:
        values = numpy_helper.to_array(tensor)
        if values.dtype == np.float32 and values.ndim == 2:
            flipped = np.ascontiguousarray(-3 * values)
            tensor.CopyFrom(numpy_helper.from_array(flipped, tensor.name))
    (folder / "rank.onnx").write_bytes(model.SerializeToString())
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    with np.load(folder / "golden.npz") as file:
        inputs = {name: file[name] for name in Batch.__struct_fields__}
    buffer = io.BytesIO()
    np.savez_compressed(buffer, logits=session.run(None, inputs)[0], **inputs)
    (folder / "golden.npz").write_bytes(buffer.getvalue())
    _seal(folder, version, max_abs_error=1e-3)
    return folder


def _seal(folder: Path, version: str, *, max_abs_error: float) -> None:
    manifest = Bundle.open(folder).manifest
    write_manifest(
        folder,
        msgspec.structs.replace(
            manifest,
            version=version,
            created_at=f"2026-01-01T00:00:00Z-{version}",
            files=describe_files(folder),
            golden=GoldenSpec(max_abs_error=max_abs_error),
        ),
    )
