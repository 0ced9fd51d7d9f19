"""The memory of a CUDA device, and searches under it, on the stand-in for a device."""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from linnaeus.autobatch import AutoBatchResult, auto_find_batch_size
from linnaeus.autobatch.find import BatchSizeFinder, _warn_once
from linnaeus.errors import AutoBatchError
from linnaeus.memory.allocator import MIB
from linnaeus.memory.device import GIB, AcceleratorMemory, CudaMemory, device_memory, empty_cache, synchronize
from tests.helpers.fake_cuda import DEVICE, FakeCuda, mebibytes

PLACEMENT = CudaMemory.placement_bytes
CONTEXT, TENANTS, TOTAL = 100 * MIB, 60 * MIB, 1000 * MIB


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    with FakeCuda(TOTAL, context_bytes=CONTEXT, tenants_bytes=TENANTS).installed() as device:
        yield device


@pytest.fixture(autouse=True)
def _warnings_not_given_yet() -> None:
    _warn_once.cache_clear()


# --- what is measured ---


@pytest.mark.parametrize("kind", [CudaMemory, AcceleratorMemory])
def test_budget_is_the_fraction_less_what_others_and_the_context_hold(
    cuda: FakeCuda, kind: Callable[[torch.device], AcceleratorMemory]
) -> None:
    memory = kind(DEVICE)
    assert memory.total_bytes == TOTAL
    assert memory.outside() == CONTEXT + TENANTS
    assert memory.budget(0.8, None) == 800 * MIB - CONTEXT - TENANTS
    held = mebibytes(100)
    assert memory.budget(0.8, None) == 800 * MIB - CONTEXT - TENANTS, "its own tensors are within the budget"
    cuda.tenants_bytes += 300 * MIB
    cuda.grow_context(50 * MIB)
    assert memory.budget(0.8, None) == 800 * MIB - CONTEXT - TENANTS - 350 * MIB
    assert memory.budget(0.1, None) < 0
    assert held.nbytes == memory.in_use()


@pytest.mark.parametrize("kind", [CudaMemory, AcceleratorMemory])
def test_a_memory_limit_bounds_this_process_alone(
    cuda: FakeCuda, kind: Callable[[torch.device], AcceleratorMemory]
) -> None:
    memory = kind(DEVICE)
    assert memory.budget(0.5, 300 * MIB) == 150 * MIB
    cuda.tenants_bytes = 100 * MIB
    assert memory.budget(0.5, 300 * MIB) == 150 * MIB, "what others use does not count against it"
    cuda.tenants_bytes = 300 * MIB
    assert memory.budget(0.5, 300 * MIB) == memory.budget(0.5, None) == 100 * MIB
    assert memory.budget(0.5, 10 * TOTAL) == 100 * MIB


def test_peak_and_use_are_what_the_allocator_reserves(cuda: FakeCuda) -> None:
    memory = device_memory(DEVICE)
    held = mebibytes(31)
    del held
    assert (memory.in_use(), memory.peak()) == (32 * MIB, 32 * MIB)
    memory.clean()
    assert (memory.in_use(), memory.peak()) == (0, 32 * MIB)
    memory.reset_peak()
    assert memory.peak() == 0
    assert memory.num_retries() == 0
    held = mebibytes(500)
    del held
    assert mebibytes(600).nbytes == 600 * MIB
    assert memory.num_retries() == 1
    synchronize(DEVICE)


def test_older_torch_has_no_memory_functions_in_its_accelerator_module(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in dir(torch.accelerator):
        if "memory" in name or name == "empty_cache":
            monkeypatch.delattr(torch.accelerator, name)
    for memory in (device_memory(DEVICE), AcceleratorMemory(DEVICE)):
        held = mebibytes(20)
        del held
        memory.clean()
        assert memory.in_use() == 0
        assert memory.budget(1.0, None) == TOTAL - CONTEXT - TENANTS
    assert find(Loop(), max_batch_size=2).batch_size == 2
    empty_cache(DEVICE)
    with pytest.raises(NotImplementedError, match="mps"):
        device_memory(torch.device("mps"))


# --- the cap ---


def test_the_cap_refuses_what_is_above_it_and_is_gone_afterwards(cuda: FakeCuda) -> None:
    memory = CudaMemory(DEVICE)
    with memory.cap(100 * MIB):
        held = mebibytes(100)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            mebibytes(2)
    assert memory.refused(caught.value)
    assert cuda.allocator.allowed_bytes is None
    assert held.nbytes + mebibytes(200).nbytes == 300 * MIB


@pytest.mark.parametrize("from_settings", [False, True])
def test_a_cap_that_the_user_has_set_is_never_raised(from_settings: bool) -> None:
    cuda = FakeCuda(TOTAL, context_bytes=CONTEXT, fraction=0.3 if from_settings else 1.0)
    with cuda.installed():
        if not from_settings:
            torch.cuda.set_per_process_memory_fraction(0.3, 0)
        memory = CudaMemory(DEVICE)
        assert memory.budget(1.0, None) == memory.budget(0.5, None) == 300 * MIB
        assert memory.budget(0.2, None) == 100 * MIB
        assert memory.budget(1.0, 50 * MIB) == 50 * MIB
        for cap_mib, fitting_mib in ((TOTAL // MIB, 300), (600, 300), (300, 300), (100, 100)):
            with memory.cap(cap_mib * MIB):
                assert mebibytes(fitting_mib).nbytes == fitting_mib * MIB
                empty_cache(DEVICE)
                with pytest.raises(torch.OutOfMemoryError):
                    mebibytes(fitting_mib + 2)
            assert cuda.allocator.allowed_bytes == 300 * MIB


def test_the_cap_that_was_there_is_restored_to_the_byte() -> None:
    """The allocator rounds a fraction down to bytes; one that is read and set again may be a byte less."""
    total_bytes = 85_017_624_576
    draw = random.Random(0)
    num_drifted = 0
    cuda = FakeCuda(total_bytes)
    with cuda.installed():
        memory = CudaMemory(DEVICE)
        for _ in range(300):
            cuda.allocator.allowed_bytes = before_bytes = draw.randrange(total_bytes)
            cap_bytes = draw.randrange(total_bytes)
            with contextlib.suppress(ZeroDivisionError), memory.cap(cap_bytes):
                assert cuda.allocator.allowed_bytes == min(cap_bytes, before_bytes)
                raise ZeroDivisionError
            assert cuda.allocator.allowed_bytes == before_bytes
            cuda.set_per_process_memory_fraction(cuda.get_per_process_memory_fraction())
            num_drifted += cuda.allocator.allowed_bytes != before_bytes
    assert num_drifted, "else every way to restore it would do"


def test_an_ambiguous_error_counts_if_the_allocator_has_refused_a_request(cuda: FakeCuda) -> None:
    memory = CudaMemory(DEVICE)
    error = RuntimeError("CUDNN_STATUS_NOT_SUPPORTED")
    with memory.cap(100 * MIB):
        assert not memory.refused(error)
        with pytest.raises(torch.OutOfMemoryError):
            mebibytes(200)
        assert memory.refused(error)
        assert not memory.refused(ValueError("wrong"))
    with memory.cap(100 * MIB):
        assert not memory.refused(error), "that was in another trial"


def test_an_ambiguous_error_counts_if_little_is_free_for_libraries(cuda: FakeCuda) -> None:
    memory = CudaMemory(DEVICE)
    error = RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`")
    assert not memory.refused(error)
    cuda.tenants_bytes += cuda.free_bytes - 20 * MIB
    assert memory.refused(error)
    assert not memory.refused(RuntimeError("NaN"))


def test_what_was_refused_before_a_clean_up_is_no_evidence(cuda: FakeCuda) -> None:
    memory = CudaMemory(DEVICE)
    error = RuntimeError("unable to find an engine to execute this computation")
    with pytest.raises(torch.OutOfMemoryError):
        mebibytes(2000)
    assert memory.refused(error)
    memory.clean()
    assert not memory.refused(error)


# --- searches ---


class Loop:
    """A plain training loop with AdamW."""

    def __init__(self, width: int = 64) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.state = self.model, self.optimizer
        self.width = width

    def make_batch(self, size: int) -> Tensor:
        return torch.ones(size * 512, self.width)

    def step(self, batch: Tensor) -> None:
        self.model(batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self, size: int, num_steps: int = 5) -> None:
        for _ in range(num_steps):
            self.step(self.make_batch(size))


class Doubling:
    """A step of two MiB for each sample and no state."""

    state = ()

    def make_batch(self, size: int) -> Tensor:
        return torch.empty(size * MIB, dtype=torch.uint8)

    def step(self, batch: Tensor) -> None:
        torch.empty_like(batch)

    run = Loop.run


def find(loop: Loop | Doubling, **arguments: Any) -> AutoBatchResult:
    step = arguments.pop("step", loop.step)
    return auto_find_batch_size(
        step, loop.make_batch, state=loop.state, device="cuda",
        **{"max_batch_size": 4096, "tolerance": 0.0, **arguments},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fraction", "user_fraction"),
    [(0.5, 1.0), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((0.8, 0.4), (0.97, 1.0)))],
)
def test_training_reserves_no_more_than_the_search_promised(fraction: float, user_fraction: float) -> None:
    loop = Loop()
    cuda = FakeCuda(300 * MIB, context_bytes=40 * MIB, tenants_bytes=10 * MIB, fraction=user_fraction)
    with cuda.installed(*loop.state):
        result = find(loop, target_memory_fraction=fraction)
        assert result.limited_by == "memory"
        assert result.certified
        allowed = min(int(fraction * 300 * MIB) - 50 * MIB, int(user_fraction * 300 * MIB))
        assert result.budget_bytes == pytest.approx(allowed, abs=1)
        empty_cache(DEVICE)
        cuda.reset_peak_memory_stats()
        loop.run(result.batch_size)
        usable = allowed - PLACEMENT
        assert usable - 22 * MIB < cuda.max_memory_reserved() <= usable, "no segment fits any more"
        assert cuda.max_memory_reserved() + PLACEMENT == result.peak_bytes
    larger, loop = int(1.2 * result.batch_size), Loop()
    unlimited = FakeCuda(GIB)
    with unlimited.installed(*loop.state):
        loop.run(larger)
    assert unlimited.max_memory_reserved() > usable, "a larger size would break the promise"


def test_kernels_that_load_while_sizes_are_tried_lower_the_budget() -> None:
    cuda, loop = FakeCuda(300 * MIB, context_bytes=20 * MIB), Doubling()
    loaded = set()

    def step(batch: Tensor) -> None:
        if len(batch) > 64 * MIB and "kernel" not in loaded:  # only large batches use it
            loaded.add("kernel")
            cuda.grow_context(30 * MIB)
        loop.step(batch)

    with cuda.installed():
        result = find(loop, step=step, target_memory_fraction=0.9)
        assert loaded
        assert result.budget_bytes == 270 * MIB - 50 * MIB
        assert (result.batch_size, result.limited_by) == (98, "memory")  # 220 - PLACEMENT, in two tensors


@pytest.mark.parametrize("moment", [9, 11, 13, 15, 17])  # the first eight are those of the warm-up
@pytest.mark.parametrize("fraction", [0.8, 1.0])
def test_a_process_that_arrives_while_sizes_are_tried_leaves_a_size_that_fits(
    moment: int, fraction: float, caplog: pytest.LogCaptureFixture
) -> None:
    cuda, loop = FakeCuda(300 * MIB, context_bytes=20 * MIB), Doubling()
    arrived = []

    def arrive() -> None:
        cuda.tenants_bytes = min(cuda.free_bytes, 150 * MIB)
        arrived.append(cuda.tenants_bytes)

    with caplog.at_level(logging.INFO, "linnaeus.autobatch"), cuda.installed():
        cuda.at_allocation(moment, arrive)
        result = find(loop, target_memory_fraction=fraction)
        assert arrived
        budget_bytes = int(fraction * 300 * MIB) - 20 * MIB - arrived[0]
        assert result.budget_bytes == budget_bytes
        assert (
            result.batch_size == (budget_bytes - PLACEMENT) // (4 * MIB) * 2
        )  # two tensors in segments of 2 MiB
        before = cuda.memory_stats()
        empty_cache(DEVICE)
        loop.run(result.batch_size)
        after = cuda.memory_stats()
        assert (after["num_ooms"], after["num_alloc_retries"]) == (
            before["num_ooms"],
            before["num_alloc_retries"],
        )
    for num_bytes in (20 * MIB + arrived[0], 20 * MIB):  # held by others now, and when the search began
        assert f"{num_bytes / GIB:.2f} GiB" in caplog.text


def arriving_after_the_search(cuda: FakeCuda, num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process takes memory between the last trial of a search and its confirmation."""
    confirmed = BatchSizeFinder._confirmed

    def confirm(finder: BatchSizeFinder, *arguments: Any) -> Any:
        cuda.allocator.empty_cache()
        cuda.tenants_bytes += num_bytes
        return confirmed(finder, *arguments)

    monkeypatch.setattr(BatchSizeFinder, "_confirmed", confirm)


def test_a_process_that_arrives_before_the_confirmation_is_named_with_its_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cuda, loop = FakeCuda(3 * GIB, context_bytes=GIB // 4), Doubling()
    with caplog.at_level(logging.INFO, "linnaeus.autobatch"), cuda.installed():
        undisturbed = find(loop)
        assert "cuda:0" not in caplog.text
        arriving_after_the_search(cuda, GIB, monkeypatch)
        result = find(loop)
    assert result.batch_size < undisturbed.batch_size
    assert result.peak_bytes <= result.budget_bytes == int(0.8 * 3 * GIB) - 5 * GIB // 4
    for part in (str(undisturbed.batch_size), "1.25 GiB", "cuda:0", "0.25 GiB"):
        assert part in caplog.text


def test_the_size_of_a_search_without_confirmation_would_not_fit() -> None:
    """Without this, the tests above could not fail."""
    cuda, loop = FakeCuda(3 * GIB, context_bytes=GIB // 4), Doubling()
    with cuda.installed():
        with BatchSizeFinder(loop.step, loop.make_batch, device="cuda", max_batch_size=4096) as finder:
            result = finder.find(confirm=False)
        cuda.tenants_bytes = 2 * GIB
        with pytest.raises(torch.OutOfMemoryError):
            loop.run(result.batch_size)


def test_a_process_that_arrives_again_during_the_second_search_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda, loop = FakeCuda(3 * GIB, context_bytes=GIB // 4), Doubling()
    below = BatchSizeFinder._search_below
    searched = []

    def search_below(finder: BatchSizeFinder, *arguments: Any) -> Any:
        found = below(finder, *arguments)
        searched.append(found.size)
        if len(searched) < 4:
            cuda.allocator.empty_cache()
            cuda.tenants_bytes += 100 * MIB
        return found

    monkeypatch.setattr(BatchSizeFinder, "_search_below", search_below)
    with cuda.installed():
        arriving_after_the_search(cuda, GIB, monkeypatch)
        result = find(loop)
        assert result.budget_bytes == int(0.8 * 3 * GIB) - 5 * GIB // 4 - 300 * MIB
        assert result.peak_bytes <= result.budget_bytes < 2 * (result.batch_size + 2) * MIB + PLACEMENT
    assert searched == sorted(searched, reverse=True)
    assert len(searched) == 4


@pytest.mark.parametrize("is_early", [False, True])
def test_when_others_leave_nothing_the_error_names_what_they_hold(
    is_early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda, loop = FakeCuda(3 * GIB, context_bytes=GIB // 4), Doubling()
    with cuda.installed():
        if is_early:
            cuda.tenants_bytes = 5 * GIB // 2
        else:
            arriving_after_the_search(cuda, 5 * GIB // 2, monkeypatch)
        with pytest.raises(AutoBatchError) as caught:
            find(loop)
    for part in ("cuda:0", "2.75 GiB", f"{2.75 if is_early else 0.25} GiB"):
        assert part in str(caught.value)
    assert "MEMORY_LIMIT_GB" not in str(caught.value)


def test_when_a_cap_of_the_user_leaves_nothing_the_error_names_it() -> None:
    loop = Loop()
    with FakeCuda(GIB, fraction=0.001).installed(), pytest.raises(AutoBatchError) as caught:
        find(loop, memory_limit_gb=0.5)
    for part in ("0.00 GiB", "memory_limit_gb", "0.50 GiB"):
        assert part in str(caught.value)
    assert "others" not in str(caught.value)


# --- warnings ---


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"garbage_collection_threshold": 0.6}, "garbage_collection_threshold"),
        ({"max_split_bytes": 64 * MIB}, "max_split_size_mb"),
        ({}, None),
    ],
)
def test_settings_under_which_a_trial_looks_smaller_are_named_once(
    settings: dict[str, Any], named: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with FakeCuda(TOTAL, **settings).installed():
        for mode in ("train", "val"):
            find(Doubling(), mode=mode, max_batch_size=4)
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == (0 if named is None else 1)
    if named is not None:
        assert warnings[0].name == "linnaeus.autobatch"
        assert named in warnings[0].message


def test_another_allocator_has_no_such_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: torch.device) -> None:
        raise RuntimeError("Calling snapshot with backend:cudaMallocAsync is not meaningful")

    with FakeCuda(TOTAL, garbage_collection_threshold=0.6).installed():
        assert len(CudaMemory(DEVICE).caveats()) == 1
        monkeypatch.setattr(torch.cuda.memory, "_snapshot", refuse)
        assert CudaMemory(DEVICE).caveats() == []


@pytest.mark.parametrize(
    "settings", [{}, {"garbage_collection_threshold": 0.3}, {"max_split_bytes": 32 * MIB}], ids=str
)
def test_a_trial_under_a_cap_looks_smaller_with_these_settings_alone(settings: dict[str, Any]) -> None:
    """What the warnings say: blocks that training keeps are released under the cap, and no retry tells."""

    def step() -> None:
        for mib in (100, 120, 140, 160):
            mebibytes(mib)

    cuda = FakeCuda(TOTAL, **settings)
    with cuda.installed():
        memory = CudaMemory(DEVICE)
        with memory.cap(330 * MIB):
            step()
        looks_larger = memory.num_retries() > 0  # a retry makes the trial fail
        memory.clean()
        memory.reset_peak()
        step()
        assert memory.peak() == 520 * MIB
    assert looks_larger == (not settings)


@pytest.mark.parametrize(
    ("fraction", "limit_gb", "num_warnings"),
    [(0.97, None, 0), (0.98, None, 1), (0.97, 0.5, 0), (1.0, 0.5, 1), (1.0, 50, 1)],
)
def test_a_fraction_that_leaves_no_room_is_warned_about_once(
    fraction: float, limit_gb: float | None, num_warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    with FakeCuda(TOTAL).installed():
        for _ in range(2):
            find(Doubling(), target_memory_fraction=fraction, memory_limit_gb=limit_gb, max_batch_size=4)
    texts = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(texts) == num_warnings
    assert all("0.97" in text and ("memory_limit_gb" in text) == (limit_gb == 0.5) for text in texts)
