"""What the kernel counts of this process, and the limits (`ulimit`) that it sets on that."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple


class ProcessLimit(NamedTuple):
    """A soft limit on the memory of this process alone.

    Attributes:
        name: of the limit, for messages.
        total_bytes: the limit.
        used_bytes: what counts against it now. It is virtual memory, touched or not.
    """

    name: str
    total_bytes: int
    used_bytes: int

    @property
    def room_bytes(self) -> int:
        """What the process may still allocate."""
        return max(self.total_bytes - self.used_bytes, 0)


def process_limits() -> list[ProcessLimit]:
    """The limits that are set: `ulimit -d` on private memory, `ulimit -v` on addresses. Linux only."""
    if sys.platform != "linux":
        return []
    import resource  # not on Windows

    kinds = (
        ("RLIMIT_DATA (ulimit -d)", resource.RLIMIT_DATA, "VmData"),
        ("RLIMIT_AS (ulimit -v)", resource.RLIMIT_AS, "VmSize"),
    )
    return [
        ProcessLimit(name, limit, status_bytes(line))
        for name, kind, line in kinds
        if (limit := resource.getrlimit(kind)[0]) != resource.RLIM_INFINITY
    ]


def status_bytes(name: str) -> int:
    """A line of `/proc/self/status`, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)
