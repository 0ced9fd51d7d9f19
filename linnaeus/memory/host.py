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
from typing import Any, TypeVar

import psutil
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from linnaeus.memory.cgroups import MemoryPool, limited_cgroups
from linnaeus.memory.oom import is_ambiguous, is_out_of_memory

_MIB = 1024**2
_LARGE_BLOCK_BYTES = 128 * 1024
_M_MMAP_THRESHOLD = -3  # <malloc.h>
_MARGIN_BYTES = 64 * _MIB
_KERNEL_BYTES = 4 * _MIB  # more than the code of any single oneDNN kernel

T = TypeVar("T")


class CpuMemory:
    """Host memory of this process: its resident set, with a cap. Linux only.

    glibc keeps freed blocks below a threshold instead of returning them to the system, and raises that
    threshold up to 32 MiB as it goes. The peak of the same step then differs by some 10 % between runs and
    grows during the first dozen steps. `clean` therefore fixes the threshold at 128 KiB for the rest of the
    process: every larger tensor has its own mapping, which is returned when the tensor is freed, so that the
    peak is that of the live tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.total_bytes = min(pool.total_bytes for pool in _pools()) // self._num_ranks
        self._headroom_bytes = math.inf  # growth that the cap allows
        self._virtual_bytes = 0  # VmPeak when the cap was set

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

    def outside(self) -> int:
        """See `DeviceMemory.outside`."""
        return self.total_bytes - self.budget(1.0, None)

    def caveats(self) -> list[str]:
        """None: the cap changes nothing about what the C allocator keeps."""
        return []

    def clean(self) -> None:
        """Collect garbage and return free pages to the system."""
        gc.collect()
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):  # glibc
            libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES)
            libc.malloc_trim(0)

    def reset_peak(self) -> None:
        """Set the kernel's high-water mark of this process to its current resident set."""
        Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> int:
        """Highest resident set since `reset_peak`."""
        return _proc_status("VmHWM")

    def in_use(self) -> int:
        """Resident set of the process."""
        return _proc_status("VmRSS")

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

    def num_retries(self) -> int:
        """0: the C allocator does not retry."""
        return 0

    @contextlib.contextmanager
    def cap(self, bytes_: int) -> Iterator[None]:
        """In this thread, no torch operation begins while the process holds more than `bytes_`.

        Within one operation, private writable memory may grow `_MARGIN_BYTES` further before the allocator
        fails. Without this margin, small allocations inside libraries would fail as often as tensors do, and
        not every library survives that: oneDNN calls kernels that it had no memory to write.
        """
        import resource  # not on Windows

        before = resource.getrlimit(resource.RLIMIT_DATA)
        headroom_bytes = max(bytes_ - _proc_status("VmRSS"), 0) + _MARGIN_BYTES
        limit = _proc_status("VmData") + headroom_bytes
        if before[0] != resource.RLIM_INFINITY:
            limit = min(limit, before[0])
        with _address_space_up_to_peak(), _Guard(bytes_):
            self._headroom_bytes, self._virtual_bytes = headroom_bytes, _proc_status("VmPeak")
            resource.setrlimit(resource.RLIMIT_DATA, (limit, before[1]))
            try:
                yield
            finally:
                resource.setrlimit(resource.RLIMIT_DATA, before)
                self._headroom_bytes = math.inf


def available_host_bytes() -> int:
    """Host memory that this process can still allocate: the least of the machine and its cgroups."""
    return max(0, min(pool.total_bytes - pool.used_bytes for pool in _pools()))


class _Guard(TorchDispatchMode):
    """Lets no operation begin, forward or backward, while the process holds more than the cap."""

    supports_higher_order_operators = True

    def __init__(self, limit_bytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._limit_bytes = limit_bytes
        self._statm = os.open("/proc/self/statm", os.O_RDONLY)

    @classmethod
    def is_infra_mode(cls) -> bool:
        """True: `torch.compile` ignores this mode."""
        return True

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        os.close(self._statm)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        held_bytes = int(os.pread(self._statm, 64, 0).split()[1]) * mmap.PAGESIZE
        if held_bytes > self._limit_bytes:
            raise MemoryError(
                f"out of memory: the process holds {held_bytes / _MIB:.0f} MiB, "
                f"its cap is {self._limit_bytes / _MIB:.0f} MiB"
            )
        return func(*args, **(kwargs or {}))


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
