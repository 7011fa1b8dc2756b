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


def check(uri: str) -> None:
    """Raise TrackingFault where nothing can be kept at a URI, before minutes of work."""
    _client(uri)


def track(uri: str, run: Run, folder: Path) -> str:
    """Keep a run, and the page in `folder` as its artifacts, at a tracking URI; its id.

    Raises TrackingFault.
    """
    client = _client(uri)
    try:
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
    except Exception as error:  # a store's own errors share no base class
        raise TrackingFault(f"--mlflow: {error}") from error
    return run_id


def _client(uri: str) -> Any:
    """A client whose store answers."""
    try:
        from mlflow import MlflowClient  # noqa: PLC0415  an extra
    except ImportError as error:
        raise TrackingFault("--mlflow needs pip install '.[track]'") from error
    try:
        client = MlflowClient(tracking_uri=uri)
        client.search_experiments(max_results=1)
    except Exception as error:
        raise TrackingFault(f"--mlflow: {error}") from error
    return client
