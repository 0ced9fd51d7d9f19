"""Memory limits and usage of the cgroups (versions 1 and 2) that contain this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
"""Names the cgroups of this process, one line `number:controllers:path` for each hierarchy."""

_V1_FILES = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2_FILES = ("memory.max", "memory.current", "inactive_file")


class MemoryPool(NamedTuple):
    """Memory that this process allocates from: the machine's, or what a cgroup's limit allows.

    Attributes:
        total_bytes: size of the pool.
        used_bytes: in use by all processes, without what the kernel can reclaim.
    """

    total_bytes: int
    used_bytes: int


def limited_cgroups(machine_bytes: int) -> Iterator[MemoryPool]:
    """The cgroups around this process whose limit is below the machine's memory, innermost first."""
    try:
        lines = MEMBERSHIP.read_text(errors="surrogateescape").splitlines()  # as Python decodes file names
    except OSError:
        return
    for line in lines:
        _, separator, controllers_and_path = line.partition(":")
        controllers, _, path = controllers_and_path.partition(":")
        if separator and controllers == "":
            base, files = ROOT, _V2_FILES
        elif "memory" in controllers.split(","):
            base, files = ROOT / "memory", _V1_FILES
        else:
            continue
        folder = base / path.strip("/")
        folders = (folder, *folder.parents)
        for folder in folders[: folders.index(base) + 1]:
            pool = _read_pool(folder, *files)
            if pool is not None and pool.total_bytes < machine_bytes:
                yield pool


def _read_pool(folder: Path, limit_file: str, usage_file: str, reclaimable: str) -> MemoryPool | None:
    """The pool of one cgroup; None where it has no limit or cannot be read."""
    try:
        limit_bytes = int((folder / limit_file).read_text())  # "max" means no limit
        used_bytes = int((folder / usage_file).read_text())
    except (OSError, ValueError):
        return None
    return MemoryPool(limit_bytes, used_bytes - _stat(folder / "memory.stat", reclaimable))


def _stat(file: Path, name: str) -> int:
    """One value of a file with lines `name bytes`; 0 where it cannot be read."""
    try:
        return int(dict(line.split() for line in file.read_text().splitlines())[name])
    except (OSError, ValueError, KeyError):
        return 0
