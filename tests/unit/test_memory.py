from pathlib import Path

import pytest

from service.versions.memory import headroom_bytes

MIB = 1 << 20


def machine(tmp_path: Path, *, available_mib: int, cgroup: str) -> tuple[Path, Path]:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable: {available_mib * 1024} kB\n")
    (proc / "self/cgroup").write_text(cgroup)
    return proc, cgroups


def limit(folder: Path, files: tuple[str, str, str], limit: str, used: int, idle: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / files[0]).write_text(f"{limit}\n")
    (folder / files[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{files[2]} {idle}\n")


V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def test_the_tightest_group_counts_and_idle_pages_are_free(tmp_path: Path) -> None:
    proc, cgroups = machine(tmp_path, available_mib=900, cgroup="0::/pod/box\n")
    limit(cgroups / "pod/box", V2, "max", 0, 0)
    limit(cgroups / "pod", V2, str(500 * MIB), 450 * MIB, 30 * MIB)
    assert headroom_bytes(proc, cgroups) == 80 * MIB


def test_the_machine_counts_where_no_group_limits(tmp_path: Path) -> None:
    proc, cgroups = machine(tmp_path, available_mib=900, cgroup="0::/\n")
    assert headroom_bytes(proc, cgroups) == 900 * MIB


def test_the_first_version_of_groups_is_read_too(tmp_path: Path) -> None:
    proc, cgroups = machine(tmp_path, available_mib=900, cgroup="4:memory:/box\n1:cpu:/\n")
    limit(cgroups / "memory/box", V1, str(100 * MIB), 90 * MIB, 0)
    assert headroom_bytes(proc, cgroups) == 10 * MIB


def test_a_machine_that_says_nothing_limits_nothing(tmp_path: Path) -> None:
    assert headroom_bytes(tmp_path, tmp_path) > 1 << 50


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="Linux alone says so")
def test_this_machine_has_some() -> None:
    assert 0 < headroom_bytes() < 1 << 50
