"""The memory of a CUDA device, and searches under it."""

import ctypes
import json
import logging
from functools import partial

import pytest
import torch

from linnaeus.autobatch import AutoBatchResult, auto_find_batch_size
from linnaeus.autobatch.finder import _warn_once
from linnaeus.autobatch.memory.device import GIB, AcceleratorMemory, CudaMemory, device_memory
from linnaeus.autobatch.memory.interface import empty_cache
from linnaeus.autobatch.observer import SearchObserver
from tests.helpers.runs import SMALL
from tests.phantom import is_on
from tests.phantom.build import on_phantoms

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

GPU = torch.device("cuda", 0)
MIB = 1024**2


def mebibytes(number):
    return torch.empty(number * MIB, dtype=torch.uint8, device=GPU)


@pytest.fixture
def others_take():
    """Takes memory beside the allocator: it is of this process, but counts as that of others does."""
    name = None if is_on() else f"libcudart.so.{(torch.version.cuda or '').partition('.')[0]}"
    runtime, blocks = ctypes.CDLL(name), []

    def take(num_bytes):
        blocks.append(ctypes.c_void_p())
        assert runtime.cudaMalloc(ctypes.byref(blocks[-1]), ctypes.c_size_t(num_bytes)) == 0

    yield take
    for block in blocks:
        assert runtime.cudaFree(block) == 0


@pytest.fixture(autouse=True)
def _as_at_the_start():
    _warn_once.cache_clear()
    CudaMemory(GPU).clean()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0, GPU)
    CudaMemory(GPU).clean()


# --- what is measured ---


@pytest.mark.parametrize("kind", [CudaMemory, AcceleratorMemory])
def test_the_budget_leaves_out_others_and_the_context(kind, others_take):
    memory = kind(GPU)
    outside = memory.outside()
    budget = memory.budget(0.8, None)
    assert budget == int(0.8 * memory.total_bytes) - outside
    held = mebibytes(100)
    assert memory.budget(0.8, None) == budget, "its own tensors are within the budget"
    others_take(300 * MIB)
    assert memory.budget(0.8, None) == budget - 300 * MIB
    assert memory.budget(outside / memory.total_bytes, None) < 0
    assert memory.budget(0.5, 300 * MIB) == 150 * MIB, "others do not count against a limit"
    assert memory.in_use() >= held.nbytes


def test_peak_and_use_are_what_the_allocator_reserves():
    memory = device_memory(GPU)
    before = memory.in_use()
    memory.reset_peak()
    held = mebibytes(31)
    del held
    assert (memory.in_use() - before, memory.peak() - before) == (32 * MIB, 32 * MIB)
    memory.clean()
    assert (memory.in_use() - before, memory.peak() - before) == (0, 32 * MIB)
    num_retries = memory.num_retries()
    with memory.cap(before + 800 * MIB):
        held = mebibytes(500)
        del held
        assert mebibytes(600).nbytes == 600 * MIB
    assert memory.num_retries() == num_retries + 1


# --- the cap ---


def test_the_cap_refuses_what_is_above_it_and_is_gone_afterwards():
    memory = CudaMemory(GPU)
    with memory.cap(memory.in_use() + 100 * MIB):
        held = mebibytes(100)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            mebibytes(50)
    assert memory.refused(caught.value)
    assert held.nbytes + mebibytes(200).nbytes == 300 * MIB


def test_a_cap_that_the_user_has_set_is_never_raised():
    memory = CudaMemory(GPU)
    torch.cuda.set_per_process_memory_fraction(0.03, GPU)
    allowed = torch.cuda.get_per_process_memory_fraction(GPU)
    budget = memory.budget(1.0, None)
    assert budget == memory.budget(0.5, None) == pytest.approx(0.03 * memory.total_bytes, abs=1)
    assert memory.budget(1.0, 50 * MIB) == 50 * MIB
    with memory.cap(memory.total_bytes), pytest.raises(torch.OutOfMemoryError):
        mebibytes(budget // MIB + 2)
    assert torch.cuda.get_per_process_memory_fraction(GPU) == allowed


def test_an_ambiguous_error_counts_where_memory_ran_short(others_take):
    """The allocator has refused a request, or libraries have no room of their own."""
    memory = CudaMemory(GPU)
    error = RuntimeError("CUDNN_STATUS_NOT_SUPPORTED")
    with memory.cap(memory.in_use() + 100 * MIB):
        assert not memory.refused(error)
        with pytest.raises(torch.OutOfMemoryError):
            mebibytes(200)
        assert memory.refused(error)
    with memory.cap(memory.in_use() + 100 * MIB):
        assert not memory.refused(error), "that was in another trial"
    others_take(torch.cuda.mem_get_info(GPU)[0] - 20 * MIB)
    assert memory.refused(error)
    assert not memory.refused(RuntimeError("NaN"))


# --- searches ---


def fraction(room_bytes):
    """The fraction of the device that leaves so much to this process."""
    memory = CudaMemory(GPU)
    return (memory.outside() + room_bytes) / memory.total_bytes


def test_a_run_on_the_device_trains_with_the_sizes_found(run, tmp_path):
    outcome = run(
        *SMALL,
        "EXPERIMENT.DEVICE=cuda",
        "DATA.AUTOBATCH.ENABLED=True",
        "DATA.AUTOBATCH.MIN_STEPS_PER_EPOCH=1",
        "TRAIN.AMP=fp16",
        f"DATA.AUTOBATCH.TARGET_MEMORY_FRACTION={fraction(GIB // 2)}",
        "DATA.AUTOBATCH.MAX_BATCH_SIZE=32",
    )
    assert outcome.code == 0, outcome.err
    found = json.loads((tmp_path / "runs/small/autobatch.json").read_text())
    assert found["environment"]["device_name"] == torch.cuda.get_device_name(GPU)
    for mode in ("train", "val"):
        result = AutoBatchResult.from_dict(mode, found[mode])
        assert 0 < result.peak_bytes <= result.budget_bytes < result.total_bytes
    assert torch.cuda.get_per_process_memory_fraction(GPU) == 1.0


class Arriving(SearchObserver):
    """Others take memory after some trials of a search, then after each further one that has a size left."""

    def __init__(self, take, num_trials, *bytes_of_each):
        self._take, self._num_trials, self._rest = take, num_trials, [*bytes_of_each]

    def trial_finished(self, trial, budget_bytes):
        self._num_trials -= 1
        if self._num_trials <= 0 and self._rest:
            empty_cache(GPU)
            self._take(self._rest.pop(0))


@pytest.mark.parametrize("arrivals", [[GIB], [GIB, 100 * MIB, 100 * MIB]], ids=len)
def test_others_before_the_confirmation_are_named_and_counted(arrivals, others_take, caplog):
    """The negative control: what was found before would not fit."""
    caplog.set_level(logging.INFO, "linnaeus.autobatch")
    find = partial(
        auto_find_batch_size,
        torch.empty_like,
        mebibytes,  # with the step, two MiB a sample
        device=GPU,
        target_memory_fraction=fraction(3 * GIB),
        max_batch_size=None,
        tolerance=0.0,
    )
    undisturbed = find()
    assert "cuda:0" not in caplog.text
    before = len(undisturbed.trials) - 1  # without the confirmation
    result = find(observer=Arriving(others_take, before, *arrivals))
    assert result.budget_bytes == undisturbed.budget_bytes - sum(arrivals)
    assert result.peak_bytes <= result.budget_bytes < undisturbed.peak_bytes
    assert str(undisturbed.batch_size) in caplog.text
    for part in ("cuda:0", f"{CudaMemory(GPU).outside() / GIB:.2f} GiB"):
        assert part in caplog.text


# --- warnings ---


SETTINGS = """
import torch
from linnaeus.autobatch.memory.device import CudaMemory
memory = CudaMemory(torch.device("cuda", 0))
MIB = 1 << 20

def looks_larger():
    torch.cuda.empty_cache()
    num_retries = memory.num_retries()
    with memory.cap(330 * MIB):
        for mib in (100, 120, 140, 160):
            torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")
    return memory.num_retries() > num_retries

print(looks_larger(), *(text.split()[0] for text in memory.caveats()))
torch.cuda.memory._set_allocator_settings("SETTING")
print(looks_larger(), *(text.split()[0] for text in memory.caveats()))
"""


@pytest.mark.parametrize("setting", ["garbage_collection_threshold:0.3", "max_split_size_mb:32"])
def test_settings_under_which_a_trial_looks_smaller_are_named(setting):
    """Blocks that training keeps are released under the cap, and no retry tells."""
    shown = on_phantoms("-c", SETTINGS.replace("SETTING", setting), total_gib=1)
    *found, name = shown.split()
    assert found == ["True", "False"]
    assert setting.startswith(name)
