"""What a process may take: /proc and control groups of both versions, from files of our own."""

from __future__ import annotations

from pathlib import Path

import pytest

from colibri.runtime.memory_limits import memory_limits, process_memory

GIB = 1 << 30
NO_LIMIT = "9223372036854771712"
MEMINFO = "MemTotal: 33554432 kB\nMemFree: 1048576 kB\nMemAvailable: 25165824 kB\nBuffers: 0 kB\nCached: 2097152 kB\n"


def system(root: Path, files: dict[str, str], *, group: str, mount: str) -> Path:
    """A root folder whose process is in `group`, with its tree mounted as `mount` says."""
    everything = {"proc/meminfo": MEMINFO, "proc/self/cgroup": group, "proc/self/mountinfo": mount} | files
    for name, text in everything.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def version_2(root: Path, files: dict[str, str], group: str = "0::/a/b", mount_root: str = "/") -> Path:
    return system(root, {f"sys/fs/cgroup/{name}": text for name, text in files.items()}, group=group,
                  mount=f"31 23 0:28 {mount_root} /sys/fs/cgroup rw - cgroup2 cgroup rw,nsdelegate")  # fmt: skip


def version_1(root: Path, files: dict[str, str], group: str = "4:memory:/a/b", mount_root: str = "/") -> Path:
    mounts = (
        "30 23 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
        f"31 23 0:28 {mount_root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
    )
    files = {f"sys/fs/cgroup/memory/{name}": text for name, text in files.items()}
    return system(root, files, group=f"5:cpu:/elsewhere\n{group}\n0::/", mount=mounts)


def free(root: Path) -> int:
    limits = memory_limits(root)
    assert limits is not None
    return limits.free


def test_a_machine_without_groups(tmp_path: Path) -> None:
    limits = memory_limits(system(tmp_path, {}, group="0::/", mount=""))
    assert limits is not None
    assert (limits.total, limits.available, limits.group, limits.free) == (32 * GIB, 24 * GIB, None, 24 * GIB)
    assert "this machine" in limits.reason


def test_an_old_kernel_without_mem_available(tmp_path: Path) -> None:
    system(tmp_path, {}, group="0::/", mount="")
    (tmp_path / "proc/meminfo").write_text("MemTotal: 4194304 kB\nMemFree: 1048576 kB\nCached: 2097152 kB\n")
    assert free(tmp_path) == 3 * GIB


def test_version_2(tmp_path: Path) -> None:
    """The group's 2 GiB count, not the 24 that /proc says are free; page cache is given back."""
    stat = f"anon 5\ninactive_file {GIB // 8}\nactive_file {GIB // 8}\n"
    files = {"a/b/memory.max": str(2 * GIB), "a/b/memory.current": str(GIB // 2), "a/b/memory.stat": stat}
    limits = memory_limits(version_2(tmp_path, files))
    assert limits is not None and limits.group is not None
    assert limits.free == 2 * GIB - GIB // 4
    assert limits.reason == limits.group.file == "/sys/fs/cgroup/a/b/memory.max"


@pytest.mark.parametrize("name", ["memory.max", "memory.high"])
@pytest.mark.parametrize("folder", ["", "a/", "a/b/"])
def test_version_2_takes_the_least_of_all_parents(tmp_path: Path, name: str, folder: str) -> None:
    files = {f"{f}memory.{n}": "max" for f in ("", "a/", "a/b/") for n in ("max", "high")}
    files |= {f"{f}memory.current": "4096" for f in ("", "a/", "a/b/")}
    files[f"{folder}{name}"] = str(GIB)
    assert free(version_2(tmp_path, files)) == GIB - 4096


def test_a_fuller_parent_with_a_higher_limit_wins(tmp_path: Path) -> None:
    files = {"a/memory.max": str(4 * GIB), "a/memory.current": str(4 * GIB - 10),
             "a/b/memory.max": str(GIB), "a/b/memory.current": "0"}  # fmt: skip
    assert free(version_2(tmp_path, files)) == 10


def test_a_full_group_leaves_nothing(tmp_path: Path) -> None:
    assert free(version_2(tmp_path, {"a/b/memory.max": "4096", "a/b/memory.current": "8192"})) == 0


def test_version_1(tmp_path: Path) -> None:
    files = {
        "memory.limit_in_bytes": NO_LIMIT, "memory.usage_in_bytes": str(20 * GIB),
        "a/memory.limit_in_bytes": str(2 * GIB), "a/memory.usage_in_bytes": str(GIB),
        "a/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB // 4}\ntotal_active_file {GIB // 4}",
        "a/b/memory.limit_in_bytes": NO_LIMIT, "a/b/memory.usage_in_bytes": str(GIB),
    }  # fmt: skip
    assert free(version_1(tmp_path, files)) == 2 * GIB - GIB // 2


def test_version_1_tells_the_limit_of_parents_that_cannot_be_seen(tmp_path: Path) -> None:
    files = {"memory.limit_in_bytes": NO_LIMIT, "memory.usage_in_bytes": "4096",
             "memory.stat": f"hierarchical_memory_limit {3 * GIB}"}  # fmt: skip
    assert free(version_1(tmp_path, files)) == 3 * GIB - 4096


@pytest.mark.parametrize("make", [version_1, version_2])
def test_a_container_sees_its_group_as_the_root(tmp_path: Path, make) -> None:
    limit, used = {
        version_1: ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        version_2: ("memory.max", "memory.current"),
    }[make]
    prefix = "4:memory:" if make is version_1 else "0::"
    files = {limit: "4096", used: "0", f"a/{limit}": "1", f"a/{used}": "0"}
    assert free(make(tmp_path, files, group=f"{prefix}/docker/xyz", mount_root="/docker/xyz")) == 4096
    assert free(make(tmp_path, files, group=f"{prefix}/docker/xyz/a", mount_root="/docker/xyz")) == 1
    # A group that is not below the mount, and one outside the namespace: the mount itself still counts.
    assert free(make(tmp_path, files, group=f"{prefix}/docker/xyzzy", mount_root="/docker/xyz")) == 4096
    assert free(make(tmp_path, files, group=f"{prefix}/../a", mount_root="/")) == 4096


def test_a_mount_with_a_blank_in_its_path(tmp_path: Path) -> None:
    mount = r"31 23 0:28 / /my\040groups rw - cgroup2 cgroup rw"
    files = {"my groups/a/memory.max": "8192", "my groups/a/memory.current": "0"}
    assert free(system(tmp_path, files, group="0::/a", mount=mount)) == 8192


@pytest.mark.parametrize("text", ["", "x", "-1", "1.5"])
def test_files_that_hold_no_number_are_no_limit(tmp_path: Path, text: str) -> None:
    assert free(version_2(tmp_path, {"a/b/memory.max": text, "a/b/memory.current": "1"})) == 24 * GIB


def test_without_proc(tmp_path: Path) -> None:
    assert memory_limits(tmp_path) is None
    assert process_memory(tmp_path) is None


def test_this_process() -> None:
    memory, limits = process_memory(), memory_limits()
    assert memory is not None and limits is not None
    assert 5 << 20 < memory.resident <= memory.peak < limits.total
    held = bytearray(64 << 20)
    held[::4096] = b"x" * len(held[::4096])
    more = process_memory()
    assert more is not None
    assert more.resident >= memory.resident + (60 << 20)
