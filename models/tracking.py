"""Runs told to MLflow, where somebody keeps one; the only importer of mlflow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from service.errors import RankerError


class TrackingFault(RankerError):
    """A run that MLflow did not take; says why."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint and its figures."""

    experiment: str
    params: Mapping[str, object]
    tags: Mapping[str, str]
    metrics: Mapping[str, float]
    epochs: Sequence[Mapping[str, float]]
    """Each one's figures, by name; `epoch` counts them from 0."""


def check() -> None:
    """Raise TrackingFault where mlflow is not installed, before hours of work."""
    _library()


def track(uri: str, run: Run, folder: Path) -> str:
    """Keep a run, and the page in `folder` as its artifacts, at a tracking URI; its id.

    Raises TrackingFault.
    """
    mlflow = _library()
    try:
        client = mlflow.MlflowClient(tracking_uri=uri)
        known = client.get_experiment_by_name(run.experiment)
        experiment = known.experiment_id if known else client.create_experiment(run.experiment)
        run_id: str = client.create_run(experiment, tags=dict(run.tags)).info.run_id
        for name, value in run.params.items():
            client.log_param(run_id, name, value)
        for epoch in run.epochs:
            step = int(epoch.get("epoch", 0))
            for name in epoch.keys() - {"epoch"}:
                client.log_metric(run_id, f"training.{name}", epoch[name], step=step)
        for name, value in run.metrics.items():
            client.log_metric(run_id, name, value)
        client.log_artifacts(run_id, str(folder))
        client.set_terminated(run_id)
    except mlflow.MlflowException as error:
        raise TrackingFault(f"--mlflow {uri}: {error}") from error
    return run_id


def _library() -> Any:
    try:
        import mlflow  # noqa: PLC0415  an extra
    except ImportError as error:
        raise TrackingFault("--mlflow needs pip install '.[track]'") from error
    return mlflow
