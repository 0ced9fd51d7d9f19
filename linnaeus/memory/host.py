"""Memory of the host: what this process holds, a cap on it, and what is available."""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import gc
import math
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
import torch

from linnaeus.memory.cgroups import MemoryPool, limited_cgroups
from linnaeus.memory.interface import DeviceMemory, T
from linnaeus.memory.oom import is_ambiguous, is_out_of_memory
from linnaeus.memory.storages import StorageTracer, num_compiled_graphs

_MIB = 1024**2
_MARGIN_BYTES = 64 * _MIB
_OVERHEAD = 2
"""The C library keeps freed blocks: processes grew by up to 1.7 times what their tensors grew by."""
_KERNEL_BYTES = 4 * _MIB  # more than the code of any single oneDNN kernel


class CpuMemory(DeviceMemory):
    """Host memory of this process: what it held before, and the tensors that trials allocate. Linux only.

    Tensors are counted when operations allocate and free them, so that the peak of a step is exact and the
    same every time. What the C library keeps for later (see `_OVERHEAD`) is not counted: it depends on the
    order of all earlier allocations. The cap is therefore twofold: an operation that takes the count above it
    raises, and the system refuses to let the process grow beyond `_OVERHEAD` times the growth that the cap
    allows, or beyond what is available.

    Where `torch.compile` has generated code, which allocates unseen, the peak is that of the resident set.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.total_bytes = min(pool.total_bytes for pool in _pools()) // self._num_ranks
        self._tracer = StorageTracer(self._allocated, self._freed)
        self._count_lock = threading.RLock()  # garbage collection frees tensors in any thread
        self._live_bytes = self._peak_bytes = 0  # of the tensors that the tracer has seen
        self._cap_bytes = math.inf
        self._headroom_bytes = math.inf  # growth of the process that the system allows under the cap
        self._virtual_bytes = 0  # VmPeak when the cap was set
        self._live_at_reset = self._resident_at_reset = 0
        self.settle()

    def settle(self, excluded_bytes: int = 0) -> None:
        """See `DeviceMemory.settle`."""
        self._base_bytes = _held_bytes() - self._live_bytes - excluded_bytes

    def budget(self, fraction: float, limit_bytes: int | None) -> int:
        """See `DeviceMemory.budget`. The ranks of one host divide its memory evenly.

        `limit_bytes` limits this process alone: what other processes use is not subtracted from it.
        """
        ours = _resident_bytes_of_ranks(self._num_ranks)
        budgets = [
            (fraction * pool.total_bytes - (pool.used_bytes - ours)) / self._num_ranks for pool in _pools()
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

    def reset_peak(self) -> None:
        """Set the peak to what is in use now."""
        self._live_at_reset = self._peak_bytes = self._live_bytes
        self._resident_at_reset = _proc_status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the kernel's high-water mark of the resident set

    def peak(self) -> int:
        """Most bytes in use since `reset_peak`."""
        peak_bytes = self._peak_bytes
        if num_compiled_graphs():
            grown_bytes = _proc_status("VmHWM") - self._resident_at_reset
            peak_bytes = max(peak_bytes, self._live_at_reset + grown_bytes)
        return self._base_bytes + peak_bytes

    def in_use(self) -> int:
        """What the process held when `settle` was called, and the tensors that trials allocated since."""
        return self._base_bytes + self._live_bytes

    def refused(self, error: BaseException) -> bool:
        """See `DeviceMemory.refused`; also an ambiguous error, if the process had grown up to the cap.

        The operation that failed has freed its memory by now, hence the comparison with the peak.
        """
        if is_out_of_memory(error):
            return True
        grown_bytes = _proc_status("VmPeak") - self._virtual_bytes
        return is_ambiguous(error) and grown_bytes + _KERNEL_BYTES > self._headroom_bytes

    def isolate(self, function: Callable[[], T]) -> T:
        """Call the function in a new thread.

        When oneDNN's code generator (Xbyak) runs out of memory, it keeps the error in a thread-local variable
        and never clears it, so that the thread cannot create kernels any more.
        """
        outcome: Future[T] = Future()
        modes = _thread_modes()

        def call(future: Future[T]) -> None:
            try:
                _start_intra_op_threads()
                with contextlib.ExitStack() as stack:
                    for mode in modes:
                        stack.enter_context(mode)
                    future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        thread = threading.Thread(target=contextvars.copy_context().run, args=(call, outcome), name="trial")
        thread.start()
        interruption: BaseException | None = None
        while not outcome.done():  # after Ctrl-C too: nothing may be restored while a step still runs
            try:
                outcome.exception()
            except BaseException as error:
                interruption = error
        thread.join()
        if interruption is not None:
            raise interruption
        try:
            return outcome.result()
        finally:
            del outcome  # or the error's traceback, this frame and the error would keep each other alive

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
        if not num_compiled_graphs():
            growth_bytes *= _OVERHEAD
        growth_bytes = min(growth_bytes, available_host_bytes() // self._num_ranks) + _MARGIN_BYTES
        limit = _proc_status("VmData") + growth_bytes
        if before[0] != resource.RLIM_INFINITY:
            limit = min(limit, before[0])
        outer = self._cap_bytes, self._headroom_bytes, self._virtual_bytes
        with _address_space_up_to_peak(), self._tracer:
            self._cap_bytes, self._headroom_bytes = min(bytes_, self._cap_bytes), growth_bytes
            self._virtual_bytes = _proc_status("VmPeak")
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


def _thread_modes() -> list[contextlib.AbstractContextManager[Any]]:
    """Contexts that give another thread the modes that torch keeps per thread, as they are in this one."""
    modes: list[contextlib.AbstractContextManager[Any]] = [
        torch.inference_mode(torch.is_inference_mode_enabled()),
        torch.set_grad_enabled(torch.is_grad_enabled()),
    ]
    if torch.is_autocast_enabled("cpu"):
        modes.append(torch.autocast("cpu", torch.get_autocast_dtype("cpu")))
    return modes


def _start_intra_op_threads() -> None:
    """Make torch start its threads now: OpenMP ends the process when it cannot start one under a cap."""
    torch.ones(1 << 20).add_(1)


def _address_space_up_to_peak() -> contextlib.AbstractContextManager[object]:
    """Reserve addresses until VmSize is above VmPeak: any growth then raises VmPeak."""
    missing_bytes = _proc_status("VmPeak") - _proc_status("VmSize") + mmap.PAGESIZE
    try:
        return mmap.mmap(-1, missing_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0)
    except OSError:  # addresses may be limited
        return contextlib.nullcontext()


def _proc_status(name: str) -> int:
    """A line of `/proc/self/status`, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


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


def _held_bytes() -> int:
    """The resident set, without what the C library has come to keep of blocks that were freed.

    For each thread that allocated it keeps up to 64 MiB that no call returns, and each search ends some
    threads. So a search would find less room than the one before it. What is resident beside allocated
    blocks and files is therefore taken to be the least that was ever seen.
    """
    global _least_beside_bytes
    resident_bytes = _proc_status("VmRSS")
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return resident_bytes
    libc.mallinfo2.restype = _MallocInfo
    info = libc.mallinfo2()
    used_bytes: int = info.uordblks + info.hblkhd + _proc_status("RssFile") + _proc_status("RssShmem")
    _least_beside_bytes = min(_least_beside_bytes, resident_bytes - used_bytes)
    return min(resident_bytes, used_bytes + int(_least_beside_bytes))


def _resident_bytes_of_ranks(num_ranks: int) -> int:
    """Resident set of this process and of its siblings, which under torchrun are the other ranks."""
    process = psutil.Process()
    parent = process.parent() if num_ranks > 1 else None
    total_bytes = 0
    for rank in parent.children() if parent else [process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            total_bytes += rank.memory_info().rss
    return total_bytes


def _pools() -> list[MemoryPool]:
    """The machine, and every cgroup around this process that has a limit."""
    machine = psutil.virtual_memory()
    return [MemoryPool(machine.total, machine.total - machine.available), *limited_cgroups(machine.total)]
