"""Memory of the host: usage of this process, a cap on it, and available memory."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from linnaeus.autobatch.memory.interface import DeviceMemory
from linnaeus.autobatch.memory.oom import is_error_of_onednn, is_out_of_memory
from linnaeus.autobatch.memory.storages import StorageTracer

PROCESS = Path("/proc/self")
CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
"""Names the cgroups of this process, one line `number:controllers:path` for each hierarchy."""

_V1_FILES = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2_FILES = ("memory.max", "memory.current", "inactive_file")
_MIB = 1024**2
_LARGE_BYTES = 16 * _MIB
"""The resident set is read after an allocation of this size."""
_MARGIN = 1 / 32
"""The resident set counts where it exceeds the count by this fraction. Small allocations of libraries and
Python stay below it, and differ from run to run."""
_STEP_BYTES = 4 * _MIB
"""A resident set that counts is rounded up to a multiple of this, so that two runs agree."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_IN_TRIALS = _MIB // 8, _MIB // 8
"""glibc's thresholds in trials: freed memory at the end of the heap, and freed blocks of this size, return to
the system. Gaps between blocks do not count then, and two trials of a size peak alike."""
_IN_TRAINING = 64 * _MIB, 32 * _MIB
"""The thresholds that glibc itself reaches. Steps take about half the time, because memory is used again."""


class CpuMemory(DeviceMemory):
    """Host memory of this process: its memory before, and the tensors that trials allocate. Linux only.

    Tensors are counted as operations allocate and free them, so that the peak of a step is the same every
    time. An operation that would take the count above the cap raises, and so does a large allocation where
    the resident set is above the cap.

    The high-water mark of the resident set counts where it exceeds the count by more than `_MARGIN`: then
    kernels, compiled code or other threads allocate memory that no operation returns. Pages of files, such as
    libraries, do not count as growth: where memory is short, the system drops them and reads them again.

    Under a cap, glibc returns freed blocks to the system (see `_IN_TRIALS`). `MALLOC_MMAP_THRESHOLD_` in the
    environment is kept.

    Args:
        neighbours: process ids of all ranks on this machine, among whom its memory is divided.

    Raises:
        OSError, LookupError: the system does not tell the resident set or its high-water mark.
    """

    def __init__(self, device: torch.device, neighbours: Sequence[int] = ()) -> None:
        self.device = device
        self._num_ranks = int(
            os.environ.get("LOCAL_WORLD_SIZE", "1")
        )  # of torchrun; others do not set it
        self._rank_pids: Sequence[int] = ()
        if len(neighbours) >= max(self._num_ranks, 2):
            self._num_ranks, self._rank_pids = len(neighbours), neighbours
        self.total_bytes = min(pool.total_bytes for pool in _pools()) // self._num_ranks
        self._tracer = StorageTracer(self._allocated, self._freed, self._requested)
        self._count_lock = threading.RLock()  # garbage collection frees tensors in any thread
        self._allocated_bytes = self._live_bytes = self._peak_bytes = (
            0  # of the tensors that the tracer has seen
        )
        self._cap_bytes, self._num_refused = math.inf, 0
        self.settle()

    def settle(self, excluded_bytes: int = 0) -> None:
        """See `DeviceMemory.settle`."""
        self._base_bytes = status_bytes("VmRSS") - self._live_bytes - excluded_bytes
        self.reset_peak()

    def budget(self, fraction: float, limit_bytes: int | None) -> int:
        """See `DeviceMemory.budget`. The ranks of one host divide its memory evenly.

        `limit_bytes` limits this process alone: memory of other processes is not subtracted from it.
        """
        ours = _resident_bytes_of_ranks(self._num_ranks, self._rank_pids)
        budgets = [
            (fraction * pool.total_bytes - (pool.used_bytes - ours)) / self._num_ranks
            for pool in _pools()
        ]
        if limit_bytes is not None:
            budgets.append(fraction * limit_bytes)
        return int(min(budgets))

    def clean(self) -> None:
        """Collect garbage and return free pages to the system."""
        super().clean()
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):  # glibc
            libc.malloc_trim(0)

    def refused(self, error: BaseException) -> bool:
        """See `DeviceMemory.refused`; also an error of oneDNN, which does not name its cause."""
        return is_out_of_memory(error) or is_error_of_onednn(error)

    def reset_peak(self) -> None:
        """Reset the peak to the memory in use now."""
        self._peak_bytes, self._held_at_reset = self._live_bytes, self.in_use()
        self._resident_at_reset = _without_files("VmRSS")
        (PROCESS / "clear_refs").write_text("5")  # resets VmHWM

    def peak(self) -> int:
        """Most bytes in use since `reset_peak`."""
        return self._held("VmHWM", self._base_bytes + self._peak_bytes)

    def allocated_bytes(self) -> int:
        """See `DeviceMemory.allocated_bytes`."""
        return self._allocated_bytes

    def num_retries(self) -> int:
        """Number of requests that the cap refused. A step may catch the error and continue."""
        return self._num_refused

    def in_use(self) -> int:
        """Memory of the process when `settle` was called, plus the tensors that trials allocated since."""
        return self._base_bytes + self._live_bytes

    @contextlib.contextmanager
    def cap(self, bytes_: int) -> Iterator[None]:
        """Fail operations of this thread that take the process above `bytes_`, or above the free memory."""
        outer_bytes = self._cap_bytes
        available_bytes = available_host_bytes() // self._num_ranks
        self._cap_bytes = min(bytes_, outer_bytes, self.in_use() + available_bytes)
        _set_thresholds(*_IN_TRIALS)
        try:
            with self._tracer:
                yield
        finally:
            self._cap_bytes = outer_bytes
            if outer_bytes == math.inf:
                _set_thresholds(*_IN_TRAINING)

    def _held(self, name: str, counted_bytes: int) -> int:
        """Return the count, or `VmRSS` or `VmHWM` where that is larger by more than `_MARGIN`."""
        grown_bytes = _without_files(name) - self._resident_at_reset
        resident_bytes = self._held_at_reset + math.ceil(grown_bytes / _STEP_BYTES) * _STEP_BYTES
        return resident_bytes if resident_bytes > (1 + _MARGIN) * counted_bytes else counted_bytes

    def _requested(self, num_bytes: int) -> None:
        self._check(self.in_use() + num_bytes)

    def _allocated(self, number: int, num_bytes: int) -> None:
        with self._count_lock:
            self._live_bytes += num_bytes
            self._allocated_bytes += num_bytes
            self._peak_bytes = max(self._peak_bytes, self._live_bytes)
        held_bytes = self.in_use()
        self._check(self._held("VmRSS", held_bytes) if num_bytes >= _LARGE_BYTES else held_bytes)

    def _check(self, held_bytes: int) -> None:
        if held_bytes > self._cap_bytes:
            self._num_refused += 1
            raise MemoryError(
                f"out of memory: the process would hold {held_bytes / _MIB:.0f} MiB, "
                f"its cap is {self._cap_bytes / _MIB:.0f} MiB"
            )

    def _freed(self, number: int, num_bytes: int) -> None:
        with self._count_lock:
            self._live_bytes -= num_bytes


def _set_thresholds(trim_bytes: int, mmap_bytes: int) -> None:
    """Set when glibc returns freed memory; do nothing with another C library or the user's own setting."""
    libc = ctypes.CDLL(None)
    users = {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"}
    if not users & os.environ.keys() and hasattr(libc, "mallopt"):
        libc.mallopt(_M_TRIM_THRESHOLD, trim_bytes)
        libc.mallopt(_M_MMAP_THRESHOLD, mmap_bytes)


def available_host_bytes() -> int:
    """Host memory that this process can still allocate: the least of the machine and its cgroups."""
    return max(0, min(pool.total_bytes - pool.used_bytes for pool in _pools()))


def status_bytes(name: str) -> int:
    """Return a line of `/proc/self/status`, in bytes."""
    for line in (PROCESS / "status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"{PROCESS}/status has no {name}")


def _without_files(name: str) -> int:
    """Return `VmRSS` or `VmHWM` without the pages of files that are resident now."""
    return status_bytes(name) - status_bytes("RssFile")


def _resident_bytes_of_ranks(num_ranks: int, pids: Sequence[int] = ()) -> int:
    """Resident set of this process and the other ranks: those given, else its siblings, as under torchrun."""
    if not pids:
        process = psutil.Process()
        parent = process.parent() if num_ranks > 1 else None
        pids = [rank.pid for rank in (parent.children() if parent else [process])]
    total_bytes = 0
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            total_bytes += psutil.Process(pid).memory_info().rss
    return total_bytes


class MemoryPool(NamedTuple):
    """Memory that this process allocates from: the machine's, or the limit of a cgroup.

    `used_bytes` are in use by all processes, without memory that the kernel can reclaim.
    """

    total_bytes: int
    used_bytes: int


def _pools() -> list[MemoryPool]:
    """The machine, and every cgroup around this process, of version 1 or 2, whose limit is below that."""
    machine = psutil.virtual_memory()
    pools = [MemoryPool(machine.total, machine.total - machine.available)]
    lines = []
    with contextlib.suppress(OSError):
        lines = MEMBERSHIP.read_text(
            errors="surrogateescape"
        ).splitlines()  # as Python decodes file names
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, separator, path = rest.partition(":")
        if separator and not controllers:
            base, files = CGROUPS, _V2_FILES
        elif "memory" in controllers.split(","):
            base, files = CGROUPS / "memory", _V1_FILES
        else:
            continue
        folder = base / path.strip("/")
        folders = (folder, *folder.parents)
        found = (_read_pool(folder, *files) for folder in folders[: folders.index(base) + 1])
        pools += [pool for pool in found if pool is not None and pool.total_bytes < machine.total]
    return pools


def _read_pool(
    folder: Path, limit_file: str, usage_file: str, reclaimable: str
) -> MemoryPool | None:
    """Return the pool of one cgroup; None if it has no limit or cannot be read."""
    try:
        limit_bytes = int((folder / limit_file).read_text())  # "max" means no limit
        used_bytes = int((folder / usage_file).read_text())
    except (OSError, ValueError):
        return None
    with contextlib.suppress(OSError, ValueError, KeyError):
        lines = (folder / "memory.stat").read_text().splitlines()
        used_bytes -= int(dict(line.split() for line in lines)[reclaimable])
    return MemoryPool(limit_bytes, used_bytes)
