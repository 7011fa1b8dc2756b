"""Parity: whether a backend scores the bundle's golden requests as the network did."""

from __future__ import annotations

import io

import msgspec
import numpy as np

from service.bundle import Bundle
from service.domain import Float32Array
from service.encoding.batch import Batch
from service.errors import BackendFault, GoldenFault
from service.inference.backends.base import Backend

_TIMES = {"fp32": 1.0, "fp16": 10.0, "bf16": 100.0, "fp8": 250.0, "int8": 250.0}
"""How much farther than fp32 a precision may be from the expected logits."""


class Golden(msgspec.Struct, frozen=True):
    """Requests with expected logits [N, T, 2]."""

    batch: Batch
    logits: Float32Array
    max_abs_error: float
    """For fp32."""


def read_golden(bundle: Bundle) -> Golden:
    """The golden requests of a bundle; raises GoldenFault if they cannot be read."""
    spec = bundle.manifest.golden
    content = bundle.read(spec.file)
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            batch = Batch(**{name: file[name] for name in Batch.__struct_fields__})
            return Golden(batch, file["logits"], spec.max_abs_error)
    except (KeyError, ValueError, OSError) as error:
        raise GoldenFault(f"the golden requests cannot be read: {error}") from error


def tolerance(precision: str, max_abs_error: float) -> float:
    """The largest permitted difference of a logit."""
    return max_abs_error * _TIMES.get(precision, 1.0)


def check_parity(backend: Backend, golden: Golden) -> float:
    """The largest difference found; raises GoldenFault, with the numbers, if it is too large."""
    what = f"{backend.kind} in {backend.precision}"
    try:
        logits = backend.score(golden.batch)
    except BackendFault as error:
        raise GoldenFault(f"{what}: the golden requests cannot be scored: {error}") from error
    if logits.shape != golden.logits.shape:
        raise GoldenFault(
            f"{what}: golden logits have shape {logits.shape}, not {golden.logits.shape}"
        )
    found = float(np.abs(logits - golden.logits).max())
    allowed = tolerance(backend.precision, golden.max_abs_error)
    if not found <= allowed:
        raise GoldenFault(
            f"{what}: golden logits are off by {found:.2g}, at most {allowed:.2g} is allowed"
        )
    return found
