"""From a trained graph to its variants: calibrated on training days, judged on the test days."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec

from models.build import Checkpoint
from models.dataset import Examples, encode_log, slates_before_test
from models.export import to_onnx
from models.log import Log, LogFault
from models.pack import Ingredients
from models.replay import mixed_slates
from models.variants import Made, Variant, make_variants
from service.bundle import Bundle, InputSpec, OutputSpec
from service.encoding.rows import RowSpace

CALIBRATION_SLATES = 512


class Subject(msgspec.Struct, frozen=True):
    """An fp32 graph and what must be known to feed it."""

    graph: bytes
    spec: InputSpec
    output: OutputSpec

    @classmethod
    def of_checkpoint(cls, checkpoint: Checkpoint) -> Subject:
        network = checkpoint.network
        return cls(to_onnx(network), network.preset.input_spec(), OutputSpec())

    @classmethod
    def of_bundle(cls, folder: Path) -> Subject:
        """Of a packed version; raises ManifestFault or DigestFault."""
        bundle = Bundle.open(folder)
        manifest = bundle.manifest
        return cls(bundle.read(manifest.graphs["fp32"]), manifest.input, manifest.output)


def calibration_slates(log: Log, spec: InputSpec) -> Examples:
    """The last slates before the test days; raises LogFault if there are none."""
    before = slates_before_test(log)
    if not before:
        raise LogFault("impressions.at_ms: nothing before the test days to calibrate on")
    return encode_log(log, RowSpace(spec), before[-CALIBRATION_SLATES:])


def test_slates(log: Log, spec: InputSpec) -> Examples:
    """The slates that every figure is told of; raises LogFault if there are none."""
    shown = mixed_slates(log)
    if not shown:
        raise LogFault("impressions.at_ms: no slate of the test days can be evaluated")
    return encode_log(log, RowSpace(spec), shown)


def compress(log: Log, subject: Subject, test: Examples, names: Collection[str]) -> Made:
    """Make the named variants and judge each."""
    calibration = calibration_slates(log, subject.spec)
    return make_variants(subject.graph, calibration, test, subject.output, names=names)


def with_variants(parts: Ingredients, made: Made) -> Ingredients:
    """A bundle's ingredients with the variants that passed, and every verdict."""
    passed = {entry.name: entry.graph for entry in made.variants if entry.verdict.passed}
    return msgspec.structs.replace(
        parts, variants=passed, metrics={**parts.metrics, "variants": verdicts(made.variants)}
    )


def verdicts(variants: Collection[Variant]) -> dict[str, Any]:
    """By name of the graph: use, size, figures, limits and failures."""
    return {entry.name: entry.summary() for entry in variants}


def write_variants(made: Made, folder: Path) -> None:
    """Every graph, passed or not, and `gate.json` with verdicts and calibrated ranges."""
    folder.mkdir(parents=True, exist_ok=True)
    for entry in made.variants:
        (folder / f"rank-{entry.name}.onnx").write_bytes(entry.graph)
    content = {"variants": verdicts(made.variants), "ranges": made.ranges()}
    pretty = msgspec.json.format(msgspec.json.encode(content), indent=2)
    (folder / "gate.json").write_bytes(pretty + b"\n")
