"""The catalog: which bundles lie in the store. Reads names and manifests, never weights."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from service.bundle import MANIFEST, Bundle, is_word
from service.errors import BundleFault, ManifestFault, NotFound


class Remote(Protocol):
    """A store elsewhere, of which bundles are copied into the catalog's folder."""

    def manifests(self, name: str) -> list[Bundle]:
        """Every bundle of a model there, opened for its manifest alone; raises StoreFault."""
        ...

    def names(self) -> list[str]:
        """Models there; raises StoreFault."""
        ...

    def fetch(self, name: str, version: str) -> None:
        """Copy one bundle here, its manifest last; raises BundleFault or NotFound."""
        ...


class Catalog:
    """A folder `store/<name>/<version>/`; a version without a manifest does not exist."""

    def __init__(self, store: Path, remote: Remote | None = None) -> None:
        self.store = store
        self.refused: dict[str, str] = {}
        """Folders whose manifest could not be read at the last look, and why."""
        self._remote = remote

    def names(self) -> list[str]:
        """Models that have at least one version, by name."""
        if self._remote is not None:
            return self._remote.names()
        return sorted({path.parent.parent.name for path in self.store.glob(f"*/*/{MANIFEST}")})

    def versions(self, name: str) -> list[str]:
        """Versions of one model, the newest first by the time in their manifests.

        A bundle whose manifest cannot be read is not listed.
        """
        bundles = self._local(name) if self._remote is None else self._remote.manifests(name)
        found = [(bundle.manifest.created_at, bundle.manifest.version) for bundle in bundles]
        return [version for _, version in sorted(found, reverse=True)]

    def _local(self, name: str) -> list[Bundle]:
        found = []
        self.refused = {}
        for path in self.store.glob(f"*/*/{MANIFEST}"):
            if path.parent.parent.name == name:
                try:
                    bundle = Bundle.open(path.parent)
                except BundleFault as error:
                    self.refused[path.parent.name] = str(error)
                    continue
                if (version := bundle.manifest.version) == path.parent.name:
                    found.append(bundle)
                else:
                    self.refused[path.parent.name] = f"its manifest is that of {version}"
        return found

    def open(self, name: str, version: str) -> Bundle:
        """One bundle by its words, never by a path; raises NotFound or BundleFault.

        A bundle of a remote store is copied first, so call it off the loop.
        """
        if not is_word(name) or not is_word(version):
            raise NotFound(f"no version {name!r}/{version!r} in the store", field="version")
        folder = self.store / name / version
        if self._remote is not None and not (folder / MANIFEST).is_file():
            self._remote.fetch(name, version)
        if not (folder / MANIFEST).is_file():
            what = f"model {name!r} has no version {version!r}"
            raise NotFound(f"{what} in the store", field="version")
        if folder.resolve() != self.store.resolve() / name / version:
            raise ManifestFault(f"{name}/{version} is a link that leaves its place")
        bundle = Bundle.open(folder)
        named = bundle.manifest.name, bundle.manifest.version
        if named != (name, version):
            raise ManifestFault(f"{name}/{version} holds the manifest of {'/'.join(named)}")
        return bundle
