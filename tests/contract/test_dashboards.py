"""Every metric, label and tag that dashboards, monitors, rules and runbook name exists."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import promql_parser
import pytest
import yaml
from datadog_api_client.api_client import ApiClient
from datadog_api_client.configuration import Configuration
from datadog_api_client.v1.model.dashboard import Dashboard
from datadog_api_client.v1.model.monitor import Monitor
from prometheus_client.parser import text_string_to_metric_families

from service.domain import BackendName, Change, ChangeKind, DegradedReason, Outcome, StageTimes
from service.inference.batcher import BatchReport
from service.inference.lane import LaneState
from service.ranking.query import Report
from service.telemetry.metrics import Metrics
from service.telemetry.runtime import Gpus
from service.telemetry.spans import FRAMEWORK
from tests.integration.test_telemetry_spans import STAGES
from tests.live import ROOT, LiveService, client_of
from tests.programs import needs

SHIPPED = ROOT / "docker" / "observability"
RULES = [SHIPPED / "prometheus" / name for name in ("rules.yaml", "alerts.yaml")]
GRAFANA = sorted((SHIPPED / "grafana").glob("*.json"))
DATADOG = [SHIPPED / "datadog" / name for name in ("dashboard.json", "frameworks.json")]
OF_PROMETHEUS = {"le", "instance", "job", "alertname", "alertstate"}
OF_DATADOG = {"env", "service", "version", "host"}

Labels = dict[str, dict[str, set[str]]]
"""By metric name, by label: the values seen."""


@pytest.fixture(scope="module")
def scraped(shared_service: LiveService) -> Labels:
    """What a running service shows after traffic of every route, with a GPU's families."""
    with client_of(shared_service) as client:
        event = {"type": "click", "user_id": "u1", "item_id": "sku-00003"}
        assert client.post("/v1/events", json=event).status_code == 202
        body = {"user_id": "u1", "items": [f"sku-{at:05d}" for at in range(60)]}
        for _ in range(12):  # so many that drift is told
            assert client.post("/rank", json=body).status_code == 200
        page = client.get("/metrics").text
    found: Labels = {}
    families = list(text_string_to_metric_families(page)) + list(gpus().collect())
    for sample in (sample for family in families for sample in family.samples):
        labels = found.setdefault(sample.name, {})
        for name, value in sample.labels.items():
            labels.setdefault(name, set()).add(value)
    return found


def gpus() -> Gpus:
    """One device, as NVML would tell of it; this machine need not have any."""
    nvml = SimpleNamespace(
        NVMLError=OSError,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(used=3 << 30, total=141 << 30),
        nvmlDeviceGetUtilizationRates=lambda _: SimpleNamespace(gpu=70),
    )
    return Gpus(nvml)


CLOSED_SETS: dict[str, set[str]] = {
    "outcome": set(get_args(Outcome)),
    "reason": set(get_args(DegradedReason)),
    "kind": set(get_args(ChangeKind)) | {"late", "failed", "skipped_records"},
    "framework": set(FRAMEWORK.values()),
    "route": {"/rank", "/v1/events"},
    "stage": {"total", *STAGES},
    "state": set(get_args(LaneState)),
}
"""Values that a label may have beside those that one healthy service shows."""


def selectors(expression: str) -> list[Any]:
    found: list[Any] = []

    def visit(node: Any) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            found.append(node)

    promql_parser.walk(promql_parser.parse(expression), visit)
    return found


def recorded() -> dict[str, str]:
    groups = yaml.safe_load(RULES[0].read_text())["groups"]
    return {rule["record"]: rule["expr"] for group in groups for rule in group["rules"]}


def alerts() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml.safe_load(RULES[1].read_text())["groups"][0]["rules"]
    return found


def check_expression(expression: str, scraped: Labels) -> None:
    found = selectors(expression)
    assert found, expression
    for selector in found:
        if selector.name == "up" or selector.name in recorded():
            continue
        assert selector.name in scraped, f"{selector.name} is nowhere: {expression}"
        labels = scraped[selector.name]
        for matcher in selector.matchers.matchers:
            if matcher.name in OF_PROMETHEUS - {"le"}:
                continue
            assert matcher.name in labels, f"{selector.name} has no {matcher.name}: {expression}"
            known = labels[matcher.name] | CLOSED_SETS.get(matcher.name, set())
            assert set(matcher.value.split("|")) <= known, f"{matcher.value}: {expression}"
    for grouped in re.findall(r"\bby \(([^)]*)\)", expression):
        names = {name.strip() for name in grouped.split(",")} - OF_PROMETHEUS
        known = {name for s in found for name in scraped.get(s.name, {})}
        if not any(selector.name in recorded() for selector in found):
            assert names <= known, f"{names - known}: {expression}"


@pytest.mark.parametrize("words", [["check", "config"], ["test", "rules"]], ids=" ".join)
def test_promtool_accepts_the_rules_and_their_unit_tests(words: list[str]) -> None:
    needs("promtool", package="prometheus")
    file = "prometheus.yaml" if words[0] == "check" else "rules_test.yaml"
    done = subprocess.run(
        ["promtool", *words, file], cwd=RULES[0].parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_rules_name_what_exists(scraped: Labels) -> None:
    for expression in [*recorded().values(), *(alert["expr"] for alert in alerts())]:
        check_expression(expression, scraped)


@pytest.mark.parametrize("file", GRAFANA, ids=lambda file: file.stem)
def test_grafana_panels_name_what_exists(file: Path, scraped: Labels) -> None:
    board = json.loads(file.read_text())
    targets = [target for panel in board["panels"] for target in panel.get("targets", [])]
    assert len(targets) > 10
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    for target in targets:
        expression = target["expr"].replace("$__rate_interval", "5m").replace("$instance", ".*")
        check_expression(expression, scraped)
        for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
            assert re.search(rf"by \([^)]*\b{label}\b", expression), target


def unparsed(node: Any) -> Iterator[Any]:
    """Parts of a model of datadog-api-client that it could not make sense of."""
    if getattr(node, "_unparsed", False):
        yield node
        return
    if isinstance(node, list):
        for inner in node:
            yield from unparsed(inner)
    elif hasattr(node, "_data_store"):
        for inner in node._data_store.values():
            yield from unparsed(inner)
    if hasattr(node, "_composed_instances"):
        for inner in node._composed_instances:
            yield from unparsed(inner)


def as_model(content: Any, model: type) -> Any:
    configuration = Configuration()  # type: ignore[no-untyped-call]
    with ApiClient(configuration) as client:
        return client.deserialize(json.dumps(content), (model,), check_type=True)


@pytest.mark.parametrize("file", DATADOG, ids=lambda file: file.stem)
def test_datadog_takes_the_dashboards(file: Path) -> None:
    given = {"id": "a", "url": "b", "author_handle": "c"}
    model = as_model(json.loads(file.read_text()) | given, Dashboard)
    assert list(unparsed(model)) == []


def monitors() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((SHIPPED / "datadog" / "monitors.json").read_text())
    return found


@pytest.mark.parametrize("monitor", monitors(), ids=lambda monitor: monitor["name"])
def test_datadog_takes_the_monitors(monitor: dict[str, Any]) -> None:
    assert list(unparsed(as_model(monitor, Monitor))) == []
    threshold = monitor["options"]["thresholds"]["critical"]
    assert float(re.split(r"[<>]=?", monitor["query"])[-1]) == threshold


def test_datadog_queries_name_what_the_agents_check_sends(scraped: Labels) -> None:
    (check,) = yaml.safe_load((SHIPPED / "datadog" / "openmetrics.yaml").read_text())["instances"]
    assert (check["namespace"], check["raw_metric_prefix"]) == ("ranker", "ranker_")
    queries = [monitor["query"] for monitor in monitors()]
    for file in DATADOG:
        queries += re.findall(
            r'"query": "((?:sum|avg|min|max|p\d+):ranker\.[^"]*)"', file.read_text()
        )
    assert len(queries) > 30
    for query in queries:
        parts = re.findall(r"ranker\.([a-z_.]+)\{([^}]*)\}(?: by \{([^}]*)\})?", query)
        assert parts, query
        for name, filters, groups in parts:
            labels = sent_as(name, scraped)
            assert labels is not None, f"nobody sends ranker.{name}: {query}"
            words = [word.lstrip("!") for word in filters.split(",") if word != "*"]
            keys = [word.split(":")[0] for word in words if not word.startswith("$")]
            keys += [key for key in groups.split(",") if key]
            assert set(keys) <= set(labels) | OF_DATADOG, query
            for word in words:
                key, _, value = word.partition(":")
                if key in labels and value:
                    known = labels[key] | CLOSED_SETS.get(key, set())
                    assert value in {each.lower() for each in known}, query


def sent_as(name: str, scraped: Labels) -> dict[str, set[str]] | None:
    """The labels under which the agent's OpenMetrics check sends a metric, if it does."""
    if name.endswith(".count"):
        plain = name.removesuffix(".count")
        found = scraped.get(f"ranker_{plain}_total") or scraped.get(f"ranker_{plain}_count")
        return found if found is not None else scraped.get(f"ranker_{plain}_total")
    if f"ranker_{name}_bucket" in scraped:
        return scraped[f"ranker_{name}_bucket"]
    return scraped.get(f"ranker_{name}")


def test_datadog_span_queries_use_tags_that_spans_carry() -> None:
    writer = (ROOT / "service" / "telemetry" / "spans.py").read_text()
    for file in DATADOG:
        text = file.read_text()
        for tag in re.findall(r"@([a-z_]+(?:\.[a-z_]+)?)[:\"]", text):
            assert tag == "duration" or f'"{tag}"' in writer, tag
        for name in re.findall(r"operation_name:ranker\.(\w+)", text):
            assert name in {"request", "batch", *STAGES}


def test_each_alert_and_monitor_has_a_page_whose_metrics_exist(scraped: Labels) -> None:
    pages = {alert["annotations"]["runbook"] for alert in alerts()}
    for monitor in monitors():
        (page,) = re.findall(r"observability/(runbook/\S+\.md)", monitor["message"])
        pages.add(page)
    assert {f"runbook/{file.name}" for file in (SHIPPED / "runbook").glob("*.md")} == pages | {
        "runbook/README.md"
    }
    for page in pages:
        text = (SHIPPED / page).read_text()
        for heading in ("## What it means", "## What to look at", "## What to do"):
            assert heading in text, page
        for name in re.findall(r"`(ranker_[a-z_]+)", text):
            assert name in scraped or f"{name}_count" in scraped, f"{page}: {name}"
        for name in re.findall(r"`(ranker:[a-z_:0-9]+)", text):
            assert name in recorded(), f"{page}: {name}"


@pytest.mark.parametrize("page", sorted((SHIPPED / "runbook").glob("*.md")), ids=lambda f: f.stem)
def test_each_command_of_the_runbook_works(page: Path, shared_service: LiveService) -> None:
    blocks = re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block],
            env={**os.environ, "RANKER": shared_service.url},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, block + done.stdout + done.stderr
        assert done.stdout


def test_every_yaml_parses_and_the_collector_names_only_what_it_defines() -> None:
    for file in SHIPPED.rglob("*.yaml"):
        assert yaml.safe_load(file.read_text()), file
    collector = yaml.safe_load((SHIPPED / "otel" / "collector.yaml").read_text())
    for pipeline in collector["service"]["pipelines"].values():
        for kind in ("receivers", "processors", "exporters"):
            assert set(pipeline[kind]) <= set(collector[kind])


def test_no_label_can_hold_a_user_or_an_item() -> None:
    """The labels of all families, by name: nothing of a request's content is among them."""
    metrics = Metrics()
    metrics.record(
        Report(
            route="/rank",
            outcome="ok",
            status=200,
            request_id="request-7",
            started_s=0.0,
            times=StageTimes(total_s=0.1),
        )
    )
    backend: BackendName = "onnxruntime"
    metrics.record_batch(
        BatchReport(
            requests=1, tiles=1, candidates=1, slots=2, started_s=0, seconds=1, backend=backend
        )
    )
    metrics.record_change(
        Change(
            kind="swap", model_name="m", model_version="v", done=True, started_s=0.0, ended_s=1.0
        )
    )
    names = {name for f in metrics.registry.collect() for s in f.samples for name in s.labels}
    allowed = {"route", "outcome", "model_version", "framework", "precision", "reason", "stage"}
    assert names == allowed | {"source", "kind", "result", "le"}
