"""Memory of the host: what this process holds, a cap on it, and what is available."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import math
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import torch

from linnaeus.autobatch.memory.cgroups import MemoryPool, limited_cgroups
from linnaeus.autobatch.memory.interface import DeviceMemory
from linnaeus.autobatch.memory.oom import is_ambiguous, is_out_of_memory
from linnaeus.autobatch.memory.process import held_bytes, process_limits, status_bytes, untouched_bytes
from linnaeus.autobatch.memory.storages import StorageTracer, num_compiled_graphs
from linnaeus.autobatch.memory.worker import WorkerThread

logger = logging.getLogger("linnaeus.autobatch")
_MIB = 1024**2
_MARGIN_BYTES = 64 * _MIB
_OVERHEAD = 2
"""The C library keeps freed blocks: processes grew by up to 1.7 times what their tensors grew by."""
_UNSEEN = 4
"""A process that grows by more than so many times what its tensors grew by allocates unseen. Without that, it
grew by up to 3 times in a process that had trained other models before."""
_KERNEL_BYTES = 4 * _MIB  # more than the code of any single oneDNN kernel
_LITTLE = 16
"""Memory runs short where less than this part of it (a sixteenth) is left, or less than `_MARGIN_BYTES`."""


class CpuMemory(WorkerThread, DeviceMemory):
    """Host memory of this process: what it held before, and the tensors that trials allocate. Linux only.

    Tensors are counted when operations allocate and free them, so that the peak of a step is exact and the
    same every time. What the C library keeps for later (see `_OVERHEAD`) is not counted: it depends on the
    order of all earlier allocations. The cap is therefore twofold: an operation that takes the count above it
    raises, and the system refuses to let the process grow beyond `_OVERHEAD` times the growth that the cap
    allows, or beyond what is available.

    Where memory is allocated unseen, the peak is that of the resident set: by code that `torch.compile` has
    generated, or in a thread that the step has started, which shows in a process that grows far beyond the
    count.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._set_ranks(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        self._rank_pids: Sequence[int] = ()
        self._tracer = StorageTracer(self._allocated, self._freed)
        self._count_lock = threading.RLock()  # garbage collection frees tensors in any thread
        self._live_bytes = self._peak_bytes = 0  # of the tensors that the tracer has seen
        self._cap_bytes = math.inf
        self._headroom_bytes = math.inf  # growth of the process that the system allows under the cap
        self._virtual_bytes = 0  # VmPeak when the cap was set
        self._live_at_reset = self._resident_at_reset = self._mapped_at_reset = 0
        self._grows_unseen = False
        self.settle()
        self._is_warm = False  # the first steps load libraries and make kernels

    def share(self, pids: Sequence[int]) -> None:
        """See `DeviceMemory.share`. torchrun says how many there are; other launchers do not."""
        if len(pids) > 1 and len(pids) >= self._num_ranks:
            self._rank_pids = tuple(pids)
            self._set_ranks(len(pids))

    def _set_ranks(self, num_ranks: int) -> None:
        """Set the number of ranks that divide the memory, and the total that follows from it."""
        self._num_ranks = num_ranks
        self.total_bytes, self.total_name = min(pool.total_bytes for pool in _pools()) // num_ranks, ""
        for limit in process_limits():
            if limit.total_bytes < self.total_bytes:
                self.total_bytes, self.total_name = limit.total_bytes, limit.name

    def settle(self, excluded_bytes: int = 0) -> None:
        """See `DeviceMemory.settle`."""
        self._base_bytes = held_bytes() - self._live_bytes - excluded_bytes
        self._is_warm = True

    def budget(self, fraction: float, limit_bytes: int | None) -> int:
        """See `DeviceMemory.budget`. The ranks of one host divide its memory evenly.

        `limit_bytes` limits this process alone: what other processes use is not subtracted from it. A limit
        of the system on this process (`ulimit`) counts virtual memory, of which some was never touched.
        """
        ours = _resident_bytes_of_ranks(self._num_ranks, self._rank_pids)
        budgets = [
            (fraction * pool.total_bytes - (pool.used_bytes - ours)) / self._num_ranks for pool in _pools()
        ]
        budgets += [fraction * limit.total_bytes - untouched_bytes(limit) for limit in process_limits()]
        if limit_bytes is not None:
            budgets.append(fraction * limit_bytes)
        return int(min(budgets))

    def clean(self) -> None:
        """Collect garbage and return free pages to the system."""
        gc.collect()
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):  # glibc
            libc.malloc_trim(0)

    def reset_peak(self) -> None:
        """Set the peak to what is in use now."""
        self._live_at_reset = self._peak_bytes = self._live_bytes
        self._resident_at_reset = status_bytes("VmRSS")
        self._mapped_at_reset = _file_bytes()
        Path("/proc/self/clear_refs").write_text("5")  # the kernel's high-water mark of the resident set

    def peak(self) -> int:
        """Most bytes in use since `reset_peak`."""
        grown_bytes = status_bytes("VmHWM") - self._resident_at_reset
        self._compare_with_count(grown_bytes - max(_file_bytes() - self._mapped_at_reset, 0))
        peak_bytes = self._peak_bytes
        if num_compiled_graphs() or self._grows_unseen:
            peak_bytes = max(peak_bytes, self._live_at_reset + grown_bytes)
        return self._base_bytes + peak_bytes

    def _compare_with_count(self, grown_bytes: int) -> None:
        """Notice that the process has grown far beyond the tensors counted; says so once."""
        counted_bytes = self._peak_bytes - self._live_at_reset
        is_far = grown_bytes > _UNSEEN * counted_bytes + _MARGIN_BYTES
        if is_far and self._is_warm and not self._grows_unseen and not num_compiled_graphs():
            self._grows_unseen = True
            logger.warning(
                "warning: the process grew by %.0f MiB and its tensors by %.0f MiB: something allocates "
                "unseen, such as a thread that the step starts; from now on the resident set is measured, "
                "which is less exact",
                grown_bytes / _MIB, counted_bytes / _MIB,
            )  # fmt: skip

    def in_use(self) -> int:
        """What the process held when `settle` was called, and the tensors that trials allocated since."""
        return self._base_bytes + self._live_bytes

    def refused(self, error: BaseException) -> bool:
        """See `DeviceMemory.refused`; also an ambiguous error, if memory had run short.

        Under a cap, the process had grown up to it: the operation that failed has freed its memory by now,
        hence the comparison with the peak. Without one, little is left while the error holds the step's
        tensors.
        """
        if not is_ambiguous(error):
            return is_out_of_memory(error)
        if math.isinf(self._headroom_bytes):
            return is_out_of_memory(error) or self._is_nearly_exhausted()
        grown_bytes = status_bytes("VmPeak") - self._virtual_bytes
        return is_out_of_memory(error) or grown_bytes + _KERNEL_BYTES > self._headroom_bytes

    def _is_nearly_exhausted(self) -> bool:
        """Whether the process is near a limit of its own, or the system has little left."""
        rooms = [(limit.total_bytes, limit.room_bytes) for limit in process_limits()]
        rooms += [(pool.total_bytes, pool.total_bytes - pool.used_bytes) for pool in _pools()]
        return any(
            room_bytes < max(_MARGIN_BYTES, total_bytes // _LITTLE) for total_bytes, room_bytes in rooms
        )

    @contextlib.contextmanager
    def cap(self, bytes_: int) -> Iterator[None]:
        """In this thread, an operation fails that takes the tensors above `bytes_`, or the process far above.

        The process may grow by `_OVERHEAD` times what the cap allows, and `_MARGIN_BYTES` further: small
        allocations inside libraries would otherwise fail as often as tensors do, and not every library
        survives that: oneDNN calls kernels that it had no memory to write.
        """
        import resource  # not on Windows

        before = resource.getrlimit(resource.RLIMIT_DATA)
        growth_bytes = max(bytes_ - self.in_use(), 0)
        if not num_compiled_graphs() and not self._grows_unseen:
            growth_bytes *= _OVERHEAD
        growth_bytes = min(growth_bytes, available_host_bytes() // self._num_ranks) + _MARGIN_BYTES
        outer = self._cap_bytes, self._headroom_bytes, self._virtual_bytes
        with _address_space_up_to_peak(), self._tracer:
            growth_bytes = min([growth_bytes, *(limit.room_bytes for limit in process_limits())])
            limit = status_bytes("VmData") + growth_bytes
            if before[0] != resource.RLIM_INFINITY:
                limit = min(limit, before[0])
            self._cap_bytes, self._headroom_bytes = min(bytes_, self._cap_bytes), growth_bytes
            self._virtual_bytes = status_bytes("VmPeak")
            resource.setrlimit(resource.RLIMIT_DATA, (limit, before[1]))
            try:
                yield
            finally:
                resource.setrlimit(resource.RLIMIT_DATA, before)
                self._cap_bytes, self._headroom_bytes, self._virtual_bytes = outer

    def _allocated(self, number: int, num_bytes: int) -> None:
        with self._count_lock:
            self._live_bytes += num_bytes
            self._peak_bytes = max(self._peak_bytes, self._live_bytes)
        if self.in_use() > self._cap_bytes:
            raise MemoryError(
                f"out of memory: the process holds {self.in_use() / _MIB:.0f} MiB, "
                f"its cap is {self._cap_bytes / _MIB:.0f} MiB"
            )

    def _freed(self, number: int, num_bytes: int) -> None:
        with self._count_lock:
            self._live_bytes -= num_bytes


def available_host_bytes() -> int:
    """Host memory that this process can still allocate: the least of the machine and its cgroups."""
    return max(0, min(pool.total_bytes - pool.used_bytes for pool in _pools()))


def _file_bytes() -> int:
    """Resident pages of files, such as the code of libraries, which are no data."""
    return status_bytes("RssFile")


def _address_space_up_to_peak() -> contextlib.AbstractContextManager[object]:
    """Reserve addresses until VmSize is above VmPeak: any growth then raises VmPeak."""
    missing_bytes = status_bytes("VmPeak") - status_bytes("VmSize") + mmap.PAGESIZE
    try:
        return mmap.mmap(-1, missing_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0)
    except OSError:  # addresses may be limited
        return contextlib.nullcontext()


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


def _pools() -> list[MemoryPool]:
    """The machine, and every cgroup around this process that has a limit."""
    machine = psutil.virtual_memory()
    return [MemoryPool(machine.total, machine.total - machine.available), *limited_cgroups(machine.total)]
