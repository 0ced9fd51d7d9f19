"""Memory of the host: what this process holds, a cap on it, and what is available."""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import gc
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from linnaeus.autobatch.memory.interface import DeviceMemory, T
from linnaeus.autobatch.memory.oom import is_ambiguous, is_out_of_memory
from linnaeus.autobatch.memory.storages import StorageTracer, num_compiled_graphs

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
"""Names the cgroups of this process, one line `number:controllers:path` for each hierarchy."""

_V1_FILES = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2_FILES = ("memory.max", "memory.current", "inactive_file")
_MIB = 1024**2
_MARGIN_BYTES = 64 * _MIB
_OVERHEAD = 2
"""The C library keeps freed blocks: processes grew by up to 1.7 times what their tensors grew by."""


class CpuMemory(DeviceMemory):
    """Host memory of this process: what it held before, and the tensors that trials allocate. Linux only.

    Tensors are counted when operations allocate and free them, so that the peak of a step is exact and the
    same every time. Not counted: what the C library keeps for later (see `_OVERHEAD`), which depends on the
    order of all earlier allocations, and what a thread allocates that the step has started. The cap is
    therefore twofold: an operation that takes the count above it raises, and the system refuses to let the
    process grow beyond `_OVERHEAD` times the growth that the cap allows, or beyond what is available.

    Code that `torch.compile` has generated allocates unseen: with it, the peak is that of the resident set.

    Args:
        neighbours: process ids of all ranks on this machine, among whom its memory is divided.
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
        self._tracer = StorageTracer(self._allocated, self._freed)
        self._count_lock = threading.RLock()  # garbage collection frees tensors in any thread
        self._allocated_bytes = self._live_bytes = self._peak_bytes = (
            0  # of the tensors that the tracer has seen
        )
        self._cap_bytes = math.inf
        self._live_at_reset = self._resident_at_reset = 0
        self.settle()

    def settle(self, excluded_bytes: int = 0) -> None:
        """See `DeviceMemory.settle`."""
        self._base_bytes = held_bytes() - self._live_bytes - excluded_bytes

    def budget(self, fraction: float, limit_bytes: int | None) -> int:
        """See `DeviceMemory.budget`. The ranks of one host divide its memory evenly.

        `limit_bytes` limits this process alone: what other processes use is not subtracted from it.
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
        gc.collect()
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):  # glibc
            libc.malloc_trim(0)

    def refused(self, error: BaseException) -> bool:
        """See `DeviceMemory.refused`; where oneDNN has no memory, it only says that it could not do it."""
        return is_out_of_memory(error) or is_ambiguous(error)

    def reset_peak(self) -> None:
        """Set the peak to what is in use now."""
        self._live_at_reset = self._peak_bytes = self._live_bytes
        self._resident_at_reset = status_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text(
            "5"
        )  # the kernel's high-water mark of the resident set

    def peak(self) -> int:
        """Most bytes in use since `reset_peak`."""
        peak_bytes = self._peak_bytes
        if num_compiled_graphs():
            grown_bytes = status_bytes("VmHWM") - self._resident_at_reset
            peak_bytes = max(peak_bytes, self._live_at_reset + grown_bytes)
        return self._base_bytes + peak_bytes

    def allocated_bytes(self) -> int:
        """See `DeviceMemory.allocated_bytes`."""
        return self._allocated_bytes

    def in_use(self) -> int:
        """What the process held when `settle` was called, and the tensors that trials allocated since."""
        return self._base_bytes + self._live_bytes

    @contextlib.contextmanager
    def cap(self, bytes_: int) -> Iterator[None]:
        """In this thread, an operation fails that takes the tensors above `bytes_`, or the process far above.

        The process may grow by `_OVERHEAD` times what the cap allows, and `_MARGIN_BYTES` further: small
        allocations inside libraries would otherwise fail as often as tensors do, and not every library
        survives that: oneDNN calls kernels that it had no memory to write.
        """
        import resource  # not on Windows

        before, outer_bytes = resource.getrlimit(resource.RLIMIT_DATA), self._cap_bytes
        growth_bytes = max(bytes_ - self.in_use(), 0) * (1 if num_compiled_graphs() else _OVERHEAD)
        growth_bytes = min(growth_bytes, available_host_bytes() // self._num_ranks) + _MARGIN_BYTES
        limit_bytes = status_bytes("VmData") + growth_bytes
        if before[0] != resource.RLIM_INFINITY:
            limit_bytes = min(limit_bytes, before[0])
        self._cap_bytes = min(bytes_, outer_bytes)
        resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, before[1]))
        try:
            with self._tracer:
                yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, before)
            self._cap_bytes = outer_bytes

    def isolate(self, function: Callable[[], T]) -> T:
        """Call the function in a thread of its own, with this thread's torch modes and context variables.

        When oneDNN's code generator (Xbyak) runs out of memory, it keeps the error in a thread-local variable
        and never clears it, so that the thread cannot create kernels any more.

        An exception of this thread, such as Ctrl-C, is raised when the function has ended: nothing may be
        restored while a step still runs.
        """
        is_inference, has_grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        dtype, has_autocast = torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu")
        modes = contextlib.ExitStack()

        def prepare() -> None:
            torch.ones(
                1 << 20
            )  # OpenMP starts its threads; under a cap, it may end the process instead
            modes.enter_context(torch.inference_mode(is_inference))
            modes.enter_context(torch.set_grad_enabled(has_grad))
            modes.enter_context(torch.autocast("cpu", dtype, enabled=has_autocast))

        with ThreadPoolExecutor(1, thread_name_prefix="step") as executor:
            executor.submit(prepare).result()
            future = executor.submit(contextvars.copy_context().run, function)
            try:
                return future.result()
            finally:
                while not future.done():  # each further Ctrl-C ends one wait
                    with contextlib.suppress(KeyboardInterrupt):
                        wait([future])
                executor.submit(modes.close)

    def _allocated(self, number: int, num_bytes: int) -> None:
        with self._count_lock:
            self._live_bytes += num_bytes
            self._allocated_bytes += num_bytes
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


def status_bytes(name: str) -> int:
    """A line of `/proc/self/status`, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


class _MallocInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc 2.33 and newer: `uordblks` is the eighth number, `hblkhd` the fifth."""

    _fields_ = (("numbers", ctypes.c_size_t * 10),)


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
    numbers = libc.mallinfo2().numbers
    used_bytes: int = numbers[7] + numbers[4] + status_bytes("RssFile") + status_bytes("RssShmem")
    _least_beside_bytes = min(_least_beside_bytes, resident_bytes - used_bytes)
    return min(resident_bytes, used_bytes + int(_least_beside_bytes))


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
    """Memory that this process allocates from: the machine's, or what a cgroup's limit allows.

    `used_bytes` are in use by all processes; what the kernel can reclaim is left out.
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
    """The pool of one cgroup; None where it has no limit or cannot be read."""
    try:
        limit_bytes = int((folder / limit_file).read_text())  # "max" means no limit
        used_bytes = int((folder / usage_file).read_text())
    except (OSError, ValueError):
        return None
    with contextlib.suppress(OSError, ValueError, KeyError):
        lines = (folder / "memory.stat").read_text().splitlines()
        used_bytes -= int(dict(line.split() for line in lines)[reclaimable])
    return MemoryPool(limit_bytes, used_bytes)
