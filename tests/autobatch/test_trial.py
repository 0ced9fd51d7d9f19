"""Trials of real models, in the memory of this very process."""

import contextlib
import gc
import importlib
import sys
import weakref

import pytest
import torch
from torch import nn

from linnaeus.autobatch.memory.host import CpuMemory
from linnaeus.autobatch.search import OutOfMemory
from linnaeus.autobatch.state.snapshot import Snapshot
from linnaeus.autobatch.trial import TrialRunner, existing_objects_frozen
from tests.helpers.ledger import held_bytes
from tests.helpers.runs import freeze_what_is_there

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="host memory is measured on Linux")

MIB = 1024**2
CPU = torch.device("cpu")
NOISE = 8 * MIB  # what the rest of the process takes or gives back between two readings
SLACK = MIB  # above what tensors of whole MiB take: batches, and numbers of an optimizer
AMPLE = 1024  # MiB that no trial here needs
COUNT_FROZEN = gc.get_freeze_count  # the fixture of all tests replaces it


@pytest.fixture(autouse=True, scope="module")
def _only_new_garbage():
    """What the first optimizer loads is loaded by now, or every collection would look at it."""
    torch.optim.SGD([nn.Parameter(torch.ones(1))]).step()
    importlib.import_module("torch._dynamo")
    freeze_what_is_there()


def make_runner(step, make_batch, *state, room_mib=AMPLE, warm=4, **options):
    """A runner that may take `room_mib` above what the process holds, with all libraries loaded."""
    memory = CpuMemory(CPU)
    memory.clean()
    memory.settle()
    options = {"num_steps": 2, "training": True, "snapshot": Snapshot(state, CPU), **options}
    runner = TrialRunner(step, make_batch, state=state, memory=memory, **options)
    runner.budget_bytes = memory.in_use() + AMPLE * MIB
    if warm is not None:
        with contextlib.suppress(OutOfMemory):
            runner(warm)
    runner.clean()
    runner.budget_bytes = memory.in_use() + room_mib * MIB
    return runner


@pytest.mark.parametrize(("fullness", "alone"), [(0.89, 2), (0.91, 4)])
def test_a_joint_trial_takes_the_same_steps_at_any_peak(monkeypatch, fullness, alone):
    """A trial of one rank repeats its steps with an emptied cache, where it nearly fills the budget."""
    runner = make_runner(lambda batch: None, samples, warm=None)
    runner.empties_cache = True  # as on an accelerator
    monkeypatch.setattr(runner.memory, "peak", lambda: int(fullness * runner.budget_bytes))
    runner(4)
    assert runner.num_calls == alone
    runner.run_jointly(4, contextlib.nullcontext())
    assert runner.num_calls == alone + 2


def samples(size):
    return torch.randn(size, 16)


class Table(nn.Module):
    """Memory in the weights and hardly any in the activations."""

    def __init__(self, mib):
        super().__init__()
        self.weight = nn.Parameter(torch.full((mib, MIB // 4), 0.5))

    def forward(self, batch):
        return self.weight[0, : len(batch)].mul(batch[:, 0]).sum()


# -- the peak


def test_the_highest_of_all_steps_is_the_peak():
    sizes = iter([10, 100, 10])
    runner = make_runner(
        lambda _: torch.empty(next(sizes) * MIB // 4), samples, num_steps=3, warm=None
    )
    assert runner(1) - runner.memory.in_use() == pytest.approx(100 * MIB, abs=NOISE)


# -- out of memory


@pytest.mark.parametrize("place", ["batch", "forward", "backward"])
def test_running_out_is_reported_from_wherever_it_happens(place):
    model = nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = model.weight.detach().clone()
    reached = []

    def take(mib, here):
        reached.append(here)
        torch.empty(mib * (here == place) * MIB // 4)

    def make_batch(size):
        take(size, "batch")
        return samples(4), size

    def step(batch):
        inputs, mib = batch
        output = model(inputs)
        take(mib, "forward")
        output.register_hook(lambda _: take(mib, "backward"))
        output.sum().backward()
        optimizer.step()
        reached.append("end")

    runner = make_runner(step, make_batch, model, optimizer, room_mib=100)
    for mib in (10_000, 110):
        with pytest.raises(OutOfMemory):
            runner(mib)
        assert reached[-1] == place
        assert model.weight.grad is None
    runner(5)
    assert reached[-1] == "end"
    assert torch.equal(model.weight, expected)


# -- the optimizer's state


def test_a_scaler_that_skips_does_not_hide_the_optimizers_state():
    """Infinite gradients must not get into the weights either: a step may check its loss."""
    model = Table(mib=8)
    optimizer = torch.optim.Adam(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    states = []
    skipped = []

    def step(batch):
        states.append(model.weight in optimizer.state)
        loss = model(batch + 100)
        if not loss.isfinite():
            raise FloatingPointError(f"the loss is {loss.item()}")
        scaler.scale(loss).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped.append(scaler.get_scale() < before)
        optimizer.zero_grad()

    runner = make_runner(step, samples, model, optimizer, scaler)
    peak = runner(4)
    assert skipped[-2:] == [True, True]
    assert states[-2:] == [False, True]
    assert peak - runner.memory.in_use() >= 8 * 3 * MIB - SLACK  # a gradient and two moments


@pytest.mark.parametrize("num_steps", [1, 3])
def test_accumulation_does_not_hide_the_optimizers_state(num_steps):
    """Before the second step it is made; in a trial of one step before that. What is frozen gets none."""
    model, frozen = Table(mib=8), nn.Parameter(torch.ones(4), requires_grad=False)
    optimizer = torch.optim.AdamW([*model.parameters(), frozen], weight_decay=0.0)
    seen = []

    def step(batch):
        seen.append(model.weight in optimizer.state)
        assert (model.weight == 0.5).all()
        assert frozen not in optimizer.state
        model(batch).backward()

    runner = make_runner(step, samples, model, optimizer, num_steps=num_steps)
    peak = runner(4)
    assert seen[-num_steps:] == ([True] if num_steps == 1 else [False, True, True])
    assert peak - runner.memory.in_use() >= 8 * 3 * MIB - SLACK
    assert model.weight.grad is None


def test_an_optimizer_of_sparse_gradients_is_left_alone():
    model = nn.Embedding(1000, 2048, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    step = torch.no_grad()(model)
    runner = make_runner(
        step, lambda size: torch.randint(1000, (size,)), model, optimizer, training=False
    )
    assert runner(1000) - runner.memory.in_use() >= 1000 * 8 * 1024


# -- validation


def test_validation_has_the_optimizers_state_resident():
    """Though no trial of it ever steps."""
    model = Table(mib=16)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.5)

    @torch.no_grad()
    def step(batch):
        assert model.weight in optimizer.state
        assert model.weight.grad is None
        model(batch)

    before = held_bytes()
    runner = make_runner(step, samples, model, optimizer, training=False)
    for size in (1, 4):
        assert runner(size) == pytest.approx(before + 32 * MIB, abs=NOISE)
    runner.snapshot.restore()
    assert not optimizer.state


# -- nothing stays


def test_each_trial_begins_with_the_callers_own_values():
    """As the pointer of a queue, which steers a step."""
    model = nn.Linear(16, 1)
    model.register_buffer("pointer", torch.zeros((), dtype=torch.long))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = model.weight.detach().clone()

    def step(batch):
        assert torch.equal(model.weight, expected)
        assert model.pointer == 0
        model.pointer += len(batch)
        model(batch).sum().backward()
        optimizer.step()

    runner = make_runner(step, samples, model, optimizer, num_steps=1)
    runner(200)
    runner(200)


@pytest.mark.parametrize("wraps", ["while handling", "keeps"])
def test_a_failed_trial_keeps_nothing_alive(wraps):
    """Neither its traceback nor a cycle does."""
    alive = []
    kept = []
    model = nn.Linear(16, 1)

    def inner(batch):
        activations = torch.empty(20 * MIB // 4)
        alive.extend([weakref.ref(batch), weakref.ref(activations)])
        torch.empty(2000 * MIB // 4)

    def step(batch):
        copy = batch.clone()
        cycle = [copy]
        cycle.append(cycle)
        alive.append(weakref.ref(copy))
        try:
            inner(copy)
        except MemoryError as error:
            if wraps == "while handling":
                raise KeyError("broken")  # noqa: B904
            kept.append(error)
            raise

    runner = make_runner(step, samples, model, room_mib=100, warm=None)
    before = runner.memory.in_use()
    with pytest.raises(OutOfMemory):
        runner(4)
    assert [reference() for reference in alive] == [None] * 3
    assert runner.memory.in_use() == before


def test_a_size_whose_error_the_step_catches_does_not_fit():
    def step(batch):
        with contextlib.suppress(MemoryError):
            torch.empty(200 * MIB // 4)

    runner = make_runner(step, samples, room_mib=100, warm=None)
    with pytest.raises(OutOfMemory):
        runner(4)


# -- compilation


def test_collections_inside_look_at_new_things_alone(monkeypatch):
    monkeypatch.setattr(gc, "get_freeze_count", COUNT_FROZEN)
    gc.unfreeze()
    try:
        with existing_objects_frozen():
            assert gc.get_freeze_count() > 0
        assert gc.get_freeze_count() == 0
    finally:
        gc.freeze()
    with existing_objects_frozen():
        pass
    assert gc.get_freeze_count() > 0  # somebody else's freeze is left alone
