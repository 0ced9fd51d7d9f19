"""Which errors mean that memory ran out."""

import errno

import pytest
import torch

from linnaeus.autobatch.memory.oom import exceeds_a_kernel, is_out_of_memory

OUT_OF_MEMORY = [
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 39.39 GiB",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    "cuFFT error: CUFFT_ALLOC_FAILED",
    "HIP error: hipErrorOutOfMemory",
    "miopenStatusAllocFailed",
    "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
    "level_zero backend failed with error: 38 (UR_RESULT_ERROR_OUT_OF_HOST_MEMORY)",
    "level_zero backend failed with error: 40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)",
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


def raised_by_numba(text, module="numba.cuda.cudadrv.driver"):
    return type("CudaAPIError", (Exception,), {"__module__": module})(text)


FROM_NUMBA = "[2] Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY"


@pytest.mark.parametrize(
    "error",
    [
        *map(RuntimeError, OUT_OF_MEMORY),
        torch.AcceleratorError(OUT_OF_MEMORY[0]),
        torch.OutOfMemoryError("of any kind"),
        MemoryError(),
        OSError(errno.ENOMEM, "", "/data/train.bin"),
        raised_by_numba(FROM_NUMBA),
    ],
    ids=repr,
)
def test_every_library_is_understood(error):
    assert is_out_of_memory(error)
    outer, inner = KeyError("batch"), ValueError("layer3")
    outer.__cause__, inner.__cause__ = inner, error
    assert is_out_of_memory(outer)


@pytest.mark.parametrize("message", TOO_LARGE)
def test_the_limit_of_a_kernel_is_understood(message):
    outer = KeyError("batch")
    outer.__cause__ = RuntimeError(message)
    assert exceeds_a_kernel(outer)
    assert not is_out_of_memory(RuntimeError(message))
    assert not exceeds_a_kernel(ValueError(message))


@pytest.mark.parametrize(
    "message", ["[Errno 22] Invalid argument", "invalid argument for conv", "no such layer"]
)
def test_other_errors_are_no_limit_of_a_kernel(message):
    assert not exceeds_a_kernel(RuntimeError(message))


@pytest.mark.parametrize(
    "error",
    [
        None,
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x8 and 16x2)"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError(
            "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that "
            "dataloader's workers are out of shared memory."
        ),
        RuntimeError("out of resource: shared memory, Required: 131072, Hardware limit: 101376"),
        RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
        KeyError("CUDA out of memory"),
        PermissionError(errno.EACCES, "Permission denied", "CUDA out of memory.log"),
        OSError("cannot identify image file 'out_of_memory.png'"),
        OSError(errno.ENOSPC, "No space left on device"),
        KeyboardInterrupt(),
        raised_by_numba("[700]"),
        raised_by_numba(FROM_NUMBA, module="trainer.errors"),
    ],
    ids=repr,
)
def test_no_other_error_counts(error):
    assert not is_out_of_memory(error)


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
