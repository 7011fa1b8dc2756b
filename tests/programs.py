"""Programs that pip cannot bring: CI must have them, others may do without their tests."""

import os
import shutil

import pytest


def needs(program: str, *, package: str) -> None:
    """Skip the test where a program is missing; fail it in CI."""
    if shutil.which(program) is None:
        tell = pytest.fail if os.environ.get("CI") else pytest.skip
        tell(f"{program} is not installed (Debian: apt-get install {package})")
