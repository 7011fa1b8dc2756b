"""The Helm chart: linted, rendered, validated, and held to what the service reads."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from service.settings import PREFIX, Settings

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "docker/chart"
EXAMPLES = sorted((ROOT / "docker/examples").glob("values-*.yaml"))
KUBERNETES = ("1.36", "1.37")
CUSTOM_KINDS = {"PodMonitor", "ScaledObject"}
UNDER = {"values-pilot.yaml": ["values-gpu.yaml"]}

Manifest = dict[str, Any]


@pytest.fixture(scope="session")
def helm() -> Path:
    done = subprocess.run(
        [sys.executable, ROOT / "docker/helm.py"], stdout=subprocess.PIPE, text=True, check=True
    )
    return Path(done.stdout.strip())


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in command]
    return subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=False)


@cache
def rendered(helm: Path, *words: str) -> str:
    done = run(helm, "template", "shop", CHART, "--namespace", "ranking", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def manifests(helm: Path, *words: str) -> dict[str, Manifest]:
    """Rendered manifests by kind."""
    return {one["kind"]: one for one in yaml.safe_load_all(rendered(helm, *words)) if one}


def files(example: Path) -> list[str]:
    under = [example.with_name(name) for name in UNDER.get(example.name, [])]
    return [word for path in (*under, example) for word in ("--values", str(path))]


def pod_of(found: dict[str, Manifest]) -> Manifest:
    pod: Manifest = found["Deployment"]["spec"]["template"]["spec"]
    return pod


def environment(found: dict[str, Manifest]) -> dict[str, Any]:
    (container,) = pod_of(found)["containers"]
    return {entry["name"]: entry.get("value", entry) for entry in container["env"]}


TRIAL = ("--set", "redis.embedded=true")
every_example = pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)


@every_example
def test_an_example_is_linted(helm: Path, example: Path) -> None:
    done = run(helm, "lint", "--strict", "--quiet", CHART, *files(example))
    assert done.returncode == 0, done.stdout + done.stderr


@every_example
@pytest.mark.parametrize("version", KUBERNETES)
def test_every_manifest_is_valid_kubernetes(helm: Path, example: Path, version: str) -> None:
    found = yaml.safe_load_all(rendered(helm, *files(example)))
    native = [one for one in found if one and one["kind"] not in CUSTOM_KINDS]
    assert {"Deployment", "Service", "NetworkPolicy"} <= {one["kind"] for one in native}
    for one in native:
        kubernetes_validate.validate(one, version, strict=True)


def test_validation_is_strict(helm: Path) -> None:
    wrong = manifests(helm, *TRIAL)["Service"]
    wrong["spec"]["selektor"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="selektor"):
        kubernetes_validate.validate(wrong, KUBERNETES[-1], strict=True)


@every_example
def test_every_variable_is_a_setting_of_the_service(helm: Path, example: Path) -> None:
    found = environment(manifests(helm, *files(example)))
    given = {name.removeprefix(PREFIX).lower() for name in found if name.startswith(PREFIX)}
    assert given - set(Settings.model_fields) == set()


@every_example
def test_a_pod_is_locked_down(helm: Path, example: Path) -> None:
    pod = pod_of(manifests(helm, *files(example)))
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert not pod["automountServiceAccountToken"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_the_grace_period_covers_the_drain(helm: Path) -> None:
    found = manifests(helm, *TRIAL, "--set", "drainSeconds=20", "--set", "preStopSleepSeconds=3")
    assert environment(found)["RANKER_DRAIN_MS"] == "20000"
    assert pod_of(found)["terminationGracePeriodSeconds"] == 3 + 20 + 35


def test_a_start_may_take_as_long_as_an_engine_build(helm: Path) -> None:
    found = manifests(helm, *TRIAL, "--set", "startupSeconds=901")
    (container,) = pod_of(found)["containers"]
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 901
    assert found["Deployment"]["spec"]["progressDeadlineSeconds"] > 901
    assert container["livenessProbe"]["httpGet"]["path"] == "/livez"


@pytest.mark.parametrize(
    ("limit", "threads"), [("500m", "1"), ("1", "1"), ("2", "1"), ("3500m", "2"), ("8", "7")]
)
def test_engine_threads_follow_the_cpu_limit(helm: Path, limit: str, threads: str) -> None:
    found = manifests(helm, *TRIAL, "--set-string", f"resources.limits.cpu={limit}")
    assert environment(found)["RANKER_ENGINE_THREADS"] == threads


def test_one_value_rolls_the_engine_back(helm: Path) -> None:
    words = files(ROOT / "docker/examples/values-pilot.yaml")
    before, after = manifests(helm, *words), manifests(helm, *words, "--set", "backend=onnx-cpu")
    assert environment(before)["RANKER_BACKEND"] == "tensorrt"
    assert environment(after) == environment(before) | {"RANKER_BACKEND": "onnx-cpu"}
    assert pod_of(before)["containers"][0]["image"] == "ranker:pilot-tensorrt-v1"


@pytest.mark.parametrize(
    ("metric", "name", "target"),
    [
        ("in-flight", "ranker_in_flight", "16"),
        ("queue-ms", "ranker_queue_predicted_seconds", "5m"),
    ],
)
def test_scaling_is_on_load_and_slow_to_shrink(
    helm: Path, metric: str, name: str, target: str
) -> None:
    words = ("--set", "autoscaling.kind=hpa", "--set", f"autoscaling.metric={metric}")
    found = manifests(helm, *TRIAL, *words)
    assert "replicas" not in found["Deployment"]["spec"]
    spec = found["HorizontalPodAutoscaler"]["spec"]
    (one,) = spec["metrics"]
    assert one["pods"]["metric"]["name"] == name
    assert one["pods"]["target"] == {"type": "AverageValue", "averageValue": target}
    assert spec["behavior"]["scaleDown"]["stabilizationWindowSeconds"] == 300
    assert spec["behavior"]["scaleUp"]["stabilizationWindowSeconds"] == 0


def test_keda_asks_prometheus_for_this_release(helm: Path) -> None:
    found = manifests(helm, *files(ROOT / "docker/examples/values-keda.yaml"))
    assert "HorizontalPodAutoscaler" not in found
    (trigger,) = found["ScaledObject"]["spec"]["triggers"]
    assert trigger["metadata"]["query"] == (
        '1000 * sum(ranker_queue_predicted_seconds{namespace="ranking",pod=~"shop-ranker-.*"})'
    )
    assert trigger["metadata"]["threshold"] == "5"


def test_the_agents_check_in_the_annotation_is_json(helm: Path) -> None:
    words = ("--set", "datadog.enabled=true")
    found = manifests(helm, *TRIAL, *words)
    metadata = found["Deployment"]["spec"]["template"]["metadata"]
    checks = json.loads(metadata["annotations"]["ad.datadoghq.com/ranker.checks"])
    (instance,) = checks["openmetrics"]["instances"]
    assert instance["openmetrics_endpoint"].endswith(":8000/metrics")
    assert metadata["labels"]["tags.datadoghq.com/service"] == "shop-ranker"


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ((), "redis.secretName"),
        ((*TRIAL, "--set", "backend=tensort"), "/backend"),
        ((*TRIAL, "--set", "replica=3"), "replica"),
        ((*TRIAL, "--set", "autoscaling.metric=gpu"), "/autoscaling/metric"),
        ((*TRIAL, "--set", "settings.Timeout=3"), "Timeout"),
    ],
)
def test_a_wrong_value_is_refused_by_name(helm: Path, words: tuple[str, ...], fault: str) -> None:
    done = run(helm, "template", "shop", CHART, *words)
    assert done.returncode != 0
    assert fault in done.stderr


def test_the_schema_knows_every_value() -> None:
    def known(values: object, schema: Manifest, at: str) -> list[str]:
        if not isinstance(values, dict) or "properties" not in schema:
            return []
        below = schema["properties"]
        missing = [f"{at}.{name}" for name in values if name not in below]
        return missing + [
            fault
            for name, value in values.items()
            if name in below
            for fault in known(value, below[name], f"{at}.{name}")
        ]

    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert known(values, schema, "") == []
    assert set(values) | {"global"} == set(schema["properties"])


def test_chart_and_package_have_one_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{chart["appVersion"]}"' in project
