"""How much memory this process may still take: what the machine has free, and what its control groups leave."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Version 1 shows "no limit" as the largest multiple of a page below 2^63.
_NO_LIMIT = 1 << 60
# Page cache is counted as used, and given back before a process is killed.
_GIVEN_BACK = ("inactive_file", "active_file")


@dataclass(frozen=True)
class GroupLimit:
    """A control group that bounds memory, for all processes in it together."""

    file: str  # which sets the limit
    limit: int
    used: int  # page cache left out

    @property
    def free(self) -> int:
        return max(0, self.limit - self.used)


@dataclass(frozen=True)
class MemoryLimits:
    """Bytes; `group` is the tightest of this process's control groups and all their parents, if one has a limit."""

    total: int
    available: int
    group: GroupLimit | None

    @property
    def free(self) -> int:
        """What can be taken besides what this process has already."""
        return self.available if self.group is None else min(self.available, self.group.free)

    @property
    def reason(self) -> str:
        """What bounds `free`, for messages."""
        if self.group is None or self.available <= self.group.free:
            return "the memory available on this machine"
        return self.group.file


@dataclass(frozen=True)
class ProcessMemory:
    """Bytes of this process in memory, now and at most so far."""

    resident: int
    peak: int


def process_memory(root: Path = Path("/")) -> ProcessMemory | None:
    """VmRSS and VmHWM of this process; None where /proc does not tell."""
    fields = _kibibytes(root / "proc/self/status")
    if "VmRSS" not in fields or "VmHWM" not in fields:
        return None
    return ProcessMemory(fields["VmRSS"], fields["VmHWM"])


def memory_limits(root: Path = Path("/")) -> MemoryLimits | None:
    """What this process may take, from /proc and the control groups (versions 1 and 2); None where /proc does not
    tell. `root` stands for the root folder, for tests.
    """
    fields = _kibibytes(root / "proc/meminfo")
    if "MemTotal" not in fields:
        return None
    free_pages = fields.get("MemFree", 0) + fields.get("Buffers", 0) + fields.get("Cached", 0)
    groups = [group for version in (2, 1) for group in _group_limits(root, version)]
    return MemoryLimits(
        fields["MemTotal"],
        fields.get("MemAvailable", free_pages),
        min(groups, key=lambda group: group.free, default=None),
    )


def _group_limits(root: Path, version: int) -> Iterator[GroupLimit]:
    group = _own_group(root, version)
    for mount, mount_root in _mounts(root, version):
        # A container sees its own group as the root of the mount; a group outside our namespace cannot be read.
        inside = group == mount_root or group.startswith(mount_root.rstrip("/") + "/")
        below = group[len(mount_root.rstrip("/")) :] if inside and "/.." not in group else ""
        top = root / mount.lstrip("/")
        folder = top / below.strip("/")
        while True:
            yield from _folder_limits(folder, root, version)
            if folder == top:
                break
            folder = folder.parent


def _folder_limits(folder: Path, root: Path, version: int) -> Iterator[GroupLimit]:
    names, usage = {
        1: (("memory.limit_in_bytes",), "memory.usage_in_bytes"),
        2: (("memory.max", "memory.high"), "memory.current"),
    }[version]
    limits = {name: _number(folder / name) for name in names}
    statistics = _statistics(folder / "memory.stat")
    if version == 1:
        # The parents of a container's group, which it cannot see.
        limits["memory.stat"] = statistics.get("hierarchical_memory_limit")
    used = _number(folder / usage)
    for name, limit in limits.items():
        if limit is not None and used is not None and limit < _NO_LIMIT:
            prefix = "total_" if version == 1 else ""
            cache = sum(statistics.get(prefix + key, 0) for key in _GIVEN_BACK)
            yield GroupLimit(f"/{(folder / name).relative_to(root)}", limit, max(0, used - cache))


def _own_group(root: Path, version: int) -> str:
    """This process's group in the tree of version 2, or in that of version 1's memory controller."""
    for line in _lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if (controllers == "") if version == 2 else ("memory" in controllers.split(",")):
            return group
    return "/"


def _mounts(root: Path, version: int) -> Iterator[tuple[str, str]]:
    """(where it is mounted, which group is there) of each mounted tree."""
    for line in _lines(root / "proc/self/mountinfo"):
        front, _, back = line.partition(" - ")
        fields, kind = front.split(" "), back.split(" ")
        if len(fields) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup2" if version == 2 else kind[0] == "cgroup" and "memory" in kind[2].split(","):
            yield _plain(fields[4]), _plain(fields[3])


def _plain(path: str) -> str:
    """Mountinfo writes space, tab, newline and backslash as three octal digits."""
    for character in (" ", "\t", "\n", "\\"):
        path = path.replace(f"\\{ord(character):03o}", character)
    return path


def _statistics(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in _lines(path))
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def _number(path: Path) -> int | None:
    """The number in a file; None for "max", or no such file."""
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdecimal() else None


def _kibibytes(path: Path) -> dict[str, int]:
    """Lines "Name:  123 kB" as bytes."""
    fields = {}
    for line in _lines(path):
        name, _, value = line.partition(":")
        words = value.split()
        if len(words) == 2 and words[1] == "kB" and words[0].isdecimal():
            fields[name] = int(words[0]) << 10
    return fields


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        return []
