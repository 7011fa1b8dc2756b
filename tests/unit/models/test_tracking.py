"""Runs in a real MLflow database: what was told is what it gives back."""

from __future__ import annotations

from pathlib import Path

import mlflow
import pytest

from models.tracking import Run, TrackingFault, check, track

RUN = Run(
    experiment="ranker-test",
    params={"width": 32, "folded": True},
    tags={"log_sha256": "ab12"},
    metrics={"network.click.ndcg10": 0.7, "int8-cpu.passed": 1.0},
    epochs=[{"epoch": 0, "loss": 0.9}, {"epoch": 1, "loss": 0.8}],
)


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)  # a database keeps artifacts beside itself
    folder = tmp_path / "page"
    folder.mkdir()
    (folder / "README.md").write_text("# a page\n")
    return folder


def test_a_run_is_kept_with_its_figures_and_its_page(page: Path, tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path / 'runs.db'}"
    first, second = track(uri, RUN, page), track(uri, RUN, page)
    client = mlflow.MlflowClient(tracking_uri=uri)
    kept = client.get_run(first)
    assert kept.info.status == "FINISHED"
    assert kept.info.experiment_id == client.get_run(second).info.experiment_id
    assert kept.data.params == {"width": "32", "folded": "True"}
    assert kept.data.tags["log_sha256"] == "ab12"
    assert kept.data.metrics == {**RUN.metrics, "training.loss": 0.8}
    losses = client.get_metric_history(first, "training.loss")
    assert [(entry.step, entry.value) for entry in losses] == [(0, 0.9), (1, 0.8)]
    (file,) = client.list_artifacts(first)
    assert file.path == "README.md"


@pytest.mark.parametrize(
    ("uri", "reason"),
    [
        ("gopher://nowhere", "gopher"),
        ("postgresql://nobody@127.0.0.1:1/none", "psycopg2"),
    ],
)
def test_a_place_that_takes_no_runs_is_told_before_anything_is_measured(
    uri: str, reason: str
) -> None:
    with pytest.raises(TrackingFault, match=reason):
        check(uri)
