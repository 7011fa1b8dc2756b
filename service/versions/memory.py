"""Memory: what is free for one more version, and what a bundle will need."""

from __future__ import annotations

from pathlib import Path

from service.bundle import Manifest

_FILE_TIMES = 4
"""Resident bytes a byte of the loaded files, at most; 3.1 was measured for the shop bundle."""
_FIXED_BYTES = 32 << 20
"""Engine arena and threads."""
_UNLIMITED = 1 << 60


def needed_bytes(manifest: Manifest) -> int:
    """The most that loading a bundle is taken to need."""
    graph = next(iter(manifest.graphs.values()))
    loaded = sum(manifest.files[name].size_bytes for name in (graph, manifest.item_table))
    return _FIXED_BYTES + _FILE_TIMES * loaded


def headroom_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process may still take: of the machine, and of each cgroup around it."""
    return min(_free_of_machine(proc), _free_of_cgroups(proc, cgroups))


def _free_of_machine(proc: Path) -> int:
    try:
        lines = (proc / "meminfo").read_text().splitlines()
    except OSError:
        return _UNLIMITED
    sizes = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(sizes["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in sizes else _UNLIMITED


def _free_of_cgroups(proc: Path, cgroups: Path) -> int:
    free = _UNLIMITED
    for folder, limit, usage, cache in _folders(proc, cgroups):
        while folder != cgroups and folder.is_relative_to(cgroups):
            free = min(free, _free_of(folder, limit, usage, cache))
            folder = folder.parent  # noqa: PLW2901  from the innermost group outwards
        free = min(free, _free_of(folder, limit, usage, cache))
    return free


def _folders(proc: Path, cgroups: Path) -> list[tuple[Path, str, str, str]]:
    """This process's groups, with the names of their files: version 2, or 1's memory controller."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            folder = cgroups / path.lstrip("/")
            found.append((folder, "memory.max", "memory.current", "inactive_file"))
        elif "memory" in controllers.split(","):
            folder = cgroups / "memory" / path.lstrip("/")
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            found.append((folder, *names))
    return found


def _free_of(folder: Path, limit: str, usage: str, cache: str) -> int:
    """Free bytes of one group, `_UNLIMITED` where it sets no limit; idle page cache is free."""
    try:
        text = (folder / limit).read_text().strip()
        if text == "max":
            return _UNLIMITED
        used = int((folder / usage).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        return _UNLIMITED
    return max(0, int(text) - used + int(stat.get(cache, 0)))
