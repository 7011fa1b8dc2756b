"""The item feed: replaces the item tables in use when a file changes, without a model swap."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from weakref import WeakKeyDictionary

from service.encoding.items import ItemTable
from service.errors import ManifestFault
from service.versions.loaded import LoadedVersion
from service.versions.roles import Versions

_log = logging.getLogger("ranker.items")


async def follow_items(path: Path, versions: Versions, *, every_s: float) -> None:
    """Look at `path` for ever, for every loaded version; writers replace it by rename.

    A table that cannot be read, or is of another row space, is refused and logged; the
    one in use stays.
    """
    seen: WeakKeyDictionary[LoadedVersion, tuple[int, int]] = WeakKeyDictionary()
    while True:
        for version in versions.held():
            try:
                stat = await asyncio.to_thread(path.stat)
                found = stat.st_mtime_ns, stat.st_size
                if seen.get(version) != found:
                    seen[version] = found
                    await _replace(path, version)
            except (OSError, ManifestFault) as error:
                _log.warning("item table refused", extra={"reason": str(error)})
        await asyncio.sleep(every_s)


async def _replace(path: Path, version: LoadedVersion) -> None:
    content = await asyncio.to_thread(path.read_bytes)
    version.table = await asyncio.to_thread(ItemTable.from_bytes, content, version.space)
    _log.info("item table replaced", extra={"items": len(version.table)})
