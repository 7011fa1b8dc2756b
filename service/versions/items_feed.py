"""The item feed: replaces the primary's item table when a file changes, without a model swap."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from service.encoding.items import ItemTable
from service.errors import ManifestFault
from service.versions.loaded import LoadedVersion
from service.versions.roles import Versions

_log = logging.getLogger("ranker.items")


async def follow_items(path: Path, versions: Versions, *, every_s: float) -> None:
    """Look at `path` for ever; writers replace it by rename.

    A table that cannot be read, or is of another row space, is refused and logged; the
    one in use stays.
    """
    seen: tuple[int, int, str] | None = None
    while True:
        primary = versions.primary
        if primary is not None:
            try:
                stat = await asyncio.to_thread(path.stat)
                found = stat.st_mtime_ns, stat.st_size, primary.version
                if found != seen:
                    seen = found
                    await _replace(path, primary)
            except (OSError, ManifestFault) as error:
                _log.warning("item table refused", extra={"reason": str(error)})
        await asyncio.sleep(every_s)


async def _replace(path: Path, version: LoadedVersion) -> None:
    content = await asyncio.to_thread(path.read_bytes)
    version.table = await asyncio.to_thread(ItemTable.from_bytes, content, version.space)
    _log.info("item table replaced", extra={"items": len(version.table)})
