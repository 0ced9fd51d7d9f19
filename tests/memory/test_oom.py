"""Which errors mean that memory ran out."""

from __future__ import annotations

import errno

import pytest
import torch

from linnaeus.autobatch.memory.oom import is_out_of_memory
from tests.memory.conftest import raised_from

OUT_OF_MEMORY = [
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 39.39 GiB",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
    "CUDA driver error: out of memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
    "CUDA error: CUSPARSE_STATUS_ALLOC_FAILED when calling `cusparseCreate(handle)`",
    "cuFFT error: CUFFT_ALLOC_FAILED",
    "NCCL error: unhandled cuda error. Last error:\nCuda failure 2 'out of memory'",
    "Triton Error [CUDA]: out of memory",
    "HIP out of memory. Tried to allocate 512.00 MiB",
    "HIP error: out of memory",
    "HIP error: hipErrorOutOfMemory",
    "CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`",
    "miopenStatusAllocFailed",
    "XPU out of memory. Tried to allocate 20.00 GiB",
    "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
    "level_zero backend failed with error: 38 (UR_RESULT_ERROR_OUT_OF_HOST_MEMORY)",
    "level_zero backend failed with error: 40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)",
    "MPS backend out of memory (MPS allocated: 17.71 GB, other allocations: 1.1 GB, max allowed: 18.13 GB)",
    "Error: command buffer exited with error status.\n\tInsufficient Memory "
    "(00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)",
    "Invalid buffer size: 24.00 GiB",
    "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 4096000000 bytes. Error code 12 (Cannot allocate memory)",
    "DefaultCPUAllocator: not enough memory: you tried to allocate 4096000000 bytes.",
    "unable to mmap 1024 bytes from file <filename not specified>: Cannot allocate memory (12)",
    "std::bad_alloc",
    "bad allocation",
]


@pytest.mark.parametrize("message", OUT_OF_MEMORY)
def test_every_library_is_understood(message: str) -> None:
    error = RuntimeError(message)
    assert is_out_of_memory(error)
    assert is_out_of_memory(torch.AcceleratorError(message))
    assert is_out_of_memory(raised_from(KeyError("batch"), ValueError("layer3"), error))


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("of any kind"),
        MemoryError(),
        OSError(errno.ENOMEM, "", "/data/train.bin"),
    ],
    ids=repr,
)
def test_errors_of_the_right_type_need_no_text(error: BaseException) -> None:
    assert is_out_of_memory(error)
    assert is_out_of_memory(raised_from(RuntimeError("failed"), error))


def test_a_real_allocation_that_nobody_can_serve_counts() -> None:
    for allocate in (lambda: torch.empty(1 << 60), lambda: bytearray(1 << 60)):
        with pytest.raises((RuntimeError, MemoryError)) as caught:
            allocate()
        assert is_out_of_memory(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        None,
        RuntimeError(),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x8 and 16x2)"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError(
            "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that "
            "dataloader's workers are out of shared memory."
        ),
        RuntimeError("Pin memory thread exited unexpectedly"),
        RuntimeError("out of resource: shared memory, Required: 131072, Hardware limit: 101376"),
        RuntimeError("could not create a primitive"),
        RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
        RuntimeError(
            "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"
        ),
        RuntimeError("FIND was unable to find an engine to execute this computation"),
        RuntimeError("can't start new thread"),
        ValueError("out of memory"),
        KeyError("CUDA out of memory"),
        FileNotFoundError(errno.ENOENT, "No such file or directory", "/data/out of memory/1.png"),
        PermissionError(errno.EACCES, "Permission denied", "CUDA out of memory.log"),
        OSError("cannot identify image file 'out_of_memory.png'"),
        OSError(errno.ENOSPC, "No space left on device"),
        KeyboardInterrupt(),
    ],
    ids=repr,
)
def test_no_other_error_counts(error: BaseException | None) -> None:
    assert not is_out_of_memory(error)
    if error is not None:
        assert not is_out_of_memory(raised_from(RuntimeError("failed"), error))


def test_an_error_is_judged_by_what_it_was_raised_from() -> None:
    """Without `from`, the error that was handled is not its reason; a chain may bite its tail."""
    error = RuntimeError("no such layer")
    error.__context__ = MemoryError()
    assert not is_out_of_memory(error)
    first, second = RuntimeError("first"), RuntimeError("second")
    first.__cause__, second.__cause__ = second, first
    assert not is_out_of_memory(first)
    second.args = ("CUDA out of memory",)
    assert is_out_of_memory(first)
