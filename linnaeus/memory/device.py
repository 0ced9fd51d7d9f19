"""What a device has, what is in use on it, and a cap that makes its allocator refuse more.

One class per kind of device, all with the same few methods, so that the search never asks which one it is on:

| | CUDA (and HIP) | CPU (Linux) | other accelerators |
|---|---|---|---|
| total | the card | machine or cgroup, divided by the ranks on this host | `torch.accelerator` |
| peak | reserved by the caching allocator | resident set of the process | reserved or allocated |
| outside the allocator | context, libraries, NCCL, other processes | other processes | not known, 0 |
| cap | `set_per_process_memory_fraction` | a look before each operation, and `RLIMIT_DATA` | none |
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import errno
import gc
import math
import mmap
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import psutil
import torch
from torch.utils._python_dispatch import TorchDispatchMode

GIB = 1024**3
_MIB = 1024**2
_LARGE_BLOCK_BYTES = 128 * 1024
_M_MMAP_THRESHOLD = -3  # <malloc.h>
_MARGIN_BYTES = 64 * _MIB
_KERNEL_BYTES = 4 * _MIB  # more than the code of any one oneDNN kernel
_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")

T = TypeVar("T")

_OUT_OF_MEMORY = re.compile(
    r"out[ _]of[ _](device[ _]|host[ _])?memory"  # CUDA, HIP, XPU, MPS and their drivers
    r"|ErrorOutOfMemory"  # hipErrorOutOfMemory
    r"|UR_RESULT_ERROR_OUT_OF_RESOURCES"  # XPU
    r"|STATUS_?ALLOC_?FAILED"  # cuBLAS, cuDNN, cuSOLVER, cuSPARSE, hipBLAS, MIOpen
    r"|CUDNN_STATUS_INTERNAL_ERROR_(DEVICE|HOST)_ALLOCATION_FAILED"
    r"|CUFFT_ALLOC_FAILED"
    r"|invalid buffer size: "  # MPS, for one tensor above what the device can give
    r"|(can't|cannot|could not|failed to|unable to) allocate memory"  # c10's CPU allocator and the system
    r"|not enough memory"  # c10's CPU allocator on Windows
    r"|std::bad_alloc|bad allocation",
    re.IGNORECASE,
)
_UNSPECIFIC = re.compile(
    r"could not (create|execute) a primitive"  # oneDNN
    r"|can't start new thread"
    r"|error return without exception set|without setting an exception"  # Python, with no memory for one
    r"|unable to find an engine|unable to find a valid cuDNN algorithm"  # no workspace for any of them
    r"|CUDNN_STATUS_(NOT_SUPPORTED|INTERNAL_ERROR|EXECUTION_FAILED)"
    r"|CUBLAS_STATUS_(NOT_INITIALIZED|INTERNAL_ERROR|EXECUTION_FAILED)",
    re.IGNORECASE,
)
"""What libraries say when they were refused memory, but at other times too."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an exception, or one that it was raised from, says that an allocation failed."""
    return any(_says_out_of_memory(cause) for cause in _causes(error))


def _says_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, OSError):  # its text may hold the name of a file
        return error.errno == errno.ENOMEM
    if isinstance(error, RuntimeError):
        return isinstance(error, torch.OutOfMemoryError) or _OUT_OF_MEMORY.search(str(error)) is not None
    return isinstance(error, MemoryError)


def _is_unspecific(error: BaseException) -> bool:
    return any(
        isinstance(cause, RuntimeError | SystemError) and _UNSPECIFIC.search(str(cause))
        for cause in _causes(error)
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The exception, what it was raised from, and so on."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__


class DeviceMemory(Protocol):
    """Memory of one device as the search sees it. All figures are bytes."""

    device: torch.device
    total_bytes: int

    def budget(self, fraction: float, limit_bytes: int | None) -> int:
        """What this process may hold, so that `fraction` of the device is in use with everyone else's share.

        Args:
            fraction: share of the total that may be in use, in (0, 1].
            limit_bytes: treat the device as if it had no more than this; None is the whole device.
        """
        ...

    def clean(self) -> None:
        """Give back everything that no live object holds."""
        ...

    def reset_peak(self) -> None:
        """Start a new peak at what is in use now."""
        ...

    def peak(self) -> int:
        """The highest use since `reset_peak`."""
        ...

    def in_use(self) -> int:
        """What counts towards the peak now."""
        ...

    def num_retries(self) -> int:
        """How often the allocator had to flush its cache to serve a request."""
        ...

    def refused(self, error: BaseException) -> bool:
        """Whether an exception that was raised under the cap says that an allocation failed."""
        ...

    def isolate(self, function: Callable[[], T]) -> T:
        """Call the function where running out of memory leaves no mark on the rest of the process."""
        ...

    def cap(self, bytes_: int) -> contextlib.AbstractContextManager[None]:
        """Inside the context an allocation that would take the process above `bytes_` fails."""
        ...


class CudaMemory:
    """A CUDA or HIP device, measured at the caching allocator."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.init()
        index = device.index if device.index is not None else torch.cuda.current_device()
        self.device = torch.device("cuda", index)
        self.total_bytes = int(torch.cuda.get_device_properties(self.device).total_memory)
        self._refusals = self._count("num_ooms")

    def budget(self, fraction: float, limit_bytes: int | None) -> int:
        """See `DeviceMemory.budget`. The context and other processes count as use outside the allocator."""
        free, total = torch.cuda.mem_get_info(self.device)
        outside = total - free - torch.cuda.memory_reserved(self.device)
        return int(fraction * min(self.total_bytes, limit_bytes or self.total_bytes)) - outside

    def clean(self) -> None:
        """Collect garbage and empty the allocator's cache."""
        gc.collect()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()

    def reset_peak(self) -> None:
        """Start a new peak."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> int:
        """Highest reserved bytes since `reset_peak`: fragmentation counts."""
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_reserved(self.device)

    def in_use(self) -> int:
        """Bytes that the allocator holds."""
        return torch.cuda.memory_reserved(self.device)

    def refused(self, error: BaseException) -> bool:
        """Also what cuDNN and cuBLAS say when the allocator has refused them a workspace under the cap."""
        if is_out_of_memory(error):
            return True
        return _is_unspecific(error) and self._count("num_ooms") > self._refusals

    def isolate(self, function: Callable[[], T]) -> T:
        """The allocator recovers by itself."""
        return function()

    def num_retries(self) -> int:
        """The allocator's own count."""
        return self._count("num_alloc_retries")

    def _count(self, name: str) -> int:
        return int(torch.cuda.memory_stats(self.device).get(name, 0))

    @contextlib.contextmanager
    def cap(self, bytes_: int) -> Iterator[None]:
        """The allocator refuses what would take it above `bytes_`."""
        before = torch.cuda.get_per_process_memory_fraction(self.device)
        self._refusals = self._count("num_ooms")
        share = min(max(bytes_, 0) / self.total_bytes, 1.0)
        torch.cuda.set_per_process_memory_fraction(share, self.device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(before, self.device)


class AcceleratorMemory:
    """Any other accelerator, through `torch.accelerator`; without a cap the measured peak decides."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.total_bytes = int(torch.accelerator.get_memory_info(device)[1])

    def budget(self, fraction: float, limit_bytes: int | None) -> int:
        """See `DeviceMemory.budget`."""
        free, total = torch.accelerator.get_memory_info(self.device)
        outside = total - free - torch.accelerator.memory_reserved(self.device)
        return int(fraction * min(self.total_bytes, limit_bytes or self.total_bytes)) - outside

    def clean(self) -> None:
        """Collect garbage and empty the allocator's cache."""
        gc.collect()
        torch.accelerator.synchronize(self.device)
        torch.accelerator.empty_cache()

    def reset_peak(self) -> None:
        """Start a new peak."""
        torch.accelerator.reset_peak_memory_stats(self.device)

    def peak(self) -> int:
        """Highest reserved bytes since `reset_peak`."""
        torch.accelerator.synchronize(self.device)
        return int(torch.accelerator.max_memory_reserved(self.device))

    def in_use(self) -> int:
        """Bytes that the allocator holds."""
        return int(torch.accelerator.memory_reserved(self.device))

    def refused(self, error: BaseException) -> bool:
        """See `is_out_of_memory`."""
        return is_out_of_memory(error)

    def isolate(self, function: Callable[[], T]) -> T:
        """The allocator recovers by itself."""
        return function()

    def num_retries(self) -> int:
        """Not counted here."""
        return 0

    @contextlib.contextmanager
    def cap(self, bytes_: int) -> Iterator[None]:
        """No cap is to be had."""
        yield


class _Pool(NamedTuple):
    """A pool that memory is taken from: the machine, or a cgroup with a limit."""

    total_bytes: int
    used_bytes: int  # without what the kernel can reclaim


class CpuMemory:
    """Host memory of this process: resident set, with a cap. Linux only.

    glibc keeps freed blocks below a threshold that grows to 32 MiB, so that the peak of one and the same step
    differs by some 10 % from run to run and creeps up over the first dozen steps. `clean` therefore fixes
    the threshold at 128 KiB for the rest of the process: every tensor above it has its own mapping, goes back
    to the system when it is freed, and the peak is that of the live tensors.

    Args:
        device: the CPU.
        cgroups: where the cgroup file system is mounted.
        membership: file that names the cgroups of this process.
    """

    def __init__(
        self, device: torch.device, *, cgroups: Path = _CGROUPS, membership: Path = _MEMBERSHIP
    ) -> None:
        self.device = device
        self._libc = ctypes.CDLL(None)
        self._num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._cgroups, self._membership = cgroups, membership
        self.total_bytes = min(pool.total_bytes for pool in self._pools()) // self._num_ranks
        self._room_bytes = math.inf  # that the cap leaves
        self._virtual_bytes = 0  # at the start of the cap

    def budget(self, fraction: float, limit_bytes: int | None) -> int:
        """See `DeviceMemory.budget`. The ranks of one host share its memory evenly.

        `limit_bytes` bounds this process alone: what the rest of a machine holds is not part of a smaller
        device that it stands in for.
        """
        ours = sum(_resident_bytes(process) for process in _ranks_on_this_host(self._num_ranks))
        budgets = [
            (fraction * pool.total_bytes - (pool.used_bytes - ours)) / self._num_ranks
            for pool in self._pools()
        ]
        if limit_bytes is not None:
            budgets.append(fraction * limit_bytes)
        return int(min(budgets))

    def clean(self) -> None:
        """Collect garbage and hand free pages back to the system."""
        gc.collect()
        if hasattr(self._libc, "malloc_trim"):
            self._libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES)
            self._libc.malloc_trim(0)

    def reset_peak(self) -> None:
        """Set the kernel's high-water mark of this process to what it holds now."""
        Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> int:
        """Highest resident set since `reset_peak`."""
        return _proc_status("VmHWM")

    def in_use(self) -> int:
        """Resident set of the process."""
        return _proc_status("VmRSS")

    def refused(self, error: BaseException) -> bool:
        """Also oneDNN's word for a kernel that it had no memory to write, when there was indeed none left.

        The operation that failed has given back what it had by now, so the question is how far the process
        had grown at the highest.
        """
        if is_out_of_memory(error):
            return True
        grown_bytes = _proc_status("VmPeak") - self._virtual_bytes
        return _is_unspecific(error) and grown_bytes + _KERNEL_BYTES > self._room_bytes

    def isolate(self, function: Callable[[], T]) -> T:
        """Call the function in a thread of its own.

        oneDNN's code generator (Xbyak) keeps an allocation error in a variable of the thread and never clears
        it: from then on the thread cannot make a new kernel. It goes with the thread.
        """
        outcome: list[T] = []
        failure: list[BaseException] = []
        done = threading.Event()  # before Python 3.13 an interrupted `join` takes the thread for ended
        modes = _thread_modes()

        def call() -> None:
            try:
                _start_threads()
                with modes():
                    outcome.append(function())
            except BaseException as error:
                failure.append(error)
            finally:
                done.set()

        thread = threading.Thread(target=contextvars.copy_context().run, args=(call,), name="trial")
        thread.start()
        interruption: BaseException | None = None
        while not done.is_set():  # after Ctrl-C too: nothing may be restored under a step that still runs
            try:
                done.wait()
            except BaseException as error:
                interruption = error
        thread.join()
        if interruption is not None:
            raise interruption
        if failure:
            raise failure.pop()
        return outcome.pop()

    def num_retries(self) -> int:
        """The C allocator does not retry."""
        return 0

    @contextlib.contextmanager
    def cap(self, bytes_: int) -> Iterator[None]:
        """Inside, in this thread, no operation of torch begins while the process holds more than `bytes_`.

        Within one operation private writable memory may grow `_MARGIN_BYTES` beyond that; there the allocator
        fails. Without the margin small allocations inside libraries would fail as often as tensors do, which
        not all libraries survive: oneDNN calls kernels that it had no memory to write.
        """
        import resource

        before = resource.getrlimit(resource.RLIMIT_DATA)
        room_bytes = max(bytes_ - _proc_status("VmRSS"), 0) + _MARGIN_BYTES
        limit = _proc_status("VmData") + room_bytes
        if before[0] != resource.RLIM_INFINITY:
            limit = min(limit, before[0])
        with _up_to_virtual_peak(), _Guard(bytes_):
            self._room_bytes, self._virtual_bytes = room_bytes, _proc_status("VmPeak")
            resource.setrlimit(resource.RLIMIT_DATA, (limit, before[1]))
            try:
                yield
            finally:
                resource.setrlimit(resource.RLIMIT_DATA, before)
                self._room_bytes = math.inf

    def _pools(self) -> list[_Pool]:
        return _pools(self._cgroups, self._membership)


class _Guard(TorchDispatchMode):
    """Refuses to begin an operation while the process holds more than the cap, in the backward pass too."""

    supports_higher_order_operators = True

    def __init__(self, limit_bytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._limit_bytes = limit_bytes
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        self._statm = os.open("/proc/self/statm", os.O_RDONLY)

    @classmethod
    def is_infra_mode(cls) -> bool:
        """`torch.compile` works as it does without."""
        return True

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        os.close(self._statm)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        held_bytes = int(os.pread(self._statm, 64, 0).split()[1]) * self._page_bytes
        if held_bytes > self._limit_bytes:
            raise MemoryError(
                f"out of memory: the process holds {held_bytes / _MIB:.0f} MiB, "
                f"its cap is {self._limit_bytes / _MIB:.0f} MiB"
            )
        return func(*args, **(kwargs or {}))


def device_memory(device: torch.device) -> DeviceMemory:
    """The memory of a device.

    Raises:
        NotImplementedError: when the memory of this kind of device cannot be measured.
    """
    if device.type == "cuda":
        return CudaMemory(device)
    if device.type == "cpu" and sys.platform == "linux":
        return CpuMemory(device)
    problem = f"the memory of {device} cannot be measured on {sys.platform} with torch {torch.__version__}"
    if device.type == "cpu" or not hasattr(torch.accelerator, "get_memory_info"):
        raise NotImplementedError(problem)
    try:
        return AcceleratorMemory(device)
    except (RuntimeError, ValueError) as error:  # NotImplementedError is a RuntimeError
        raise NotImplementedError(f"{problem}: {error}") from error


def available_host_bytes(cgroups: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> int:
    """Host memory that this process can take without any other giving way: of the machine and its cgroups.

    Args:
        cgroups: where the cgroup file system is mounted.
        membership: file that names the cgroups of this process.
    """
    return max(0, min(pool.total_bytes - pool.used_bytes for pool in _pools(cgroups, membership)))


def _thread_modes() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """What torch keeps for each thread by itself (gradients, autocast): a context for another thread."""
    gradients, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    autocast, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

    @contextlib.contextmanager
    def modes() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(inference))
            stack.enter_context(torch.set_grad_enabled(gradients))
            if autocast:
                stack.enter_context(torch.autocast("cpu", dtype))
            yield

    return modes


@contextlib.contextmanager
def _up_to_virtual_peak() -> Iterator[None]:
    """Reserve addresses up to the most the process ever had, so that `VmPeak` moves with what comes now."""
    missing_bytes = _proc_status("VmPeak") - _proc_status("VmSize") + mmap.PAGESIZE
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # addresses are limited too
            stack.enter_context(mmap.mmap(-1, missing_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0))
        yield


def _start_threads() -> None:
    """Start the intra-op threads: OpenMP ends the process when it cannot make one under a cap."""
    torch.ones(1 << 20).add_(1)


def _proc_status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def _resident_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def _ranks_on_this_host(num_ranks: int) -> list[psutil.Process]:
    """This process, and under torchrun its siblings, which are the other ranks."""
    process = psutil.Process()
    parent = process.parent() if num_ranks > 1 else None
    return parent.children() if parent else [process]


def _pools(cgroups: Path, membership: Path) -> list[_Pool]:
    """The machine and every cgroup around this process that has a limit."""
    machine = psutil.virtual_memory()
    limited = _limited_cgroups(machine.total, cgroups, membership)
    return [_Pool(machine.total, machine.total - machine.available), *limited]


def _limited_cgroups(machine_bytes: int, root: Path, membership: Path) -> Iterator[_Pool]:
    """Memory cgroups (v1 and v2) of this process with a limit below the machine's memory, innermost first."""
    try:
        lines = membership.read_text(errors="surrogateescape").splitlines()  # as file names are
    except OSError:
        return
    for line in lines:
        _, separator, controllers_and_path = line.partition(":")
        controllers, _, path = controllers_and_path.partition(":")
        if separator and controllers == "":
            names, base = ("memory.max", "memory.current", "inactive_file"), root
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            base = root / "memory"
        else:
            continue
        for folder in _upwards(base, path):
            pool = _read_cgroup(folder, *names)
            if pool is not None and pool.total_bytes < machine_bytes:
                yield pool


def _upwards(base: Path, path: str) -> Iterator[Path]:
    folder = base / path.strip("/")
    while folder != base:
        yield folder
        folder = folder.parent
    yield base


def _read_cgroup(folder: Path, limit_file: str, usage_file: str, reclaimable: str) -> _Pool | None:
    try:
        limit_bytes = int((folder / limit_file).read_text())  # "max" is no limit
        used_bytes = int((folder / usage_file).read_text())
    except (OSError, ValueError):
        return None
    return _Pool(limit_bytes, used_bytes - _stat(folder / "memory.stat", reclaimable))


def _stat(file: Path, name: str) -> int:
    """One figure of a file of lines `name bytes`; 0 where it cannot be read."""
    try:
        return int(dict(line.split() for line in file.read_text().splitlines())[name])
    except (OSError, ValueError, KeyError):
        return 0
