"""Which errors mean that memory ran out."""

import errno

import pytest
import torch

from linnaeus.autobatch.memory.oom import exceeds_a_kernel, is_out_of_memory
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
    "Failed to allocate 16777216 bytes on device 'cuda:0'",  # Warp
    "NCCL error: unhandled cuda error\nLast error:\nFailed to CUDA calloc async 608 bytes",
    "std::bad_alloc",
    "bad allocation",
]


@pytest.mark.parametrize("message", OUT_OF_MEMORY)
def test_every_library_is_understood(message):
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
def test_errors_of_the_right_type_need_no_text(error):
    assert is_out_of_memory(error)
    assert is_out_of_memory(raised_from(RuntimeError("failed"), error))


def test_errors_of_numba_count_although_their_type_is_its_own():
    for module, counts in (("numba.cuda.cudadrv.driver", True), ("trainer.errors", False)):
        kind = type("CudaAPIError", (Exception,), {"__module__": module})
        error = kind("[2] Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY")
        assert is_out_of_memory(error) == counts
    assert not is_out_of_memory(
        type("CudaAPIError", (Exception,), {"__module__": "numba.cuda.cudadrv.driver"})("[700]")
    )


TOO_LARGE = [
    "CUDA error: invalid configuration argument",
    "CUDA error: invalid argument\nCUDA kernel errors might be asynchronously reported",
    "Triton Error [CUDA]: invalid argument",
    "Expected canUse32BitIndexMath(input) && canUse32BitIndexMath(output) to be true",
    "input tensor must fit into 32-bit index math",
    "the number of elements must fit in int32",
    "numel must be smaller than int32 max",
    "batch size is larger than INT32_MAX",
]


@pytest.mark.parametrize("message", TOO_LARGE)
def test_the_limit_of_a_kernel_is_understood(message):
    assert exceeds_a_kernel(RuntimeError(message))
    assert exceeds_a_kernel(raised_from(KeyError("batch"), RuntimeError(message)))
    assert not is_out_of_memory(RuntimeError(message))
    assert not exceeds_a_kernel(ValueError(message))


@pytest.mark.parametrize(
    "message", ["[Errno 22] Invalid argument", "invalid argument for conv", "no such layer"]
)
def test_other_errors_are_no_limit_of_a_kernel(message):
    assert not exceeds_a_kernel(RuntimeError(message))


def test_a_real_allocation_that_nobody_can_serve_counts():
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
def test_no_other_error_counts(error):
    assert not is_out_of_memory(error)
    if error is not None:
        assert not is_out_of_memory(raised_from(RuntimeError("failed"), error))


def test_an_error_is_judged_by_what_it_was_raised_from():
    """A chain may bite its tail."""
    first, second = RuntimeError("first"), RuntimeError("second")
    first.__cause__, second.__cause__ = second, first
    assert not is_out_of_memory(first)
    second.args = ("CUDA out of memory",)
    assert is_out_of_memory(first)


def failing_step():
    torch.empty(1 << 60)


def replacing_step():
    try:
        failing_step()
    except RuntimeError:
        raise ValueError("the step has failed")  # noqa: B904


def hiding_step():
    try:
        failing_step()
    except RuntimeError:
        raise ValueError("the step has failed") from None


def broken_step():
    raise ValueError("the step has failed")


@pytest.mark.parametrize(
    ("step", "counts"), [(replacing_step, True), (hiding_step, False), (broken_step, False)]
)
def test_an_error_is_judged_by_what_it_has_replaced(step, counts):
    """But not by an error that was handled around the whole step."""
    with pytest.raises(ValueError, match="step") as alone:
        step()
    assert is_out_of_memory(alone.value) == counts
    try:
        failing_step()
    except RuntimeError:
        with pytest.raises(ValueError, match="step") as in_a_handler:
            step()
    assert in_a_handler.value.__context__ is not None
    assert is_out_of_memory(in_a_handler.value) == counts
