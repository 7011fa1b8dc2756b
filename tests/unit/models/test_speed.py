"""The race of engines on this CPU: who takes part, and what it prints."""

import re
from pathlib import Path

import msgspec
import numpy as np
import pytest

from models import speed
from models.cli import main
from models.network import Network
from models.presets import PRESETS
from models.speed import BASELINE, as_table, extensions, race, random_examples
from tests.unit.models.test_network import HEADED


def test_every_way_is_timed_against_the_baseline() -> None:
    laps = race(Network(HEADED).eval(), users=(1, 2), each_s=0.01)
    assert next(iter(laps)) == BASELINE
    assert {entrant.tile_width for entrant in laps} == {speed.CANDIDATES, HEADED.tile_width}
    assert {(entrant.engine, entrant.graph) for entrant in laps} >= {
        ("onnx-cpu", "fp32"),
        ("onnx-cpu", "int8-cpu"),
    }
    for entrant, run in laps.items():
        assert [lap.users for lap in run] == [1, 2]
        for lap in run:
            low, middle, high = lap.ratios
            assert 0 < low <= middle <= high
            assert lap.us > 0
            assert (low == high == 1) is (entrant == BASELINE)
    lines = as_table(laps).splitlines()
    assert re.match(r"\| onnx-cpu \| fp32 \| 100 \| \d+ \| \d+ \| 1\.00 \(1\.00 to", lines[2])
    assert "onnxruntime" in lines[-1]


def test_the_command_prints_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["speed", "--preset", "tiny", "--seconds", "0.01"]) == 0
    printed = capsys.readouterr().out
    assert "ratio, 32 users" in printed
    assert len(re.findall(r"^\| (?:onnx-cpu|openvino) \|", printed, re.MULTILINE)) >= 4


def test_random_ids_lie_in_their_tables() -> None:
    preset = PRESETS["base"]
    found = random_examples(preset)
    rows = np.array([preset.item1_rows, preset.item2_rows, *[preset.feature_rows] * 7])
    assert (found.cand_ids < rows).all()
    assert (found.hist_ids < rows[:6]).all()
    assert found.cand_ids.shape[0] == len(found.tile_user) == 5 * len(found.at_ms)
    wide = random_examples(msgspec.structs.replace(preset, tile_width=100))
    assert len(wide.tile_user) == len(wide.at_ms)


def test_a_host_that_tells_nothing_of_its_cpu_is_no_error(tmp_path: Path) -> None:
    assert extensions(tmp_path / "missing") == ""
