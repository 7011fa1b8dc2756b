"""A bundle: the directory of one model version, and its manifest.

A bundle exists once its manifest does: `write_manifest` is the last step of packing.
Bytes are checked against the manifest when they are read (`Bundle.read`), so what is
verified is what is loaded.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
from pathlib import Path
from typing import Any, Self

import msgspec

from service.domain import BackendKind
from service.errors import DigestFault, ManifestFault

MANIFEST = "manifest.json"
SIGNATURE = "manifest.json.sig"
SCHEMA = 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class InputSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a request becomes tensors; training and serving read the same one."""

    hash_seed: int
    item1_rows: int
    item2_rows: int
    feature_rows: int
    history_len: int
    tile_width: int
    segment_slots: int = 12


class OutputSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """score = click_weight * P(click) + dwell_weight * P(long dwell)."""

    click_weight: float = 1.0
    dwell_weight: float = 0.0


class BatchSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Permitted sizes of a batch."""

    max_users: int
    tile_buckets: tuple[int, ...]
    """Ascending row counts; the last one is the most tiles of a batch."""


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Digest and size of one file."""

    sha256: str
    size_bytes: int


class GoldenSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Requests with expected logits (`golden.npz`), and how far a backend may be from them."""

    file: str = "golden.npz"
    max_abs_error: float = 1e-3


class Timing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One way to run the bundle, and how long it took."""

    backend: BackendKind
    graph: str
    """Its name in the manifest's `graphs`."""
    threads: int
    p50_ms: tuple[float, ...]
    """Of each size of `Tuning.sizes`."""


class Tuning(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was measured on the machine that packed; holds for the same CPU model alone."""

    cpu: str
    libraries: dict[str, str]
    """Versions, by the names of the packages."""
    sizes: tuple[tuple[int, int], ...]
    """Users and tiles of the batches that were timed."""
    timings: tuple[Timing, ...]
    """The best first: a reader takes the first one that its settings permit."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything a reader must know of a version; the file that makes a bundle exist."""

    schema: int
    name: str
    version: str
    created_at: str
    input: InputSpec
    output: OutputSpec
    batch: BatchSpec
    graphs: dict[str, str]
    """Precision to ONNX file, such as `{"fp32": "rank.onnx"}`; `int8-cpu` is one for CPUs alone."""
    item_table: str
    golden: GoldenSpec
    files: dict[str, FileEntry]
    sample_items: tuple[str, ...] = ()
    """A few known ids, for a first request."""
    tuning: Tuning | None = None
    metrics: dict[str, Any] = {}
    provenance: dict[str, Any] = {}

    def __post_init__(self) -> None:
        """Refuse what no reader could use; msgspec turns a ValueError into its own error."""
        if self.schema != SCHEMA:
            raise ValueError(f"schema {self.schema} is not {SCHEMA}")
        for what, word in (("name", self.name), ("version", self.version)):
            if not _NAME.fullmatch(word):
                raise ValueError(f"{what} {word!r} is not a plain word")
        buckets = self.batch.tile_buckets
        if not buckets or list(buckets) != sorted(set(buckets)) or buckets[0] < 1:
            raise ValueError("batch.tile_buckets must ascend from at least 1")
        if self.batch.max_users < 1:
            raise ValueError("batch.max_users must be at least 1")
        for needed in (*self.graphs.values(), self.item_table, self.golden.file):
            if needed not in self.files:
                raise ValueError(f"{needed} is named but not listed under files")
        for timing in self.tuning.timings if self.tuning else ():
            if timing.graph not in self.graphs:
                raise ValueError(f"{timing.graph} was tuned but is not among graphs")
            if timing.threads < 1:
                raise ValueError("tuning.timings: threads must be at least 1")
        if self.tuning is not None and not self.tuning.cpu:
            raise ValueError("tuning.cpu is empty")
        for file in self.files:
            if not _NAME.fullmatch(file):
                raise ValueError(f"file name {file!r} is not a plain word")


class Bundle:
    """A bundle on disk, opened for reading."""

    def __init__(self, folder: Path, manifest: Manifest, manifest_bytes: bytes = b"") -> None:
        self.folder = folder
        self.manifest = manifest
        self.manifest_bytes = manifest_bytes
        """What `manifest` was decoded from, and what a signature covers."""

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Read the manifest of `folder`; raises ManifestFault."""
        path = folder / MANIFEST
        try:
            content = path.read_bytes()
            manifest = msgspec.json.decode(content, type=Manifest)
        except FileNotFoundError as error:
            raise ManifestFault(f"{folder.name}: no {MANIFEST}") from error
        except OSError as error:
            raise ManifestFault(f"{folder.name}: {MANIFEST} cannot be read: {error}") from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ManifestFault(f"{folder.name}: {MANIFEST}: {error}") from error
        return cls(folder, manifest, content)

    def read(self, file: str) -> bytes:
        """The verified bytes of one listed file; raises ManifestFault or DigestFault."""
        entry = self.manifest.files.get(file)
        if entry is None:
            raise ManifestFault(f"{file} is not listed in the manifest")
        content = _read_plain(self.folder / file)
        if len(content) != entry.size_bytes:
            raise DigestFault(
                f"{file} has {len(content)} bytes, the manifest says {entry.size_bytes}"
            )
        if hashlib.sha256(content).hexdigest() != entry.sha256:
            raise DigestFault(f"{file} does not have the digest of the manifest")
        return content


def is_word(text: str) -> bool:
    """Whether a name is plain: no separators, no leading dot, at most 100 characters."""
    return _NAME.fullmatch(text) is not None


def _read_plain(path: Path) -> bytes:
    """The bytes of a plain file: no symbolic link, and no second name elsewhere."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:  # noqa: PTH123  a descriptor
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
                raise DigestFault(f"{path.name} is a hard link, or no plain file")
            return file.read()
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise DigestFault(f"{path.name} is a symbolic link") from error
        raise DigestFault(f"{path.name} cannot be read: {error}") from error


def describe_files(folder: Path) -> dict[str, FileEntry]:
    """Digest and size of every file of `folder` but the manifest and its signature."""
    return {
        path.name: FileEntry(hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_size)
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name not in {MANIFEST, SIGNATURE}
    }


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest last and at once: synced temporary file, then rename."""
    staged = folder / f".{MANIFEST}.part"
    with staged.open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    staged.rename(folder / MANIFEST)
