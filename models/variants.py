"""Variants of a bundle's graph: what there is, for which engines, and each one's verdict."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import msgspec
from tqdm import tqdm

from models.calibrate import Seen, choose_ranges, observe
from models.dataset import Examples
from models.export_cuda import to_fp16
from models.gate import LIMITS, GateFault, Verdict, judge
from models.quantize import (
    CPU_INT8,
    DEVICE_INT8,
    FP8,
    Range,
    Scheme,
    quantize_products,
    quantize_table,
)
from models.session import score_graph
from service.bundle import OutputSpec
from service.domain import Float32Array

Rewrite = Callable[[bytes, Mapping[str, Seen]], bytes]


class Kind(NamedTuple):
    """How a variant is made from the fp32 graph."""

    precision: str
    use: str
    rewrite: Rewrite
    on_cpu: bool = False


def _products(scheme: Scheme) -> Rewrite:
    return lambda graph, seen: quantize_products(graph, choose_ranges(seen, scheme), scheme)


def _in_halves(scheme: Scheme) -> Rewrite:
    """For devices: fp16 between the quantized products."""
    return lambda graph, seen: to_fp16(_products(scheme)(graph, seen))


KINDS = {
    "fp16": Kind("fp16", "ONNX Runtime on CUDA, TensorRT", lambda graph, _: to_fp16(graph)),
    "int8": Kind("int8", "TensorRT", _in_halves(DEVICE_INT8)),
    "int8-cpu": Kind(
        "int8",
        "ONNX Runtime and OpenVINO on the CPU",
        lambda graph, seen: quantize_table(_products(CPU_INT8)(graph, seen)),
        on_cpu=True,
    ),
    "fp8": Kind("fp8", "TensorRT, from compute capability 8.9 on", _in_halves(FP8)),
}
"""By the name of the graph in a manifest."""


class Variant(msgspec.Struct, frozen=True):
    """A graph and what the gate found."""

    name: str
    precision: str
    use: str
    graph: bytes
    logits: Float32Array
    """Of the slates that it was judged on [N, T, 2]."""
    verdict: Verdict

    def summary(self) -> dict[str, object]:
        """For the manifest."""
        return {
            "precision": self.precision,
            "use": self.use,
            "size_bytes": len(self.graph),
            "passed": self.verdict.passed,
            **msgspec.to_builtins(self.verdict),
        }


class Made(msgspec.Struct, frozen=True):
    """Every variant asked for, whether it passed or not, and what was seen in calibration."""

    variants: list[Variant]
    seen: dict[str, Seen]
    reference: Float32Array
    """The fp32 graph's logits of the slates that all were judged on [N, T, 2]."""

    def check(self) -> None:
        """Raise GateFault where a variant failed."""
        failed = [entry for entry in self.variants if not entry.verdict.passed]
        if failed:
            raise GateFault(
                "; ".join(f"{entry.name}: {', '.join(entry.verdict.failures)}" for entry in failed)
            )

    def ranges(self) -> dict[str, dict[str, Range]]:
        """By activation: the extremes seen, and the ranges chosen for INT8."""
        chosen = {
            name: choose_ranges(self.seen, scheme)
            for name, scheme in (("u8", CPU_INT8), ("s8", DEVICE_INT8))
        }
        return {
            name: {
                "seen": Range(seen.low, seen.high),
                **{scheme: ranges[name] for scheme, ranges in chosen.items()},
            }
            for name, seen in self.seen.items()
        }


def make_variants(
    graph: bytes,
    calibration: Examples,
    test: Examples,
    output: OutputSpec,
    *,
    names: Collection[str] = tuple(KINDS),
) -> Made:
    """Calibrate on some slates, judge each variant on others."""
    seen = observe(graph, calibration)
    reference = score_graph(graph, test, name="fp32")
    made = []
    for name in names:
        kind = KINDS[name]
        rewritten = kind.rewrite(graph, seen)
        logits = score_graph(rewritten, test, name=name, fused=kind.on_cpu)
        verdict = judge(reference, logits, test, output, LIMITS[kind.precision])
        made.append(Variant(name, kind.precision, kind.use, rewritten, logits, verdict))
        tqdm.write(as_line(made[-1], len(graph)))
    return Made(made, seen, reference)


def as_line(variant: Variant, full_bytes: int) -> str:
    """One line of plain words for whoever watches."""
    verdict = variant.verdict
    outcome = "passes" if verdict.passed else f"FAILS: {'; '.join(verdict.failures)}"
    return (
        f"{variant.name}: {len(variant.graph) / 1e6:.2f} MB, {full_bytes / len(variant.graph):.2f} "
        f"times smaller; NDCG@10 loses {verdict.ndcg_loss}, AUC {verdict.auc_loss}; "
        f"first ten {verdict.overlap:.3f}, tau {verdict.kendall_tau:.3f}; {outcome}"
    )
