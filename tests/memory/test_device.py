"""What counts as out of memory, what a host has, and the cap on the memory of this process."""

from __future__ import annotations

import contextlib
import contextvars
import errno
import mmap
import os
import resource
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

from linnaeus.autobatch.trial import existing_objects_frozen
from linnaeus.memory.device import (
    GIB,
    AcceleratorMemory,
    CpuMemory,
    CudaMemory,
    DeviceMemory,
    available_host_bytes,
    device_memory,
    is_out_of_memory,
)

MIB = 1024**2
CPU = torch.device("cpu")
MACHINE = psutil.virtual_memory().total
NOISE = 8 * MIB  # what the rest of the process takes or gives back between two readings

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="host memory is measured on Linux")


def torch_says(message: str) -> RuntimeError:
    return RuntimeError(message)


def raised_from(error: BaseException, *causes: BaseException) -> BaseException:
    """The error as `raise ... from` leaves it, with the causes innermost last."""
    inner = error
    for cause in causes:
        inner.__cause__ = cause
        inner = cause
    return error


@pytest.fixture(autouse=True, scope="module")
def _only_new_garbage() -> Iterator[None]:
    """`clean` collects garbage; without this it looks at all of torch each time."""
    with existing_objects_frozen():
        yield


# -- which errors say that memory ran out

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
    assert is_out_of_memory(torch_says(message))
    assert is_out_of_memory(torch.AcceleratorError(message))
    assert is_out_of_memory(raised_from(ValueError("in layer 3"), torch_says(message)))
    assert is_out_of_memory(raised_from(KeyError("batch"), ValueError("in layer 3"), torch_says(message)))


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("whatever it says"),
        torch.cuda.OutOfMemoryError("Allocation on device 0"),
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        OSError(errno.ENOMEM, "Cannot allocate memory", "/data/train.bin"),
    ],
    ids=repr,
)
def test_errors_of_the_right_type_need_no_text(error: BaseException) -> None:
    assert is_out_of_memory(error)
    assert is_out_of_memory(raised_from(RuntimeError("the step failed"), error))


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
        RuntimeError("the loss is NaN at step 3"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x8 and 16x2)"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("Expected all tensors to be on the same device"),
        RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that "
                     "dataloader's workers are out of shared memory."),
        RuntimeError("Pin memory thread exited unexpectedly"),
        RuntimeError("out of resource: shared memory, Required: 131072, Hardware limit: 101376"),
        RuntimeError("view size is not compatible with input tensor's size and stride"),
        RuntimeError("could not create a primitive"),
        RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
        RuntimeError("FIND was unable to find an engine to execute this computation"),
        RuntimeError("can't start new thread"),
        NotImplementedError("no kernel for this dtype"),
        ValueError("loss is NaN"),
        ValueError("out of memory"),
        KeyError("CUDA out of memory"),
        FileNotFoundError(errno.ENOENT, "No such file or directory", "/data/out of memory/1.png"),
        PermissionError(errno.EACCES, "Permission denied", "CUDA out of memory.log"),
        OSError("cannot identify image file 'out_of_memory.png'"),
        OSError(errno.ENOSPC, "No space left on device"),
        KeyboardInterrupt(),
        FloatingPointError("nan"),
    ],
    ids=repr,
)  # fmt: skip
def test_no_other_error_counts(error: BaseException | None) -> None:
    assert not is_out_of_memory(error)
    if error is not None:
        assert not is_out_of_memory(raised_from(RuntimeError("the step failed"), error))


def test_an_error_raised_while_another_was_handled_is_judged_by_itself() -> None:
    """Without `from`, the first error is not the reason of the second."""
    error = RuntimeError("no such layer")
    error.__context__ = MemoryError()
    assert not is_out_of_memory(error)


def test_a_chain_that_bites_its_tail_ends() -> None:
    first, second = RuntimeError("first"), RuntimeError("second")
    first.__cause__, second.__cause__ = second, first
    assert not is_out_of_memory(first)
    second.args = ("CUDA out of memory",)
    assert is_out_of_memory(first)


# -- the devices


@pytest.mark.parametrize("kind", ["meta", "hpu", "mps", "xpu"])
def test_a_device_that_is_not_there_is_named(kind: str) -> None:
    present = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if present is not None and present.type == kind:
        pytest.skip(f"there is an {kind} device")
    with pytest.raises(NotImplementedError, match=f"the memory of {kind}.* cannot be measured"):
        device_memory(torch.device(kind))


def test_the_cpu_of_another_system_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(NotImplementedError, match="the memory of cpu cannot be measured on darwin"):
        device_memory(CPU)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", [CudaMemory, AcceleratorMemory])
def test_an_accelerator_counts_what_its_allocator_holds(
    kind: Callable[[torch.device], DeviceMemory],
) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    memory = kind(device)
    memory.clean()
    memory.reset_peak()
    before = memory.in_use()
    block = torch.ones(64 * MIB, dtype=torch.uint8, device=device)
    assert memory.in_use() >= before + block.nbytes
    del block
    memory.clean()
    assert memory.in_use() == before
    assert memory.peak() >= before + 64 * MIB
    memory.reset_peak()
    assert memory.peak() == before
    assert memory.budget(1.0, GIB) == memory.budget(1.0, None) - memory.total_bytes + GIB
    assert memory.isolate(lambda: 5) == 5
    with memory.cap(before + 128 * MIB):
        held = torch.empty(64 * MIB, dtype=torch.uint8, device=device)
    assert held.nbytes == 64 * MIB


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_allocator_of_a_card_refuses_what_is_above_the_cap_and_recovers() -> None:
    memory = CudaMemory(torch.device("cuda"))
    memory.clean()
    before = torch.cuda.get_per_process_memory_fraction(memory.device)
    with memory.cap(memory.in_use() + 64 * MIB), pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(GIB, dtype=torch.uint8, device=memory.device)
    assert memory.refused(caught.value)
    assert torch.cuda.get_per_process_memory_fraction(memory.device) == before
    assert torch.ones(GIB, dtype=torch.uint8, device=memory.device)[-1] == 1


# -- control groups


class Cgroups:
    """A cgroup file system and the file that says where this process is in it."""

    def __init__(self, folder: Path) -> None:
        self.root, self.membership = folder / "cgroup", folder / "membership"
        self.root.mkdir()

    def join(self, *lines: str) -> None:
        self.membership.write_text("".join(f"{line}\n" for line in lines))

    def v2(self, path: str, limit: object, used: int = 0, inactive: int = 0) -> Path:
        folder = self._folder(self.root / path.strip("/"))
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 4096\nfile 8192\ninactive_file {inactive}\n")
        return folder

    def v1(self, path: str, limit: object, used: int = 0, inactive: int = 0) -> Path:
        folder = self._folder(self.root / "memory" / path.strip("/"))
        (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {inactive}\n")
        return folder

    def _folder(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def memory(self) -> CpuMemory:
        return CpuMemory(CPU, cgroups=self.root, membership=self.membership)

    def available(self) -> int:
        return available_host_bytes(self.root, self.membership)


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cgroups:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    return Cgroups(tmp_path)


V1_LINES = ("12:pids:/job", "11:cpu,memory:/job/step", "1:name=systemd:/init.scope")


@on_linux
@pytest.mark.parametrize(("outer", "inner"), [(900 * MIB, 300 * MIB), (300 * MIB, 900 * MIB)])
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_the_tightest_of_nested_limits_holds(cgroups: Cgroups, version: str, outer: int, inner: int) -> None:
    cgroups.join(*(V1_LINES if version == "v1" else ["0::/job/step"]))
    write = cgroups.v1 if version == "v1" else cgroups.v2
    write("/job", outer)
    write("/job/step", inner)
    write("/job/step/below", 1 * MIB)
    write("/other", 1 * MIB)
    assert cgroups.memory().total_bytes == 300 * MIB
    assert cgroups.available() == min(300 * MIB, psutil.virtual_memory().available)


@on_linux
def test_both_versions_may_be_mounted(cgroups: Cgroups) -> None:
    cgroups.join(*V1_LINES, "0::/unified")
    cgroups.v1("/job/step", 700 * MIB)
    assert cgroups.memory().total_bytes == 700 * MIB
    cgroups.v2("/unified", 600 * MIB)
    assert cgroups.memory().total_bytes == 600 * MIB


@on_linux
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_a_container_sees_its_own_group_at_the_root(cgroups: Cgroups, version: str) -> None:
    """The path is the host's, and does not exist inside."""
    cgroups.join("4:memory:/docker/0a1b2c" if version == "v1" else "0::/docker/0a1b2c")
    (cgroups.v1 if version == "v1" else cgroups.v2)("/", 400 * MIB)
    assert cgroups.memory().total_bytes == 400 * MIB


@on_linux
@pytest.mark.parametrize("path", ["/../..", "/../sibling", "//", "/a:b", "/with space"])
def test_odd_paths_end_at_the_root(cgroups: Cgroups, path: str) -> None:
    cgroups.join(f"0::{path}")
    cgroups.v2("/", 400 * MIB)
    assert cgroups.memory().total_bytes == 400 * MIB


@on_linux
@pytest.mark.parametrize("name", ["a:b", "with space"])
def test_names_with_odd_characters_are_found(cgroups: Cgroups, name: str) -> None:
    cgroups.join(f"0::/{name}")
    cgroups.v2(name, 400 * MIB)
    assert cgroups.memory().total_bytes == 400 * MIB


@on_linux
def test_a_name_that_is_no_text_is_found(cgroups: Cgroups) -> None:
    name = b"job\xe9"
    cgroups.membership.write_bytes(b"0::/" + name + b"\n")
    cgroups.v2(os.fsdecode(name), 400 * MIB)
    assert cgroups.memory().total_bytes == 400 * MIB


@on_linux
def test_no_limit_is_the_machine(cgroups: Cgroups) -> None:
    assert cgroups.memory().total_bytes == MACHINE  # no membership file
    cgroups.join("4:memory:/job", "0::/job")
    assert cgroups.memory().total_bytes == MACHINE  # no such groups
    cgroups.v2("/job", "max", used=MACHINE)
    cgroups.v1("/job", 9223372036854771712, used=MACHINE)
    assert cgroups.memory().total_bytes == MACHINE
    assert cgroups.available() == pytest.approx(psutil.virtual_memory().available, abs=GIB)


@on_linux
@pytest.mark.parametrize("limit", [MACHINE, MACHINE + 1, 100 * MACHINE])
def test_a_limit_above_physical_memory_is_none(cgroups: Cgroups, limit: int) -> None:
    cgroups.join("0::/job")
    cgroups.v2("/job", limit, used=limit)
    assert cgroups.memory().total_bytes == MACHINE
    assert cgroups.available() > 0


@on_linux
@pytest.mark.parametrize("text", ["", "\n", "unlimited", "12 kB", "1.5", "max max"])
def test_a_limit_that_cannot_be_read_is_none(cgroups: Cgroups, text: str) -> None:
    cgroups.join("0::/job/step")
    cgroups.v2("/job", 500 * MIB)
    step = cgroups.v2("/job/step", 300 * MIB)
    (step / "memory.max").write_text(text)
    assert cgroups.memory().total_bytes == 500 * MIB


@on_linux
@pytest.mark.parametrize("damage", ["missing", "empty", "text", "folder"])
def test_a_group_without_its_use_is_left_out(cgroups: Cgroups, damage: str) -> None:
    cgroups.join("0::/job")
    use = cgroups.v2("/job", 300 * MIB) / "memory.current"
    use.unlink()
    if damage == "folder":
        use.mkdir()
    elif damage != "missing":
        use.write_text("" if damage == "empty" else "a lot")
    assert cgroups.memory().total_bytes == MACHINE


@on_linux
@pytest.mark.parametrize("stat", [None, "", "anon 1\n", "inactive_file\n", "inactive_file 1 2\n", "\n\n",
                                  "inactive_file many\n"])  # fmt: skip
def test_without_statistics_the_limit_holds_and_nothing_is_reclaimable(
    cgroups: Cgroups, stat: str | None
) -> None:
    cgroups.join("0::/job")
    file = cgroups.v2("/job", 300 * MIB, used=200 * MIB) / "memory.stat"
    file.unlink()
    if stat is not None:
        file.write_text(stat)
    assert cgroups.memory().total_bytes == 300 * MIB
    assert cgroups.available() == 100 * MIB


@on_linux
@pytest.mark.parametrize("line", ["", "nonsense", "0", "0:", "::", ":memory"])
def test_broken_lines_of_the_membership_do_not_hide_the_others(cgroups: Cgroups, line: str) -> None:
    cgroups.join(line, "0::/job", line)
    cgroups.v2("/job", 300 * MIB)
    assert cgroups.memory().total_bytes == 300 * MIB


@on_linux
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_what_the_kernel_can_reclaim_is_available(cgroups: Cgroups, version: str) -> None:
    cgroups.join("4:memory:/job" if version == "v1" else "0::/job")
    write = cgroups.v1 if version == "v1" else cgroups.v2
    write("/job", 300 * MIB, used=250 * MIB, inactive=100 * MIB)
    assert cgroups.available() == 150 * MIB
    write("/job", 300 * MIB, used=400 * MIB, inactive=10 * MIB)
    assert cgroups.available() == 0


@on_linux
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_the_ranks_of_a_host_share_its_memory(
    cgroups: Cgroups, monkeypatch: pytest.MonkeyPatch, num_ranks: int
) -> None:
    cgroups.join("0::/job")
    cgroups.v2("/job", 300 * MIB)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(num_ranks))
    assert cgroups.memory().total_bytes == 300 * MIB // num_ranks


# -- the budget


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


@on_linux
@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.8, 1.0])
def test_the_budget_is_the_share_of_a_group_less_what_others_use(cgroups: Cgroups, fraction: float) -> None:
    total, others = min(2 * GIB, MACHINE // 8), MACHINE  # so much that the machine itself never decides
    cgroups.join("0::/job")
    cgroups.v2("/job", total, used=others + resident() + 50 * MIB, inactive=50 * MIB)
    budget = cgroups.memory().budget(fraction, None)
    assert budget == pytest.approx(fraction * total - others, abs=NOISE)


@on_linux
def test_the_tightest_pool_decides_on_the_budget(cgroups: Cgroups) -> None:
    """A wide group that is nearly full leaves less than a narrow one that is empty."""
    wide, narrow = min(4 * GIB, MACHINE // 4), min(2 * GIB, MACHINE // 8)
    cgroups.join("0::/wide/narrow")
    cgroups.v2("/wide", wide, used=wide - 200 * MIB)
    cgroups.v2("/wide/narrow", narrow, used=0)
    assert cgroups.memory().budget(1.0, None) == pytest.approx(resident() + 200 * MIB, abs=NOISE)


@on_linux
def test_the_budget_is_negative_where_others_use_more_than_the_share(cgroups: Cgroups) -> None:
    cgroups.join("0::/job")
    cgroups.v2("/job", GIB, used=resident() + 900 * MIB)
    assert cgroups.memory().budget(0.1, None) < 0


@on_linux
@pytest.mark.parametrize("fraction", [0.95, 1.0])
def test_a_smaller_device_bounds_this_process_alone(cgroups: Cgroups, fraction: float) -> None:
    limit = 64 * MIB
    assert cgroups.memory().budget(fraction, limit) == int(fraction * limit)
    unlimited = cgroups.memory().budget(fraction, None)
    assert cgroups.memory().budget(fraction, 100 * MACHINE) == pytest.approx(unlimited, abs=GIB)


@on_linux
def test_each_rank_gets_an_even_share_of_the_budget(
    cgroups: Cgroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What all ranks hold is theirs to share: this process, and whatever runs beside it."""
    total, used = GIB, MACHINE
    cgroups.join("0::/job")
    cgroups.v2("/job", total, used=used)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    parent = psutil.Process().parent()
    family = sum(child.memory_info().rss for child in parent.children()) if parent else resident()
    budget = cgroups.memory().budget(1.0, None)
    assert (total - used + resident()) / 2 - NOISE <= budget <= (total - used + family) / 2 + GIB


# -- the peak


@pytest.fixture
def memory() -> Iterator[CpuMemory]:
    memory = CpuMemory(CPU)
    memory.clean()
    yield memory
    memory.clean()


@on_linux
def test_the_peak_stays_until_it_is_reset(memory: CpuMemory) -> None:
    memory.reset_peak()
    before = memory.in_use()
    assert memory.peak() == pytest.approx(before, abs=NOISE)
    block = torch.ones(100 * MIB, dtype=torch.uint8)
    assert memory.in_use() == pytest.approx(before + 100 * MIB, abs=NOISE)
    del block
    assert memory.in_use() == pytest.approx(before, abs=NOISE)
    assert memory.peak() == pytest.approx(before + 100 * MIB, abs=NOISE)
    memory.reset_peak()
    assert memory.peak() == pytest.approx(before, abs=NOISE)


@on_linux
def test_a_peak_starts_at_what_is_held(memory: CpuMemory) -> None:
    block = torch.ones(100 * MIB, dtype=torch.uint8)
    memory.reset_peak()
    held = memory.in_use()
    del block
    assert memory.peak() == pytest.approx(held, abs=NOISE)


@on_linux
def test_clean_gives_back_what_only_a_cycle_holds(memory: CpuMemory) -> None:
    before = memory.in_use()
    cycle: list[object] = [torch.ones(100 * MIB, dtype=torch.uint8)]
    cycle.append(cycle)
    del cycle
    memory.clean()
    assert memory.in_use() == pytest.approx(before, abs=NOISE)


@on_linux
def test_small_tensors_go_back_to_the_system_too(memory: CpuMemory) -> None:
    before = memory.in_use()
    blocks = [torch.ones(256 * 1024, dtype=torch.uint8) for _ in range(400)]
    assert memory.in_use() == pytest.approx(before + 100 * MIB, abs=NOISE)
    last = blocks.pop()
    del blocks
    assert memory.in_use() == pytest.approx(before, abs=NOISE)
    assert last.all()


# -- the cap


def train_once() -> float:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        loss = model(torch.randn(4, 3, 8, 8)).square().mean()
        loss.backward()
        optimizer.step()
    return loss.item()


def num_open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def allocate(num_bytes: int) -> torch.Tensor:
    return torch.ones(num_bytes, dtype=torch.uint8)


@on_linux
def test_a_tensor_above_the_cap_is_refused_and_the_process_works_on(memory: CpuMemory) -> None:
    expected = train_once()
    before = resource.getrlimit(resource.RLIMIT_DATA)
    files = num_open_files()
    for _ in range(3):
        with memory.cap(memory.in_use() + 100 * MIB):
            assert allocate(50 * MIB).all()
            with pytest.raises(RuntimeError, match="can't allocate memory") as caught:
                allocate(300 * MIB)
            assert memory.refused(caught.value)
            assert allocate(50 * MIB).all()
        assert resource.getrlimit(resource.RLIMIT_DATA) == before
        assert allocate(300 * MIB).all()
        assert train_once() == expected
    assert num_open_files() == files


@on_linux
def test_python_is_refused_memory_under_the_cap_too(memory: CpuMemory) -> None:
    with memory.cap(memory.in_use() + 50 * MIB), pytest.raises(MemoryError) as caught:
        bytearray(600 * MIB)
    assert memory.refused(caught.value)
    assert len(bytearray(600 * MIB)) == 600 * MIB


@on_linux
def test_no_operation_begins_above_the_cap(memory: CpuMemory) -> None:
    """One operation may go a little beyond the cap; the next one does not begin."""
    with memory.cap(memory.in_use() + 100 * MIB):
        block = allocate(132 * MIB)
        with pytest.raises(MemoryError, match=r"out of memory: the process holds \d+ MiB, its cap") as caught:
            torch.ones(1)
        assert memory.refused(caught.value)
        del block
        assert torch.ones(1) == 1


@on_linux
def test_no_operation_of_a_backward_pass_begins_above_the_cap(memory: CpuMemory) -> None:
    weight = torch.ones(8, requires_grad=True)
    with memory.cap(memory.in_use() + 100 * MIB):
        loss = (weight.exp() * 2).sum()
        block = b"\1" * (132 * MIB)
        with pytest.raises(MemoryError) as caught:
            loss.backward()
        assert memory.refused(caught.value)
        assert weight.grad is None
        del block
        weight.exp().sum().backward()
    assert weight.grad is not None


@on_linux
@pytest.mark.parametrize("bytes_", [-(1 << 40), 0, 1])
def test_under_a_cap_below_what_is_held_nothing_runs(memory: CpuMemory, bytes_: int) -> None:
    with memory.cap(bytes_), pytest.raises(MemoryError):
        torch.ones(1)
    assert torch.ones(1) == 1


@on_linux
def test_the_limit_comes_back_after_an_exception(memory: CpuMemory) -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)

    def fail(error: type[BaseException]) -> None:
        with memory.cap(memory.in_use() + 50 * MIB):
            assert resource.getrlimit(resource.RLIMIT_DATA) != before
            raise error

    for error in (ZeroDivisionError, KeyboardInterrupt, MemoryError):
        with pytest.raises(error):
            fail(error)
        assert resource.getrlimit(resource.RLIMIT_DATA) == before
    assert allocate(300 * MIB).all()


@pytest.fixture
def limited() -> Iterator[int]:
    """A process that has a limit of its own, a GiB above what it holds."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    limit = int(status["VmData"].split()[0]) * 1024 + GIB
    resource.setrlimit(resource.RLIMIT_DATA, (limit, before[1]))
    yield limit
    resource.setrlimit(resource.RLIMIT_DATA, before)


@on_linux
def test_a_limit_of_the_process_comes_back(memory: CpuMemory, limited: int) -> None:
    with memory.cap(memory.in_use() + 50 * MIB):
        assert resource.getrlimit(resource.RLIMIT_DATA)[0] < limited
    assert resource.getrlimit(resource.RLIMIT_DATA)[0] == limited
    with pytest.raises(ZeroDivisionError), memory.cap(memory.in_use() + 50 * MIB):
        raise ZeroDivisionError
    assert resource.getrlimit(resource.RLIMIT_DATA)[0] == limited


@on_linux
def test_a_cap_never_raises_a_limit_of_the_process(memory: CpuMemory, limited: int) -> None:
    with memory.cap(memory.in_use() + 100 * GIB):
        assert resource.getrlimit(resource.RLIMIT_DATA)[0] == limited
        with pytest.raises(RuntimeError) as caught:
            torch.empty(2 * GIB, dtype=torch.uint8)
        assert memory.refused(caught.value)
    assert resource.getrlimit(resource.RLIMIT_DATA)[0] == limited


@on_linux
def test_caps_nest(memory: CpuMemory) -> None:
    with memory.cap(memory.in_use() + 400 * MIB):
        outer = resource.getrlimit(resource.RLIMIT_DATA)
        with memory.cap(memory.in_use() + 50 * MIB), pytest.raises(RuntimeError):
            allocate(300 * MIB)
        assert resource.getrlimit(resource.RLIMIT_DATA) == outer
        assert allocate(300 * MIB).all()


@on_linux
@pytest.mark.parametrize(
    "cause",
    [
        RuntimeError("could not create a primitive"),
        RuntimeError("could not execute a primitive"),
        RuntimeError("can't start new thread"),
        SystemError("error return without exception set"),
    ],
    ids=repr,
)
def test_an_unspecific_error_counts_only_when_there_was_no_memory_left(
    memory: CpuMemory, cause: Exception
) -> None:
    error = raised_from(ValueError("in layer 3"), cause)
    assert not memory.refused(error)
    with memory.cap(memory.in_use() + 200 * MIB):
        assert not memory.refused(error)
        assert len(b"\1" * (50 * MIB)) == 50 * MIB
        assert not memory.refused(error)
        assert len(b"\1" * (262 * MIB)) == 262 * MIB  # given back by the time the question is asked
        assert memory.refused(error)
        assert not memory.refused(RuntimeError("the loss is NaN"))
    assert not memory.refused(error)


# -- a function by itself


@on_linux
def test_a_result_comes_back_from_another_thread(memory: CpuMemory) -> None:
    here = threading.get_ident()
    value: list[int] = []
    assert memory.isolate(lambda: value) is value
    assert memory.isolate(lambda: None) is None
    assert memory.isolate(threading.get_ident) != here


@on_linux
@pytest.mark.parametrize("kind", [ValueError, MemoryError, SystemExit, KeyboardInterrupt, StopIteration])
def test_the_very_exception_passes(memory: CpuMemory, kind: type[BaseException]) -> None:
    error = kind("as it was")

    def fail() -> None:
        raise error

    before = threading.active_count()
    with pytest.raises(kind, match="as it was") as caught:
        memory.isolate(fail)
    assert caught.value is error
    assert threading.active_count() == before


@on_linux
@pytest.mark.parametrize("enabled", [True, False])
def test_gradients_are_as_outside(memory: CpuMemory, enabled: bool) -> None:
    with torch.set_grad_enabled(enabled):
        assert memory.isolate(torch.is_grad_enabled) is enabled
        assert torch.is_grad_enabled() is enabled
        memory.isolate(lambda: torch.set_grad_enabled(not enabled))
        assert torch.is_grad_enabled() is enabled


@on_linux
def test_inference_mode_is_as_outside(memory: CpuMemory) -> None:
    assert not memory.isolate(torch.is_inference_mode_enabled)
    with torch.inference_mode():
        assert memory.isolate(torch.is_inference_mode_enabled)
        assert memory.isolate(lambda: torch.ones(1).is_inference())


@on_linux
def test_autocast_is_as_outside(memory: CpuMemory) -> None:
    a, b = torch.ones(4, 4), torch.ones(4, 4)
    assert memory.isolate(lambda: (a @ b).dtype) is torch.float32
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            assert memory.isolate(lambda: (a @ b).dtype) is dtype
            with torch.autocast("cpu", enabled=False):
                assert memory.isolate(lambda: (a @ b).dtype) is torch.float32


@on_linux
def test_the_number_of_threads_is_as_outside(memory: CpuMemory) -> None:
    assert memory.isolate(torch.get_num_threads) == torch.get_num_threads()


@on_linux
def test_context_variables_are_as_outside(memory: CpuMemory) -> None:
    variable = contextvars.ContextVar("variable", default="nothing")
    assert memory.isolate(variable.get) == "nothing"
    token = variable.set("something")
    assert memory.isolate(variable.get) == "something"
    memory.isolate(lambda: variable.set("inside"))
    assert variable.get() == "something"
    variable.reset(token)


@on_linux
def test_an_interruption_waits_for_the_function(memory: CpuMemory) -> None:
    """Whoever restores the model must not do so under a step that still runs."""
    main = threading.main_thread().ident
    assert main is not None
    events: list[str] = []

    def waits() -> bool:
        """Whether the main thread has started this one and waits for it to end."""
        frame = sys._current_frames()[main]
        return frame.f_code.co_name == "wait" and "start" not in callers(frame)

    def callers(frame: types.FrameType | None) -> Iterator[str]:
        while frame is not None:
            yield frame.f_code.co_name
            frame = frame.f_back

    def interrupt(number: int, frame: object) -> None:
        events.append("interrupted")
        raise KeyboardInterrupt

    def step() -> None:
        for number in range(1, 3):
            while not waits():
                time.sleep(0.001)
            signal.pthread_kill(main, signal.SIGINT)
            while len(events) < number:
                time.sleep(0.001)
        events.append("done")

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            memory.isolate(step)
        events.append("left")
    finally:
        signal.signal(signal.SIGINT, before)
    assert events == ["interrupted", "interrupted", "done", "left"]


@on_linux
def test_convolutions_work_after_one_ran_out_of_memory(memory: CpuMemory) -> None:
    """Not a page was left for their kernels."""

    def convolve(channels: int) -> None:
        size = 16 + channels
        nn.functional.conv2d(torch.ones(1, channels, size, size), torch.ones(channels, channels, 3, 3))

    def exhaust() -> int:
        refused = 0
        with memory.cap(memory.in_use() + 100 * MIB), contextlib.ExitStack() as stack:
            for power in range(26, 11, -1):  # from 64 MiB to a page, until no page is left
                with contextlib.suppress(OSError):
                    while True:  # never touched, so that the operations themselves are let through
                        private = mmap.mmap(-1, 1 << power, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                        stack.enter_context(private)
            for channels in range(33, 36):
                try:
                    convolve(channels)
                except Exception as error:
                    if not memory.refused(error):
                        raise
                    refused += 1
        return refused

    for _ in range(3):
        assert memory.isolate(exhaust) > 0
        for channels in range(8, 14):
            convolve(channels)
            memory.isolate(lambda channels=channels: convolve(channels + 10))  # type: ignore[misc]
