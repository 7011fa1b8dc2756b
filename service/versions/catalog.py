"""The catalog: which bundles lie in the store. Reads names and manifests, never weights."""

from __future__ import annotations

from pathlib import Path

from service.bundle import MANIFEST, Bundle
from service.errors import ManifestFault, NotFound


class Catalog:
    """A folder `store/<name>/<version>/`; a version without a manifest does not exist."""

    def __init__(self, store: Path) -> None:
        self.store = store

    def names(self) -> list[str]:
        """Models that have at least one version, by name."""
        return sorted({path.parent.parent.name for path in self.store.glob(f"*/*/{MANIFEST}")})

    def versions(self, name: str) -> list[str]:
        """Versions of one model, the newest first by the time in their manifests.

        A bundle whose manifest cannot be read is not listed.
        """
        found = []
        for path in self.store.glob(f"*/*/{MANIFEST}"):
            if path.parent.parent.name == name:
                try:
                    manifest = Bundle.open(path.parent).manifest
                except ManifestFault:
                    continue
                found.append((manifest.created_at, manifest.version))
        return [version for _, version in sorted(found, reverse=True)]

    def open(self, name: str, version: str) -> Bundle:
        """One bundle by its words, never by a path; raises NotFound or ManifestFault."""
        if name not in self.names():
            raise NotFound(f"no model {name!r} in the store", field="model")
        folder = self.store / name / version
        if folder.parent != self.store / name or not (folder / MANIFEST).is_file():
            raise NotFound(f"model {name!r} has no version {version!r}", field="model")
        bundle = Bundle.open(folder)
        named = bundle.manifest.name, bundle.manifest.version
        if named != (name, version):
            raise ManifestFault(f"{name}/{version} holds the manifest of {'/'.join(named)}")
        return bundle
