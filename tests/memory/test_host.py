"""What a process holds on the host, its budget, and the cap."""

import contextlib
import mmap
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch import nn

from linnaeus.autobatch.memory.device import GIB
from linnaeus.autobatch.memory.host import CpuMemory, status_bytes
from tests.helpers import children
from tests.helpers.ledger import resident_bytes
from tests.memory.conftest import CPU, MACHINE, MIB, on_linux

pytestmark = on_linux
NOISE = 8 * MIB  # what the rest of the process takes or gives back between two readings


@pytest.fixture(autouse=True)
def _idle_machine(monkeypatch):
    """What else runs on this machine changes no budget."""
    monkeypatch.setattr(
        psutil, "virtual_memory", lambda: SimpleNamespace(total=MACHINE, available=MACHINE)
    )


# -- the budget


def test_the_budget_is_a_groups_fraction_without_others(cgroups):
    cgroups.memory()  # the first one loads libraries
    total, others = min(2 * GIB, MACHINE // 8), MACHINE  # the machine itself never decides
    cgroups.join("0::/job")
    cgroups.v2("/job", total, used=others + resident_bytes() + 50 * MIB, inactive=50 * MIB)
    budget = cgroups.memory().budget(0.5, None)
    assert budget == pytest.approx(0.5 * total - others, abs=NOISE)


def test_the_tightest_pool_decides_on_the_budget(cgroups):
    """A wide group that is nearly full leaves less than a narrow one that is empty."""
    wide, narrow = min(4 * GIB, MACHINE // 4), min(2 * GIB, MACHINE // 8)
    cgroups.join("0::/wide/narrow")
    cgroups.v2("/wide", wide, used=wide - 200 * MIB)
    cgroups.v2("/wide/narrow", narrow, used=0)
    assert cgroups.memory().budget(1.0, None) == pytest.approx(
        resident_bytes() + 200 * MIB, abs=NOISE
    )


def test_a_smaller_device_bounds_this_process_alone(cgroups):
    assert cgroups.memory().budget(0.95, 64 * MIB) == int(0.95 * 64 * MIB)
    unlimited = cgroups.memory().budget(0.95, None)
    assert cgroups.memory().budget(0.95, 100 * MACHINE) == pytest.approx(unlimited, abs=GIB)


def test_the_ranks_of_a_host_divide_the_budget_evenly(cgroups, monkeypatch):
    """What all ranks hold is theirs to share: this process, and whatever runs beside it."""
    total, used = GIB, MACHINE
    cgroups.join("0::/job")
    cgroups.v2("/job", total, used=used)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    family = SimpleNamespace(children=lambda: [psutil.Process()] * 3)
    monkeypatch.setattr(psutil.Process, "parent", lambda process: family)
    memory = cgroups.memory()
    expected = (total - used + 3 * resident_bytes()) / 2
    assert memory.budget(1.0, None) == pytest.approx(expected, abs=2 * NOISE)
    assert memory.total_bytes == total // 2


# -- the peak


@pytest.fixture(scope="module")
def loaded():
    """A process that has loaded the libraries of a step: their pages are memory that it holds."""
    memory = CpuMemory(CPU)
    with memory.cap(memory.in_use() + GIB):
        train_once()


@pytest.fixture
def memory(loaded):
    memory = CpuMemory(CPU)
    memory.clean()
    memory.settle()  # without what the C library kept of earlier tests
    yield memory
    memory.clean()


def test_the_peak_of_tensors_is_exact_until_it_is_reset(memory):
    with memory.cap(memory.in_use() + GIB):
        memory.reset_peak()
        before = memory.in_use()
        assert memory.peak() == before
        block = allocate(100 * MIB)
        assert memory.in_use() == before + 100 * MIB
        del block
        assert memory.in_use() == before
        assert memory.peak() == before + 100 * MIB
        block = allocate(20 * MIB)
        memory.reset_peak()
        held = memory.in_use()
        del block
        assert memory.peak() == held, "it starts at what is held"


HELD_AND_RESIDENT = """
import torch
from linnaeus.autobatch.memory.host import CpuMemory
from tests.helpers.ledger import resident_bytes

memory = CpuMemory(torch.device("cpu"))
print(memory.in_use(), resident_bytes())
block = torch.ones(100 << 20, dtype=torch.uint8)
memory.settle()
print(memory.in_use(), resident_bytes())
memory.settle(excluded_bytes=block.nbytes)
print(memory.in_use() + block.nbytes, resident_bytes())
index = [(number,) for number in range(1 << 20)]
memory.settle()
print(memory.in_use(), resident_bytes())
"""


def test_what_the_process_held_before_counts_as_the_system_does(tmp_path):
    """Tensors, and objects of Python that are loaded between two searches."""
    done = children.python("-c", HELD_AND_RESIDENT, cwd=tmp_path)
    assert done.code == 0, done.err
    held, resident = zip(*(map(int, line.split()) for line in done.out.splitlines()), strict=True)
    assert held == pytest.approx(resident, abs=NOISE)
    assert held[3] - held[1] > 70 * MIB


@pytest.mark.parametrize(("unseen_mib", "counts"), [(2, False), (300, True)])
def test_memory_that_no_operation_returns_counts_if_it_is_much(memory, unseen_mib, counts):
    """It raises the peak after it was freed, and ends a large operation while it is held."""
    with memory.cap(memory.in_use() + 350 * MIB):
        held = allocate(20 * MIB)
        memory.reset_peak()
        before = memory.in_use()
        block = allocate(20 * MIB)
        unseen = bytearray(b"\1") * (unseen_mib * MIB)
        with pytest.raises(MemoryError) if counts else contextlib.nullcontext():
            allocate(40 * MIB)
        del held, unseen
        peak = before + (block.nbytes + 300 * MIB if counts else 60 * MIB)
        assert memory.peak() == pytest.approx(peak, abs=60 * MIB if counts else 0)


def test_pages_of_files_do_not_count_as_growth(memory):
    """Where memory is short, the system drops libraries and reads them again."""
    library = Path(torch.__file__).parent / "lib/libtorch_cpu.so"
    with library.open("rb") as file, memory.cap(memory.in_use() + 60 * MIB):
        memory.reset_peak()
        before, resident = memory.in_use(), status_bytes("RssFile")
        pages = mmap.mmap(file.fileno(), 200 * MIB, prot=mmap.PROT_READ)
        assert sum(pages[:: mmap.PAGESIZE]) > 0
        assert status_bytes("RssFile") - resident > 100 * MIB
        allocate(20 * MIB)
        assert memory.peak() == before + 20 * MIB


FREED = """
import torch
from linnaeus.autobatch.memory.device import device_memory
from linnaeus.autobatch.memory.host import status_bytes

def freed_mib():
    blocks = [torch.zeros(2**18) for _ in range(200)]
    before = status_bytes("VmRSS")
    del blocks[::2]
    return (before - status_bytes("VmRSS")) / 2**20

memory = device_memory(torch.device("cpu"))
with memory.cap(memory.in_use() + 2**30):
    print(freed_mib())
print(freed_mib())
"""


def test_freed_blocks_return_to_the_system_in_trials_alone(tmp_path):
    """Gaps between blocks would make two trials of a size peak differently. Training uses them again."""
    done = children.python("-c", FREED, cwd=tmp_path)
    in_trial, in_training = map(float, done.out.split())
    assert in_trial == pytest.approx(100, abs=8)
    assert in_training < 50


# -- the cap


def train_once():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5)
    )
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        loss = model(torch.randn(4, 3, 8, 8)).square().mean()
        loss.backward()
        optimizer.step()
    return loss.item()


def allocate(num_bytes):
    return torch.ones(num_bytes, dtype=torch.uint8)


@pytest.mark.parametrize(
    "operation", [lambda rows: allocate(100 * GIB), lambda rows: rows @ rows.T]
)
def test_an_operation_far_above_the_cap_does_not_begin(memory, operation):
    """The system would end the process instead of refusing."""
    expected = train_once()
    rows = torch.ones(1 << 18, 2)
    memory.reset_peak()
    with memory.cap(memory.in_use() + 20 * MIB):
        with pytest.raises(MemoryError) as caught:
            operation(rows)
        assert memory.refused(caught.value)
        assert status_bytes("VmHWM") - memory.in_use() < 2 * NOISE
        assert allocate(10 * MIB).all()
    assert train_once() == expected


def test_a_kernel_of_onednn_that_lacks_memory_was_refused(memory):
    assert memory.refused(RuntimeError("could not create a primitive"))
    assert not memory.refused(RuntimeError("can't start new thread"))


def test_the_operation_that_exceeds_the_cap_fails(memory):
    """To the byte."""
    with memory.cap(memory.in_use() + 10 * MIB):
        half = allocate(5 * MIB)
        for excess in (-1, 0):
            assert allocate(5 * MIB + excess).nbytes == 5 * MIB + excess
        with pytest.raises(MemoryError) as caught:
            allocate(5 * MIB + 1)
        assert memory.refused(caught.value)
        del half
        assert torch.ones(1) == 1


def test_under_a_cap_below_what_is_held_nothing_runs(memory):
    for cap_bytes in (-GIB, 1):
        with memory.cap(cap_bytes), pytest.raises(MemoryError):
            torch.ones(1)
    assert torch.ones(1) == 1
