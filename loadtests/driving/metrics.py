"""Histograms of a server, read from its Prometheus page before and after a run."""

from __future__ import annotations

from http import HTTPStatus
from http.client import HTTPException

from prometheus_client.parser import text_string_to_metric_families

from loadtests.driving import processes


def batch_sizes(url: str, name: str) -> dict[float, float]:
    """Counts by upper bound of the histogram `name`, all its series together.

    Empty where the server has no such page or no such histogram.
    """
    try:
        status, page = processes.get(url, timeout_s=5)
        families = list(text_string_to_metric_families(page)) if status == HTTPStatus.OK else []
    except (OSError, HTTPException, ValueError):
        return {}
    counts: dict[float, float] = {}
    for family in families:
        for sample in family.samples if family.name == name else ():
            if sample.name.endswith("_bucket"):
                bound = float(sample.labels["le"])
                counts[bound] = counts.get(bound, 0) + sample.value
    bounds = sorted(counts)
    below = [0.0, *(counts[bound] for bound in bounds)]
    return {bound: below[at + 1] - below[at] for at, bound in enumerate(bounds)}


def since(before: dict[float, float], after: dict[float, float]) -> dict[float, float]:
    """What was counted between two readings; a restarted server counts from 0."""
    differences = {bound: count - before.get(bound, 0) for bound, count in after.items()}
    if any(count < 0 for count in differences.values()):
        differences = after
    return {bound: count for bound, count in differences.items() if count}
