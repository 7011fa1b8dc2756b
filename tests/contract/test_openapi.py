"""Schemathesis against the live service: every check, on every documented route."""

import os
import subprocess
import sys
from pathlib import Path

from tests.live import ROOT, LiveService

EXAMPLES = 30


def test_the_service_keeps_what_its_openapi_page_says(
    shared_service: LiveService, tmp_path: Path
) -> None:
    done = subprocess.run(
        [
            str(Path(sys.executable).with_name("schemathesis")),
            *("--config-file", str(Path(__file__).with_name("schemathesis.toml")), "run"),
            *(f"{shared_service.url}/openapi.json", "--checks", "all", "--no-color"),
            *("--max-examples", str(EXAMPLES), "--seed", "1"),
        ],
        cwd=tmp_path,
        env=os.environ
        | {"SCHEMATHESIS_HOOKS": "tests.contract.schemathesis_hooks", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    said = "\n".join(line[:500] for line in done.stdout.splitlines())
    assert done.returncode == 0, said + done.stderr
    assert "No issues found" in done.stdout
