"""Which exceptions mean that memory ran out."""

from __future__ import annotations

import errno
import re
import traceback
from collections.abc import Iterator

import torch

_OUT_OF_MEMORY = re.compile(
    r"out[ _]of[ _](device[ _]|host[ _])?memory"  # CUDA, HIP, XPU, MPS and their drivers
    r"|ErrorOutOfMemory"  # hipErrorOutOfMemory
    r"|UR_RESULT_ERROR_OUT_OF_RESOURCES"  # XPU
    r"|STATUS_?ALLOC_?FAILED"  # cuBLAS, cuDNN, cuSOLVER, cuSPARSE, hipBLAS, MIOpen
    r"|CUDNN_STATUS_INTERNAL_ERROR_(DEVICE|HOST)_ALLOCATION_FAILED"
    r"|CUFFT_ALLOC_FAILED"
    r"|invalid buffer size: "  # MPS, for a single tensor larger than the device allows
    r"|(can't|cannot|could not|failed to|unable to) allocate (memory|\d)"  # c10, the system, Warp
    r"|failed to cuda \w*alloc"  # NCCL
    r"|not enough memory"  # c10's CPU allocator on Windows
    r"|std::bad_alloc|bad allocation",
    re.IGNORECASE,
)
_ONEDNN = re.compile(r"could not (create|execute) a primitive", re.IGNORECASE)
_AMBIGUOUS = re.compile(
    _ONEDNN.pattern + r"|can't start new thread"
    r"|error return without exception set|without setting an exception"  # Python had no memory for one
    r"|unable to find an engine|unable to find a valid cuDNN algorithm"  # no workspace for any of them
    r"|CUDNN_STATUS_(NOT_SUPPORTED|INTERNAL_ERROR|EXECUTION_FAILED)"
    r"|CUBLAS_STATUS_(NOT_INITIALIZED|INTERNAL_ERROR|EXECUTION_FAILED)",
    re.IGNORECASE,
)
_TOO_LARGE = re.compile(
    r"canUse32BitIndexMath|INT_MAX|integer out of range|2\^(24|31)|32.bit (index|integer)|too large"
    r"|(CUDA|HIP)(\]| error)?: invalid (configuration )?argument"  # of a launch: a grid has its limits
    r"|fit in (an? )?int32|int32[ _]max"
    r"|number of categories cannot exceed",
    re.IGNORECASE,
)


def exceeds_a_kernel(error: BaseException) -> bool:
    """Whether the size of a batch may be the cause: its tensors are too large, or the error is ambiguous."""
    return is_ambiguous(error) or _says(error, _TOO_LARGE)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether the exception, or one in its chain of causes, reports a failed allocation."""
    return any(_reports_out_of_memory(cause) for cause in _causes(error))


def is_ambiguous(error: BaseException) -> bool:
    """Return whether libraries raise this error when an allocation failed, but for other reasons too."""
    return _says(error, _AMBIGUOUS)


def is_error_of_onednn(error: BaseException) -> bool:
    """Return whether oneDNN failed: on the CPU its kernels lacked memory."""
    return _says(error, _ONEDNN)


def _says(error: BaseException, pattern: re.Pattern[str]) -> bool:
    return any(
        isinstance(cause, RuntimeError | SystemError) and pattern.search(str(cause))
        for cause in _causes(error)
    )


def _reports_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, OSError):  # the number, since the message may contain a file name
        return error.errno == errno.ENOMEM
    if isinstance(error, RuntimeError) or type(error).__module__.startswith("numba."):
        return (
            isinstance(error, torch.OutOfMemoryError)
            or _OUT_OF_MEMORY.search(str(error)) is not None
        )
    return isinstance(error, MemoryError)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The exception, then the one it was raised from or has replaced, and so on.

    Without `from`, an exception has replaced the one whose handler it left. A handler around the whole step,
    such as one that searches a smaller batch size, does not count.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        replaced = None if error.__suppress_context__ else error.__context__
        if replaced is not None and replaced.__traceback__ is not None:
            below = (
                error.__traceback__ and error.__traceback__.tb_next
            )  # where it is caught comes first
            if replaced.__traceback__.tb_frame not in (f for f, _ in traceback.walk_tb(below)):
                replaced = None
        error = error.__cause__ or replaced
