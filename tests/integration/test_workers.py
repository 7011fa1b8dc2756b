"""Several services under one load: each gets its users, and the figures are of all of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from loadtests.driving.samples import Run

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.alone


def test_two_numbers_of_workers_are_told_in_one_table(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "loadtests", "workers", "--workers", "1", "2"]
    command += ["--rate", "40", "--duration-s", "2", "--warm-up-s", "1", "--users", "20"]
    command += ["--p99-ms", "5000", "--timeout-ms", "9000", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    header, one, two = done.stdout.splitlines()[1:4]
    assert header.split()[:2] == ["workers", "verdict"]
    assert [line.split()[:2] for line in (one, two)] == [["1", "PASS"], ["2", "PASS"]]
    assert done.stdout.endswith("1 workers hold the objective\n")
    runs = [Run.load(tmp_path / name) for name in ("1", "2")]
    assert [run.description.processes for run in runs] == [1, 2]
    assert all(run.samples.served.all() for run in runs)
