"""What the linters do not hold: sizes of files, and a README that says what is true."""

import subprocess
import sys
from pathlib import Path

import pytest

from service.settings import table

ROOT = Path(__file__).resolve().parents[2]
MOST_LINES = 330
PACKAGES = ("service", "models", "loadtests")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def test_there_is_something_to_look_at() -> None:
    assert len(SOURCES) > 30


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_can_be_read_in_one_sitting(path: Path) -> None:
    assert len(path.read_text("utf-8").splitlines()) <= MOST_LINES


def test_the_readme_lists_the_settings_as_they_are() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    shown = readme.partition("service.settings` -->\n")[2].partition("<!-- end")[0]
    assert shown.strip() == table().strip()


def test_the_readmes_targets_exist() -> None:
    listed = subprocess.run(
        ["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for target in ("serve", "test", "demo", "bench"):
        assert target in listed


def test_the_online_path_does_not_load_the_offline_one() -> None:
    code = "import service.app, sys; print({'torch', 'polars', 'models'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"
