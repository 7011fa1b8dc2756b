import hashlib
from pathlib import Path

import msgspec
import pytest

from service.bundle import (
    MANIFEST,
    SCHEMA,
    BatchSpec,
    Bundle,
    GoldenSpec,
    InputSpec,
    Manifest,
    OutputSpec,
    describe_files,
    write_manifest,
)
from service.errors import DigestFault, ManifestFault, NotFound
from service.versions.catalog import Catalog


def manifest_of(folder: Path, spec: InputSpec, version: str = "v1") -> Manifest:
    return Manifest(
        schema=SCHEMA,
        name="shop",
        version=version,
        created_at=f"2026-01-01T00:00:00Z-{version}",
        input=spec,
        output=OutputSpec(),
        batch=BatchSpec(max_users=2, tile_buckets=(1, 2)),
        graphs={"fp32": "rank.onnx"},
        item_table="items.npz",
        golden=GoldenSpec(),
        files=describe_files(folder),
    )


def pack(store: Path, spec: InputSpec, version: str = "v1") -> Path:
    folder = store / "shop" / version
    folder.mkdir(parents=True)
    for file in ("rank.onnx", "items.npz", "golden.npz"):
        (folder / file).write_bytes(f"{file} of {version}".encode())
    write_manifest(folder, manifest_of(folder, spec, version))
    return folder


def test_a_bundle_reads_back_what_was_packed(tmp_path: Path, spec: InputSpec) -> None:
    bundle = Bundle.open(pack(tmp_path, spec))
    assert bundle.manifest.input == spec
    assert bundle.read("rank.onnx") == b"rank.onnx of v1"


def test_a_folder_without_a_manifest_is_no_bundle(tmp_path: Path, spec: InputSpec) -> None:
    folder = pack(tmp_path, spec)
    (folder / MANIFEST).unlink()
    with pytest.raises(ManifestFault, match="no manifest"):
        Bundle.open(folder)


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (b"rank.onnx of v2", "digest"),
        (b"rank.onnx", "bytes"),
        (None, "cannot be read"),
    ],
    ids=["bit flip", "half-copied", "missing"],
)
def test_damaged_files_are_refused(
    tmp_path: Path, spec: InputSpec, damage: bytes | None, match: str
) -> None:
    folder = pack(tmp_path, spec)
    if damage is None:
        (folder / "rank.onnx").unlink()
    else:
        (folder / "rank.onnx").write_bytes(damage)
    with pytest.raises(DigestFault, match=match):
        Bundle.open(folder).read("rank.onnx")


def test_no_file_is_read_through_a_link(tmp_path: Path, spec: InputSpec) -> None:
    folder = pack(tmp_path, spec)
    (tmp_path / "outside").write_bytes(b"rank.onnx of v1")
    (folder / "rank.onnx").unlink()
    (folder / "rank.onnx").symlink_to(tmp_path / "outside")
    with pytest.raises(DigestFault, match="symbolic link"):
        Bundle.open(folder).read("rank.onnx")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"schema": 99}, "schema 99"),
        ({"name": "../shop"}, "plain word"),
        ({"item_table": "other.npz"}, "not listed"),
        ({"batch": {"max_users": 2, "tile_buckets": [4, 2]}}, "ascend"),
        ({"batch": {"max_users": 0, "tile_buckets": [1]}}, "max_users"),
        ({"surprise": 1}, "unknown field"),
        ({"version": 7}, "Expected `str`"),
    ],
)
def test_a_manifest_that_no_reader_could_use_is_refused(
    tmp_path: Path, spec: InputSpec, change: dict[str, object], match: str
) -> None:
    folder = pack(tmp_path, spec)
    fields = msgspec.json.decode((folder / MANIFEST).read_bytes())
    (folder / MANIFEST).write_bytes(msgspec.json.encode(fields | change))
    with pytest.raises(ManifestFault, match=match):
        Bundle.open(folder)


def test_a_file_name_never_leaves_the_folder(tmp_path: Path, spec: InputSpec) -> None:
    folder = pack(tmp_path, spec)
    fields = msgspec.json.decode((folder / MANIFEST).read_bytes())
    content = b"secret"
    (tmp_path / "secret").write_bytes(content)
    fields["files"]["../../secret"] = {
        "sha256": hashlib.sha256(content).hexdigest(),
        "size_bytes": len(content),
    }
    (folder / MANIFEST).write_bytes(msgspec.json.encode(fields))
    with pytest.raises(ManifestFault, match="plain word"):
        Bundle.open(folder)


def test_the_catalog_lists_the_newest_version_first(tmp_path: Path, spec: InputSpec) -> None:
    for version in ("v1", "v3", "v2"):
        pack(tmp_path, spec, version)
    (tmp_path / "shop" / "half").mkdir()
    catalog = Catalog(tmp_path)
    assert catalog.names() == ["shop"]
    assert catalog.versions("shop") == ["v3", "v2", "v1"]


@pytest.mark.parametrize(("name", "version"), [("news", "v1"), ("shop", "v9"), ("shop", "../v1")])
def test_the_catalog_opens_words_that_it_lists_alone(
    tmp_path: Path, spec: InputSpec, name: str, version: str
) -> None:
    pack(tmp_path, spec)
    with pytest.raises(NotFound):
        Catalog(tmp_path).open(name, version)


def test_a_bundle_in_another_versions_place_is_refused(tmp_path: Path, spec: InputSpec) -> None:
    pack(tmp_path, spec).rename(tmp_path / "shop" / "v2")
    with pytest.raises(ManifestFault, match="holds the manifest of shop/v1"):
        Catalog(tmp_path).open("shop", "v2")
    catalog = Catalog(tmp_path)
    assert catalog.versions("shop") == []
    assert catalog.refused == {"v2": "its manifest is that of v1"}
