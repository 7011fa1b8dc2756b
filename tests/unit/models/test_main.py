"""`python -m models` on a machine that only serves."""

import subprocess
import sys

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from models.__main__ import main
sys.argv = ["models", "--help"]
sys.exit(main())
"""


def test_without_what_training_needs_it_says_what_to_install() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "pip install" in done.stderr
    assert "Traceback" not in done.stderr
