"""What a process holds on the host, its budget, the cap, and calls in a thread of their own."""

from __future__ import annotations

import contextlib
import contextvars
import mmap
import resource
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch import nn

from linnaeus.autobatch.memory.device import GIB
from linnaeus.autobatch.memory.host import CpuMemory, status_bytes
from linnaeus.autobatch.memory.oom import is_ambiguous
from linnaeus.autobatch.memory.storages import num_compiled_graphs
from tests.helpers import forks
from tests.helpers.ledger import resident_bytes
from tests.helpers.runs import wait_until
from tests.memory.conftest import CPU, MACHINE, MIB, Cgroups, on_linux

pytestmark = on_linux
ENORMOUS = GIB  # the heap keeps no such block of earlier tests: the system is asked for it
NOISE = 8 * MIB  # what the rest of the process takes or gives back between two readings


@pytest.fixture(autouse=True)
def _idle_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What else runs on this machine changes no budget."""
    monkeypatch.setattr(
        psutil, "virtual_memory", lambda: SimpleNamespace(total=MACHINE, available=MACHINE)
    )


# -- the budget


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_the_budget_is_the_fraction_of_a_group_less_what_others_use(
    cgroups: Cgroups, fraction: float
) -> None:
    cgroups.memory()  # the first one loads libraries
    total, others = (
        min(2 * GIB, MACHINE // 8),
        MACHINE,
    )  # so much that the machine itself never decides
    cgroups.join("0::/job")
    cgroups.v2("/job", total, used=others + resident_bytes() + 50 * MIB, inactive=50 * MIB)
    budget = cgroups.memory().budget(fraction, None)
    assert budget == pytest.approx(fraction * total - others, abs=NOISE)


def test_the_tightest_pool_decides_on_the_budget(cgroups: Cgroups) -> None:
    """A wide group that is nearly full leaves less than a narrow one that is empty."""
    wide, narrow = min(4 * GIB, MACHINE // 4), min(2 * GIB, MACHINE // 8)
    cgroups.join("0::/wide/narrow")
    cgroups.v2("/wide", wide, used=wide - 200 * MIB)
    cgroups.v2("/wide/narrow", narrow, used=0)
    assert cgroups.memory().budget(1.0, None) == pytest.approx(
        resident_bytes() + 200 * MIB, abs=NOISE
    )


def test_a_smaller_device_bounds_this_process_alone(cgroups: Cgroups) -> None:
    assert cgroups.memory().budget(0.95, 64 * MIB) == int(0.95 * 64 * MIB)
    unlimited = cgroups.memory().budget(0.95, None)
    assert cgroups.memory().budget(0.95, 100 * MACHINE) == pytest.approx(unlimited, abs=GIB)


def test_the_ranks_of_a_host_divide_the_budget_evenly(
    cgroups: Cgroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What all ranks hold is theirs to share: this process, and whatever runs beside it."""
    total, used = GIB, MACHINE
    cgroups.join("0::/job")
    cgroups.v2("/job", total, used=used)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    parent, family = psutil.Process().parent(), resident_bytes()
    for child in parent.children() if parent else ():
        with contextlib.suppress(psutil.NoSuchProcess):  # another test's that has ended
            family += child.memory_info().rss
    budget = cgroups.memory().budget(1.0, None)
    assert (
        (total - used + resident_bytes()) / 2 - NOISE <= budget <= (total - used + family) / 2 + GIB
    )


# -- the peak


@pytest.fixture(scope="module")
def loaded() -> None:
    """A process that has loaded the libraries of a step: their pages are memory that it holds."""
    memory = CpuMemory(CPU)
    with memory.cap(memory.in_use() + GIB):
        train_once()


@pytest.fixture
def memory(loaded: None) -> Iterator[CpuMemory]:
    memory = CpuMemory(CPU)
    memory.clean()
    memory.settle()  # without what the C library kept of earlier tests
    yield memory
    memory.clean()


def test_the_peak_of_tensors_is_exact_and_stays_until_it_is_reset(memory: CpuMemory) -> None:
    with memory.cap(memory.in_use() + GIB):
        memory.reset_peak()
        before = memory.in_use()
        assert memory.peak() == before
        block = allocate(100 * MIB)
        assert memory.in_use() == before + 100 * MIB
        del block
        assert memory.in_use() == before
        assert memory.peak() == before + 100 * MIB
        memory.reset_peak()
        assert memory.peak() == before
        block = allocate(20 * MIB)
        memory.reset_peak()
        held = memory.in_use()
        del block
        assert memory.peak() == held, "it starts at what is held"


HELD_AND_RESIDENT = """
import torch
from linnaeus.autobatch.memory.host import CpuMemory
from tests.helpers.ledger import resident_bytes
from tests.helpers.runs import wait_until

memory = CpuMemory(torch.device("cpu"))
print(memory.in_use(), resident_bytes())
block = torch.ones(100 << 20, dtype=torch.uint8)
memory.settle()
print(memory.in_use(), resident_bytes())
memory.settle(excluded_bytes=block.nbytes)
print(memory.in_use() + block.nbytes, resident_bytes())
"""


def test_what_the_process_held_before_counts_as_the_system_does(tmp_path: Path) -> None:
    """In a process in which no thread has ended yet."""
    done = forks.python("-c", HELD_AND_RESIDENT, cwd=tmp_path)
    assert done.code == 0, done.err
    for line in done.out.splitlines():
        held, resident = map(int, line.split())
        assert held == pytest.approx(resident, abs=NOISE)


@pytest.fixture
def compiled(compiles_unseen: None) -> None:
    """A process that has compiled something."""
    assert not num_compiled_graphs()
    torch.compile(torch.neg, backend="eager")(torch.ones(1))
    assert num_compiled_graphs()


@pytest.mark.usefixtures("compiled")
def test_beside_compiled_code_a_tensor_that_stays_counts_once(memory: CpuMemory) -> None:
    """Such as the optimizer's state, which the first step allocates."""
    with memory.cap(memory.in_use() + GIB):
        held = allocate(50 * MIB)
        memory.reset_peak()
        before = memory.in_use()
        state = allocate(100 * MIB)
        unseen = bytearray(b"\1") * (50 * MIB)
        assert memory.peak() == pytest.approx(before + state.nbytes + len(unseen), abs=NOISE)
        del held, state
        assert memory.peak() == pytest.approx(before + 150 * MIB, abs=NOISE)


# -- the cap


def train_once() -> float:
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


def open_files() -> set[tuple[int, str]]:
    return {(file.fd, file.path) for file in psutil.Process().open_files()}


def allocate(num_bytes: int) -> torch.Tensor:
    return torch.ones(num_bytes, dtype=torch.uint8)


def test_a_tensor_above_the_cap_is_refused_and_the_process_works_on(memory: CpuMemory) -> None:
    expected = train_once()
    before = resource.getrlimit(resource.RLIMIT_DATA)
    files = open_files()
    for _ in range(2):
        with memory.cap(memory.in_use() + 20 * MIB):
            assert allocate(10 * MIB).all()
            with pytest.raises(RuntimeError) as caught:
                torch.empty(ENORMOUS, dtype=torch.uint8)
            assert not isinstance(caught.value, MemoryError), (
                "the system has refused it, not the count"
            )
            assert memory.refused(caught.value)
            assert allocate(10 * MIB).all()
        assert resource.getrlimit(resource.RLIMIT_DATA) == before
        assert torch.empty(ENORMOUS, dtype=torch.uint8).nbytes == ENORMOUS
        assert train_once() == expected
    assert open_files() <= files


def test_python_is_refused_memory_under_the_cap_too(memory: CpuMemory) -> None:
    with memory.cap(memory.in_use() + 10 * MIB), pytest.raises(MemoryError) as caught:
        bytearray(ENORMOUS)
    assert memory.refused(caught.value)
    assert len(bytearray(ENORMOUS)) == ENORMOUS


def test_the_operation_that_takes_the_tensors_above_the_cap_fails(memory: CpuMemory) -> None:
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


def test_under_a_cap_below_what_is_held_nothing_runs(memory: CpuMemory) -> None:
    for cap_bytes in (-(1 << 40), 0, 1):
        with memory.cap(cap_bytes), pytest.raises(MemoryError):
            torch.ones(1)
    assert torch.ones(1) == 1


def test_a_cap_never_raises_a_limit_of_the_process(memory: CpuMemory) -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    limit = status_bytes("VmData") + GIB
    resource.setrlimit(resource.RLIMIT_DATA, (limit, before[1]))
    try:
        with memory.cap(memory.in_use() + 100 * GIB):
            assert resource.getrlimit(resource.RLIMIT_DATA)[0] == limit
            with pytest.raises(RuntimeError) as caught:
                torch.empty(2 * GIB, dtype=torch.uint8)
            assert memory.refused(caught.value)
        assert resource.getrlimit(resource.RLIMIT_DATA)[0] == limit
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


# -- a function by itself


def test_the_state_of_torch_and_context_variables_are_as_outside(memory: CpuMemory) -> None:
    variable = contextvars.ContextVar("variable", default="nothing")
    variable.set("something")
    memory.isolate(lambda: variable.set(variable.get() + " inside"))
    assert memory.isolate(variable.get) == variable.get() == "something"
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            assert memory.isolate(torch.is_grad_enabled) is enabled
            memory.isolate(lambda enabled=enabled: torch.set_grad_enabled(not enabled))  # type: ignore[misc]
            assert torch.is_grad_enabled() is enabled
    assert not memory.isolate(torch.is_inference_mode_enabled)
    with torch.inference_mode():
        assert memory.isolate(lambda: torch.ones(1).is_inference())
    assert memory.isolate(torch.get_num_threads) == torch.get_num_threads()
    a, b = torch.ones(4, 4), torch.ones(4, 4)
    assert memory.isolate(lambda: (a @ b).dtype) is torch.float32
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            assert memory.isolate(lambda: (a @ b).dtype) is dtype
            with torch.autocast("cpu", enabled=False):
                assert memory.isolate(lambda: (a @ b).dtype) is torch.float32


def test_an_interruption_waits_for_the_function(memory: CpuMemory) -> None:
    """Whoever restores the model must not do so under a step that still runs."""
    events: list[str] = []

    def interrupt(number: int, frame: object) -> None:
        if not events:
            events.append("interrupted")
        raise KeyboardInterrupt

    def is_interrupted() -> bool:
        if not events:  # again: Python may begin to wait between a signal and its handler
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return bool(events)

    def step() -> None:
        wait_until(is_interrupted)
        events.append("done")

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            memory.isolate(step)
        events.append("left")
    finally:
        signal.signal(signal.SIGINT, before)
    assert events == ["interrupted", "done", "left"]


def test_convolutions_work_after_one_ran_out_of_memory(memory: CpuMemory) -> None:
    """Not a page was left for their kernels."""

    def convolve(channels: int) -> None:
        size = 16 + channels
        nn.functional.conv2d(
            torch.ones(1, channels, size, size), torch.ones(channels, channels, 3, 3)
        )

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
                    if not (is_ambiguous(error) or memory.refused(error)):
                        raise
                    refused += 1
        return refused

    for _ in range(3):
        assert memory.isolate(exhaust) > 0
        for channels in range(8, 14):
            convolve(channels)
            memory.isolate(lambda channels=channels: convolve(channels + 10))  # type: ignore[misc]


SEARCHES = """
import timm, torch
from linnaeus.autobatch import auto_find_batch_size
from tests.helpers.ledger import limit_with_room_for

model = timm.create_model("test_resnet", num_classes=10)

def step(batch):
    model(batch).sum().backward()

limit_gb = limit_with_room_for(200)
for _ in range(3):
    found = auto_find_batch_size(
        step, lambda size: torch.randn(size, 3, 96, 96), state=(model,), memory_limit_gb=limit_gb,
        target_memory_fraction=1.0,
    )
    print(found.held_bytes)
"""


@pytest.mark.slow
def test_a_later_search_holds_what_the_first_one_held(tmp_path: Path) -> None:
    """The C library keeps some 50 MiB of the threads of trials."""
    done = forks.python("-c", SEARCHES, cwd=tmp_path)
    assert done.code == 0, done.err
    first, *later = map(int, done.out.split())
    assert all(held - first < 35 * MIB for held in later), done.out
