"""The Dockerfile, compose file and workflows, without Docker: linted, and read by our own eyes.

`python docker/replay.py` runs the Dockerfile's steps; that takes a minute and is no test here.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from check_jsonschema import main as check_jsonschema
from click.testing import CliRunner

from service.settings import PREFIX, Settings

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "docker/Dockerfile"
BIN = Path(sys.executable).parent
EXAMPLES = ROOT / "docker/examples"


def run(*command: str | Path) -> None:
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def last_stage(target: str) -> str:
    """What stands between a target's FROM and the next."""
    text = DOCKERFILE.read_text()
    return text.partition(f" AS {target}\n")[2].partition("\nFROM ")[0]


def test_hadolint_finds_nothing() -> None:
    run(BIN / "hadolint", "--failure-threshold", "info", DOCKERFILE)


def test_yaml_is_tidy() -> None:
    run(BIN / "yamllint", "--strict", "--config-file", "docker/.yamllint.yaml", "docker", ".github")


@pytest.mark.parametrize(
    ("schema", "pattern"),
    [
        (("--builtin-schema", "vendor.compose-spec"), "docker/compose.yaml"),
        (("--builtin-schema", "vendor.github-workflows"), ".github/workflows/*.yaml"),
        (("--builtin-schema", "vendor.dependabot"), ".github/dependabot.yml"),
        (("--check-metaschema",), "docker/chart/values.schema.json"),
    ],
)
def test_a_file_matches_its_schema(schema: tuple[str, ...], pattern: str) -> None:
    paths = [str(path) for path in sorted(ROOT.glob(pattern))]
    assert paths
    done = CliRunner().invoke(check_jsonschema, [*schema, *paths])
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("target", ["cpu", "gpu"])
def test_a_target_runs_as_nobody_and_hears_signals(target: str) -> None:
    lines = last_stage(target).splitlines()
    assert "USER 10001:10001" in lines
    assert 'ENTRYPOINT ["python", "-m", "service"]' in lines  # exec form: no shell takes SIGTERM
    assert "COPY service service" in lines
    assert any(line.startswith("HEALTHCHECK ") for line in lines)
    assert not any(line.startswith("RUN") and "pip" in line for line in lines)


def test_both_targets_install_from_the_one_lock() -> None:
    text = DOCKERFILE.read_text()
    assert text.count("--only-binary :all: --constraint lock.txt") == 2
    locked = {line.partition("==")[0] for line in (ROOT / "lock.txt").read_text().splitlines()}
    assert {"onnxruntime", "onnxruntime-gpu", "ddtrace"} <= locked


def test_the_health_check_asks_the_port_that_is_set() -> None:
    (line,) = [line for line in last_stage("cpu").splitlines() if line.startswith("  CMD [")]
    words: list[str] = json.loads(line.removeprefix("  CMD "))
    assert words[:2] == ["python", "-ISc"]
    compile(words[2], "health check", "exec")
    done = subprocess.run(
        [sys.executable, *words[1:]], env={"RANKER_PORT": "1"}, capture_output=True, check=False
    )
    assert b"Connection refused" in done.stderr
    assert done.returncode == 1


def test_compose_sets_what_the_service_reads() -> None:
    service: dict[str, Any] = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"]
    given = service["ranker"]["environment"]
    assert {name.removeprefix(PREFIX).lower() for name in given} - set(
        Settings.model_fields
    ) == set()


def test_compose_mounts_what_is_shipped() -> None:
    services = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"]
    folders = [
        mount.partition(":")[0]
        for service in services.values()
        for mount in service.get("volumes", [])
        if mount.startswith("./")
    ]
    assert folders
    assert [folder for folder in folders if not (ROOT / "docker" / folder).exists()] == []


def test_a_kserve_predictor_is_probed_on_the_routes_that_are_served() -> None:
    predictor = yaml.safe_load((EXAMPLES / "inferenceservice.yaml").read_text())["spec"][
        "predictor"
    ]
    (container,) = predictor["containers"]
    probes = {container[name]["httpGet"]["path"] for name in ("startupProbe", "livenessProbe")}
    assert probes == {"/v2/health/ready", "/v2/health/live"}
    drain_s = (
        next(int(e["value"]) for e in container["env"] if e["name"] == "RANKER_DRAIN_MS") / 1e3
    )
    assert predictor["terminationGracePeriodSeconds"] == drain_s + 35
