"""Virtual environments for programs whose needs are not ours: made once, by name and version."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from loadtests.driving.processes import StartFault

_MADE = ".requirements"


def pinned_as_here(names: Sequence[str]) -> list[str]:
    """Requirements for the versions of `names` that this interpreter runs with."""
    return [f"{name}=={version(name)}" for name in names]


def make(folder: Path, requirements: Sequence[str]) -> Path:
    """The interpreter of an environment that holds `requirements`; raises StartFault.

    One that was made for the same requirements is used again.
    """
    python = folder / "bin" / "python"
    made, wanted = folder / _MADE, "\n".join(requirements)
    if made.is_file() and made.read_text() == wanted:
        return python
    _run([sys.executable, "-m", "venv", "--clear", str(folder)])
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run([*pip, *requirements])
    made.write_text(wanted)
    return python


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - ours
    if done.returncode:
        raise StartFault(f"{command[0]}: {(done.stderr or done.stdout).strip()[-1000:]}")
