from __future__ import annotations

from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from model_signing import signing

from service.bundle import MANIFEST, SIGNATURE, Bundle
from service.errors import SignatureFault
from service.versions.signature import check_signature
from tests.bundles import copy_bundle


def make_key(folder: Path) -> tuple[Path, Path]:
    """Files of a new private key and its public one."""
    folder.mkdir()
    key = ec.generate_private_key(ec.SECP256R1())
    private, public = folder / "private.pem", folder / "public.pem"
    private.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    public.write_bytes(
        key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    return private, public


@pytest.fixture
def signed(tmp_path: Path) -> tuple[Path, Path]:
    """A bundle's folder and the public key that vouches for it."""
    folder = copy_bundle(tmp_path, "v1")
    private, public = make_key(tmp_path / "keys")
    config = signing.Config()  # type: ignore[no-untyped-call]
    signer = config.use_elliptic_key_signer(private_key=private)
    signer.sign(folder / MANIFEST, folder / SIGNATURE)
    return folder, public


def test_a_signed_manifest_passes(signed: tuple[Path, Path]) -> None:
    folder, public = signed
    check_signature(Bundle.open(folder), public)


def test_a_changed_manifest_fails(signed: tuple[Path, Path]) -> None:
    folder, public = signed
    manifest = folder / MANIFEST
    manifest.write_bytes(manifest.read_bytes() + b"\n")
    with pytest.raises(SignatureFault, match="mismatch"):
        check_signature(Bundle.open(folder), public)


def test_another_key_fails(signed: tuple[Path, Path], tmp_path: Path) -> None:
    folder, _ = signed
    _, stranger = make_key(tmp_path / "stranger")
    with pytest.raises(SignatureFault):
        check_signature(Bundle.open(folder), stranger)


def test_an_unsigned_bundle_fails(signed: tuple[Path, Path]) -> None:
    folder, public = signed
    (folder / SIGNATURE).unlink()
    with pytest.raises(SignatureFault, match="no manifest"):
        check_signature(Bundle.open(folder), public)
