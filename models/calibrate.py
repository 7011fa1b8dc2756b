"""Calibration: which range of values each quantized activation needs, seen on real requests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import msgspec
import numpy as np
import onnx
from tqdm import tqdm

from models.dataset import Examples
from models.quantize import Range, Scheme, constant_products
from models.session import feeds, open_session
from service.domain import Float32Array

PERCENTILES = (99.9, 99.99, 99.999, 100.0)
_SAMPLE = 20_000
"""Values kept of an activation and a batch."""


class Seen(msgspec.Struct, frozen=True):
    """A sample of an activation's values, and its extremes over all of them."""

    sample: Float32Array
    low: float
    high: float


def observe(graph: bytes, examples: Examples, *, seed: int = 1) -> dict[str, Seen]:
    """What each activation that will be quantized holds, by its name in the graph."""
    model = onnx.load_from_string(graph)
    names = list(dict.fromkeys(node.input[0] for node in constant_products(model)))
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    session = open_session(model.SerializeToString())
    rng = np.random.default_rng(seed)
    samples: dict[str, list[Float32Array]] = defaultdict(list)
    lows: dict[str, float] = defaultdict(float)
    highs: dict[str, float] = defaultdict(float)
    batches = list(feeds(examples))
    for batch in tqdm(batches, desc="calibrate", leave=False, mininterval=1):
        for name, values in zip(names, session.run(names, batch), strict=True):
            lows[name] = min(lows[name], float(values.min()))
            highs[name] = max(highs[name], float(values.max()))
            flat = values.ravel()
            samples[name].append(flat[rng.integers(flat.size, size=min(flat.size, _SAMPLE))])
    return {
        name: Seen(np.concatenate(parts), lows[name], highs[name])
        for name, parts in samples.items()
    }


def choose_ranges(seen: Mapping[str, Seen], scheme: Scheme) -> dict[str, Range]:
    """Of each activation the range, cut at a percentile, whose rounding errs least."""
    return {name: _least_error(values, scheme) for name, values in seen.items()}


def _least_error(seen: Seen, scheme: Scheme) -> Range:
    whole = Range(seen.low, seen.high)
    if scheme.floating:  # its error grows with the value, and outliers cost nothing
        return whole
    cuts = [
        Range(min(0.0, float(low)), max(0.0, float(high)))
        for low, high in (
            np.percentile(seen.sample, (100 - percentile, percentile)) for percentile in PERCENTILES
        )
    ]
    return min([whole, *cuts], key=lambda cut: rounding_error(seen.sample, cut, scheme))


def rounding_error(sample: Float32Array, cut: Range, scheme: Scheme) -> float:
    """Mean square of what an integer scheme changes in a sample of values."""
    step, zero = cut.scale(scheme)
    levels = np.clip(np.rint(sample / step) + zero, scheme.low, scheme.high)
    return float(np.square((levels - zero) * step - sample).mean())
