"""A trace against the service itself, as `python -m loadtests` is used."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtests.driving import processes
from loadtests.driving.samples import Run
from loadtests.verdicts.summary import summarise


@pytest.fixture(scope="module")
def served(valkey_server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a service in a process of its own."""
    port = processes.free_port()
    url = f"http://127.0.0.1:{port}"
    log = tmp_path_factory.mktemp("service") / "service.log"
    env = {"RANKER_REDIS_URL": valkey_server, "RANKER_PORT": str(port)}
    with processes.running([sys.executable, "-m", "service"], log=log, env=env) as process:
        processes.wait_until_ready(f"{url}/readyz", process, log=log)
        yield url


def loadtests(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "loadtests", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_made_trace_is_replayed_judged_and_shown(served: str, tmp_path: Path) -> None:
    path, out = tmp_path / "t.jsonl.zst", tmp_path / "run"
    titles = max(Path("models/store/shop").glob("*/titles.json"))
    made = loadtests(
        *("synth", "poisson", path, "--rate", 60, "--duration-s", 3, "--users", 5),
        *("--slates", "5:1,20:1", "--clicks", 0.5, "--dwell-s", 1),
    )
    assert made.returncode == 0, made.stderr

    # bounds that a busy machine keeps: what is shown is the path of a run, not its speed
    done = loadtests(
        *("replay", path, served, "--out", out, "--items", titles),
        *("--p99-ms", 9000, "--timeout-ms", 10_000, "--connections", 8),
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "verdict: PASS" in done.stdout
    assert (out / "report.html").read_text().startswith("<!doctype html>")
    summary = summarise(Run.load(out).samples)
    assert summary.served_share == 1
    assert summary.latency_by_kind["event"].count > 20
    assert {"signals", "queue", "inference"} <= set(summary.stages)
    assert len(summary.versions) == 1
    assert summary.signal_age.count > 0
    assert sum(Run.load(out).description.batches.values()) > 0
    again = loadtests("report", out, "--p99-ms", 0.001)
    assert again.returncode == 3, again.stdout


def test_wrong_input_ends_with_a_word_on_it(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp":0}\n')

    done = loadtests("replay", path, "http://127.0.0.1:1")

    assert done.returncode == 2
    assert done.stderr.startswith(f"replay: {path}, line 1: a line has one of")
