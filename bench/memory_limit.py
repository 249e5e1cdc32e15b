#!/usr/bin/env python3
"""Run a command in a memory control group of its own, page cache included: a big machine behaves like a small one.

    memory_limit.py 2GiB COMMAND [ARGUMENT]...

Needs root, or a memory controller (version 1 or 2) in which this user may make groups. Prints the peak on
standard error; the exit status is the command's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from colibri.errors import UsageError
from colibri.runtime.sizes import parse_size

ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Group:
    """A control group for one process and its children."""

    folder: Path
    limit: int

    def enter(self) -> None:
        """Move the calling process into the group: for `preexec_fn`."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def peak(self) -> int | None:
        """Bytes charged at most so far, page cache included; None where the kernel does not say."""
        for name in ("memory.max_usage_in_bytes", "memory.peak"):
            try:
                return int((self.folder / name).read_text())
            except OSError:
                continue
        return None

    def kills(self) -> int:
        """Processes that the kernel has ended because the limit was reached."""
        for name in ("memory.oom_control", "memory.events"):
            try:
                words = (self.folder / name).read_text().split()
            except OSError:
                continue
            if "oom_kill" in words:
                return int(words[words.index("oom_kill") + 1])
        return 0


@contextmanager
def memory_limit(limit: int) -> Iterator[Group]:
    """A group of `limit` bytes, removed at the end. SystemExit, with the reason, when none can be made."""
    first = (ROOT / "memory").is_dir()
    folder = (ROOT / "memory" if first else ROOT) / f"colibri-bench-{os.getpid()}"
    try:
        folder.mkdir(exist_ok=True)
        (folder / ("memory.limit_in_bytes" if first else "memory.max")).write_text(str(limit))
    except OSError as error:
        raise SystemExit(
            f"{error.filename}: {error.strerror}; a memory limit needs root, or a control group that this user may "
            "write (version 2: with `memory` in cgroup.subtree_control)"
        ) from None
    try:
        yield Group(folder, limit)
    finally:
        folder.rmdir()


def main() -> int:
    if len(sys.argv) < 3 or sys.argv[1].startswith("-"):
        print(__doc__)
        return 0 if {"-h", "--help"} & set(sys.argv[1:]) else 2
    try:
        limit = parse_size("the limit", sys.argv[1])
    except UsageError as error:
        raise SystemExit(f"memory_limit.py: {error}") from None
    with memory_limit(limit) as group:
        status = subprocess.run(sys.argv[2:], preexec_fn=group.enter, check=False).returncode
        print(f"peak {group.peak()} of {limit} bytes, {group.kills()} killed", file=sys.stderr)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
