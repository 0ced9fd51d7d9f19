"""What the kernel counts of this process, and the limits (`ulimit`) that it sets on that."""

from __future__ import annotations

import ctypes
import math
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


_least_untouched_bytes: dict[str, int] = {}


def untouched_bytes(limit: ProcessLimit) -> int:
    """What counts against a limit without being held: address space that was never touched, or is free again.

    The C library keeps the addresses of freed blocks and uses them again, so that each trial seems to leave
    less. What was untouched is therefore taken to be the least that was ever seen.
    """
    now_bytes = max(limit.used_bytes - held_bytes(), 0)
    least_bytes = min(now_bytes, _least_untouched_bytes.get(limit.name, now_bytes))
    _least_untouched_bytes[limit.name] = least_bytes
    return least_bytes


class _MallocInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc 2.33 and newer."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
            "keepcost",
        )
    )  # fmt: skip


_least_beside_bytes = math.inf


def held_bytes() -> int:
    """The resident set, without what the C library has come to keep of blocks that were freed.

    For each thread that allocated it keeps up to 64 MiB that no call returns, and each search ends some
    threads. So a search would find less room than the one before it. What is resident beside allocated
    blocks and files is therefore taken to be the least that was ever seen.
    """
    global _least_beside_bytes
    resident_bytes = status_bytes("VmRSS")
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return resident_bytes
    libc.mallinfo2.restype = _MallocInfo
    info = libc.mallinfo2()
    used_bytes: int = info.uordblks + info.hblkhd + status_bytes("RssFile") + status_bytes("RssShmem")
    _least_beside_bytes = min(_least_beside_bytes, resident_bytes - used_bytes)
    return min(resident_bytes, used_bytes + int(_least_beside_bytes))
