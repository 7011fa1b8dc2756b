"""From nothing to a served bundle by the command line, and its ranking live as offline."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from models.cli import main

ROOT = Path(__file__).resolve().parents[2]
LOG = ["--log", "synthetic", "--shoppers", "40", "--seed", "4"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    assert main(["build", *LOG, "--epochs", "1", "--out", str(folder)]) == 0
    return folder


def test_a_live_service_ranks_the_test_days_as_offline(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKER_BACKEND", "onnx-cpu")  # the engine that scores offline
    command = [sys.executable, "-m", "loadtests", "real-days", *LOG, "--store", str(store)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "degraded: none" in done.stdout
    lines = [line for line in done.stdout.splitlines() if line.startswith("ndcg10")]
    (offline, served) = lines[0].removeprefix("ndcg10: offline ").split(", served ")
    assert float(offline) == pytest.approx(float(served), abs=0.002)
    assert 0.2 < float(served) < 1


def test_each_step_can_be_taken_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = str(tmp_path / "tiny.pt")
    graph, store = tmp_path / "rank.onnx", tmp_path / "store"
    assert main(["train", *LOG, "--epochs", "1", "--checkpoint", checkpoint]) == 0
    assert main(["evaluate", *LOG, "--checkpoint", checkpoint]) == 0
    assert "| network without history | click |" in capsys.readouterr().out
    assert main(["export", "--checkpoint", checkpoint, "--out", str(graph)]) == 0
    assert main(["pack", *LOG, "--checkpoint", checkpoint, "--out", str(store)]) == 0
    (bundle,) = (store / "shop").iterdir()
    assert (bundle / "rank.onnx").read_bytes() == graph.read_bytes()


def test_what_cannot_be_done_is_said_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["build", "--log", "kuairand", "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err.strip() == (
        "error: --data is needed: the folder of KuaiRand-Pure's Parquet files"
    )
    assert main(["export", "--checkpoint", "none.pt", "--out", str(tmp_path / "x")]) == 1
    assert "error: none.pt is not a checkpoint" in capsys.readouterr().err
