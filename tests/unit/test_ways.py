"""Which way an engine is run: settings first, then what was tuned on a CPU like this one."""

import logging
from pathlib import Path

import msgspec
import pytest

from service.bundle import Bundle, Manifest, Timing, Tuning, write_manifest
from service.domain import BackendKind
from service.errors import ManifestFault
from service.inference.backends import openvino
from service.inference.backends.select import open_rungs
from service.inference.backends.ways import Ways, cpu_model
from service.inference.parity import read_golden
from tests.bundles import SHIPPED, copy_bundle

SHOP = Bundle.open(SHIPPED)


def timing(backend: BackendKind, graph: str, threads: int) -> Timing:
    return Timing(backend=backend, graph=graph, threads=threads, p50_ms=(1.0,))


TIMINGS = (
    timing("openvino", "int8-cpu", 2),
    timing("onnx-cpu", "int8-cpu", 1),
    timing("onnx-cpu", "fp32", 2),
    timing("onnx-cpu", "fp32", 1),
)


def tuned(
    cpu: str, timings: tuple[Timing, ...] = TIMINGS, *, base: Manifest = SHOP.manifest
) -> Manifest:
    graphs = {"fp32": "rank.onnx", "int8-cpu": "rank.onnx"}
    found = Tuning(cpu=cpu, libraries={"onnxruntime": "1"}, sizes=((1, 5),), timings=timings)
    return msgspec.structs.replace(base, graphs=graphs, tuning=found)


def test_the_best_way_is_taken_on_the_same_cpu() -> None:
    ways = Ways.of(tuned(cpu_model()))
    assert ways.kinds(bf16=False) == ("tensorrt", "onnx-cuda", "openvino", "onnx-cpu")
    assert (ways.graphs_of("openvino"), ways.threads_of("openvino")) == (["int8-cpu", "fp32"], 2)
    assert (ways.graphs_of("onnx-cpu"), ways.threads_of("onnx-cpu")) == (["fp32"], 1)


def test_an_engine_that_was_slower_is_not_tried_first() -> None:
    ways = Ways.of(tuned(cpu_model(), TIMINGS[1:]))
    assert ways.kinds(bf16=True) == ("tensorrt", "onnx-cuda", "onnx-cpu")
    assert ways.graphs_of("onnx-cpu") == ["int8-cpu", "fp32"]


def test_settings_go_before_what_was_tuned() -> None:
    manifest = tuned(cpu_model())
    assert Ways.of(manifest, backend="onnx-cpu").tuned == TIMINGS[1]
    assert Ways.of(manifest, precision="fp32").tuned == TIMINGS[2]
    assert Ways.of(manifest, precision="fp32", threads=1).tuned == TIMINGS[3]
    ways = Ways.of(manifest, threads=3)
    assert ways.tuned is None
    assert ways.threads_of("onnx-cpu") == 3
    assert ways.kinds(bf16=False) == ("tensorrt", "onnx-cuda", "onnx-cpu")
    assert Ways.of(manifest, precision="int8").graphs_of("onnx-cpu") == ["int8-cpu"]


def test_another_cpu_ignores_it_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    manifest = tuned("Another CPU")
    with caplog.at_level(logging.INFO, logger="ranker.rungs"):
        ways = Ways.of(manifest)
    assert ways == Ways()
    (record,) = caplog.records
    assert record.message == "tuned for another CPU, which is ignored"
    assert (record.__dict__["tuned_for"], record.__dict__["cpu"]) == ("Another CPU", cpu_model())


@pytest.mark.parametrize("cpu", [cpu_model(), "Another CPU"])
def test_the_engines_are_opened_as_tuned(
    cpu: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("openvino", reason="the extra openvino is not installed")
    monkeypatch.setattr(openvino, "has_bf16", lambda: False)
    folder = copy_bundle(tmp_path, "v2")
    packed = Bundle.open(folder).manifest
    write_manifest(folder, tuned(cpu, (timing("openvino", "fp32", 1),), base=packed))
    bundle = Bundle.open(folder)
    assert bundle.manifest.tuning == tuned(cpu, (timing("openvino", "fp32", 1),)).tuning
    rungs = open_rungs(bundle, read_golden(bundle), precision="auto")
    kinds = [rung.kind for rung in rungs if rung.kind in {"openvino", "onnx-cpu"}]
    for rung in rungs:
        rung.close()
    assert kinds == (["openvino", "onnx-cpu"] if cpu == cpu_model() else ["onnx-cpu"])


@pytest.mark.parametrize(
    ("cpu", "way", "reason"),
    [
        ("", timing("onnx-cpu", "fp32", 1), "tuning.cpu is empty"),
        ("A", timing("onnx-cpu", "fp8", 1), "fp8 was tuned but is not among graphs"),
        ("A", timing("onnx-cpu", "fp32", 0), "threads must be at least 1"),
    ],
)
def test_a_manifest_whose_tuning_makes_no_sense_is_refused(
    cpu: str, way: Timing, reason: str, tmp_path: Path
) -> None:
    folder = copy_bundle(tmp_path, "v2")
    content = msgspec.to_builtins(Bundle.open(folder).manifest)
    content["tuning"] = msgspec.to_builtins(
        Tuning(cpu=cpu, libraries={}, sizes=((1, 5),), timings=(way,))
    )
    (folder / "manifest.json").write_bytes(msgspec.json.encode(content))
    with pytest.raises(ManifestFault, match=reason):
        Bundle.open(folder)


def test_a_cpu_is_told_by_name_family_and_model(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("cpu family\t: 25\nmodel\t\t: 1\nmodel name\t: AMD EPYC\nflags\t: fma\n")
    assert cpu_model(cpuinfo) == "AMD EPYC, cpu family 25, model 1"
    cpuinfo.write_text("CPU implementer\t: 0x41\nCPU part\t: 0xd40\n")
    assert cpu_model(cpuinfo) == "CPU implementer 0x41, CPU part 0xd40"
    assert cpu_model(tmp_path / "none") == ""
