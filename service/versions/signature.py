"""Signatures: whether a manifest was signed with the trusted key, by OpenSSF Model Signing.

The manifest holds the digest of every file, so its signature covers the bundle. It is made by
`model_signing sign key manifest.json --private-key … --signature manifest.json.sig`.
"""

from __future__ import annotations

import tempfile
from importlib import import_module
from pathlib import Path

from service.bundle import MANIFEST, SIGNATURE, Bundle
from service.errors import SignatureFault


def check_signature(bundle: Bundle, public_key: Path) -> None:
    """Raise SignatureFault unless the manifest that was read bears this key's signature."""
    name = bundle.folder.name
    try:
        # a second to import: only for those who ask for signatures
        verifying = import_module("model_signing.verifying")
    except ImportError as error:
        raise SignatureFault("a signing key needs the extra `signed`") from error
    signature = bundle.folder / SIGNATURE
    if not signature.is_file():
        raise SignatureFault(f"{name}: no {SIGNATURE}")
    with tempfile.TemporaryDirectory(prefix="ranker-signed-") as folder:
        manifest = Path(folder, MANIFEST)
        manifest.write_bytes(bundle.manifest_bytes)
        try:
            verifier = verifying.Config().use_elliptic_key_verifier(public_key=public_key)
            verifier.verify(manifest, signature)
        except Exception as error:  # the library raises whatever its parts do
            raise SignatureFault(f"{name}: {error}") from error
