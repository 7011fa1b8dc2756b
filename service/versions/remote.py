"""Bundles in a store elsewhere, read through fsspec, and copied into a local folder.

A copy counts once its manifest is there, which is written last; digests are checked when
the copy is loaded.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from service.bundle import MANIFEST, SIGNATURE, Bundle, Manifest, is_word
from service.errors import ManifestFault, NotFound, StoreFault

try:
    import fsspec
except ImportError:
    fsspec = None


class RemoteStore:
    """`<url>/<name>/<version>/`, such as s3://models/ranker; raises StoreFault."""

    def __init__(self, url: str, copies: Path) -> None:
        if fsspec is None:
            raise StoreFault("a store's URL needs the extra `stores` (fsspec)")
        self._url = url
        self._copies = copies
        try:
            found: tuple[Any, str] = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise StoreFault(f"{url}: {error}") from error
        self._files, self._root = found

    def names(self) -> list[str]:
        """See Remote."""
        return sorted({name for name, _ in self._listed("*")})

    def manifests(self, name: str) -> list[Bundle]:
        """See Remote."""
        found = []
        for model, version in self._listed(name):
            try:
                manifest = _decode(self._read(f"{model}/{version}/{MANIFEST}"), version)
            except ManifestFault:
                continue
            found.append(Bundle(self._copies / model / version, manifest))
        return found

    def fetch(self, name: str, version: str) -> None:
        """See Remote."""
        content = self._read(f"{name}/{version}/{MANIFEST}")
        manifest = _decode(content, version)
        shelf = self._copies / name
        try:
            shelf.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".copying-", dir=shelf) as staged:
                folder = Path(staged, version)
                folder.mkdir()
                for file in manifest.files:
                    (folder / file).write_bytes(self._read(f"{name}/{version}/{file}"))
                signature = f"{self._root.rstrip('/')}/{name}/{version}/{SIGNATURE}"
                if self._files.exists(signature):
                    (folder / SIGNATURE).write_bytes(self._files.cat_file(signature))
                (folder / MANIFEST).write_bytes(content)
                shutil.rmtree(shelf / version, ignore_errors=True)
                folder.rename(shelf / version)
        except OSError as error:
            raise StoreFault(f"{name}/{version} cannot be copied: {error}") from error

    def _listed(self, name: str) -> list[tuple[str, str]]:
        try:
            paths = self._files.glob(f"{self._root.rstrip('/')}/{name}/*/{MANIFEST}")
        except Exception as error:  # every file system of fsspec raises its own
            raise StoreFault(f"{self._url} cannot be read: {error}") from error
        pairs = [tuple(path.split("/")[-3:-1]) for path in paths]
        return [(model, version) for model, version in pairs if is_word(model) and is_word(version)]

    def _read(self, path: str) -> bytes:
        try:
            content: bytes = self._files.cat_file(f"{self._root.rstrip('/')}/{path}")
        except FileNotFoundError as error:
            raise NotFound(f"{path} is not in the store", field="version") from error
        except Exception as error:  # every file system of fsspec raises its own
            raise StoreFault(f"{self._url}/{path} cannot be read: {error}") from error
        return content


def _decode(content: bytes, version: str) -> Manifest:
    try:
        return msgspec.json.decode(content, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ManifestFault(f"{version}: {MANIFEST}: {error}") from error
