"""Trials of real models, in the memory of this very process."""

import contextlib
import gc
import importlib
import sys
import weakref

import pytest
import torch
from torch import Tensor, nn

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


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def make_runner(
    step,
    make_batch,
    *state,
    room_mib=AMPLE,
    num_steps=2,
    training=True,
    warm=4,
):
    """A runner that may take `room_mib` above what the process holds, with all libraries loaded."""
    memory = CpuMemory(CPU)
    memory.clean()
    memory.settle()
    runner = TrialRunner(
        step,
        make_batch,
        state=state,
        memory=memory,
        budget_bytes=memory.in_use() + AMPLE * MIB,
        num_steps=num_steps,
        training=training,
        snapshot=Snapshot(state, CPU),
    )
    if warm is not None:
        with contextlib.suppress(OutOfMemory):
            runner(warm)
    runner.clean()
    runner.budget_bytes = runner.memory.in_use() + room_mib * MIB
    return runner


@pytest.mark.parametrize(("fullness", "alone"), [(0.89, 2), (0.91, 4)])
def test_a_joint_trial_takes_the_same_steps_at_any_peak(monkeypatch, fullness, alone):
    """A trial of one rank repeats its steps with an emptied cache, where it nearly fills the budget."""
    calls = []
    runner = make_runner(lambda batch: calls.append(len(batch)), samples, warm=None)
    runner.empties_cache = True  # as on an accelerator
    monkeypatch.setattr(runner.memory, "peak", lambda: int(fullness * runner.budget_bytes))
    runner(4)
    assert len(calls) == alone
    calls.clear()
    runner.run_jointly(4, contextlib.nullcontext())
    assert len(calls) == 2


@pytest.mark.parametrize("failing_call", [1, 4])  # in the first trial, and in the second
def test_an_error_in_a_joint_trial_is_not_tried_again(failing_call):
    calls = []

    def step(batch):
        calls.append(len(batch))
        if len(calls) == failing_call:
            raise KeyError("broken")

    runner = make_runner(step, samples, warm=None)
    if failing_call > 2:
        runner.run_jointly(4, contextlib.nullcontext())
    with pytest.raises(KeyError):
        runner.run_jointly(4, contextlib.nullcontext())
    assert len(calls) == failing_call


def wide_model():
    """8 KiB of activations a sample."""
    return nn.Sequential(nn.Linear(16, 2048), nn.ReLU(), nn.Linear(2048, 1))


def samples(size):
    return torch.randn(size, 16)


def training_step(model, optimizer):
    def step(batch):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return step


class Table(nn.Module):
    """Memory in the weights and hardly any in the activations."""

    def __init__(self, mib):
        super().__init__()
        self.weight = nn.Parameter(torch.full((mib, MIB // 4), 0.5))

    def forward(self, batch):
        return self.weight[0, : len(batch)].mul(batch[:, 0]).sum()


class Hungry(torch.autograd.Function):
    """Takes MiB for as long as it runs, in the forward or in the backward pass."""

    @staticmethod
    def forward(ctx, x, forward_mib, backward_mib):
        ctx.mib = backward_mib
        torch.empty(forward_mib * MIB // 4)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        torch.empty(ctx.mib * MIB // 4)
        return gradient, None, None


# -- the peak


def test_the_highest_of_all_steps_is_the_peak():
    sizes = iter([10, 100, 10])
    runner = make_runner(
        lambda _: torch.empty(next(sizes) * MIB // 4), samples, num_steps=3, warm=None
    )
    assert runner(1) - runner.memory.in_use() == pytest.approx(100 * MIB, abs=NOISE)


def test_copies_on_the_host_are_not_the_trials():
    model = Table(mib=40)
    runner = make_runner(lambda batch: torch.empty(10 * MIB // 4), samples, model, room_mib=60)
    runner.memory.settle(runner.snapshot.host_bytes)
    assert held_bytes() == pytest.approx(runner.memory.in_use() + 40 * MIB, abs=NOISE)
    assert runner(1) - runner.memory.in_use() == 10 * MIB + samples(1).nbytes


# -- out of memory


@pytest.mark.parametrize("place", ["batch", "forward", "backward"])
def test_running_out_is_reported_from_wherever_it_happens(place):
    model = nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = model.weight.detach().clone()
    reached = []

    def make_batch(size):
        reached.append("batch")
        torch.empty(size * (place == "batch") * MIB // 4)
        return samples(4), size

    def step(batch):
        reached.append("forward")
        inputs, mib = batch
        output = Hungry.apply(
            model(inputs), mib * (place == "forward"), mib * (place == "backward")
        )
        reached.append("backward")
        output.sum().backward()
        optimizer.step()
        reached.append("end")

    runner = make_runner(step, make_batch, model, optimizer, room_mib=100)
    for mib in (10_000, 110):
        reached.clear()
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
    states.clear()
    skipped.clear()
    peak = runner(4)
    assert skipped == [True, True]
    assert states == [False, True]
    assert peak - runner.memory.in_use() >= 8 * 3 * MIB - SLACK  # a gradient and two moments
    assert scaler.get_scale() == 2.0**127
    assert not optimizer.state


@pytest.mark.parametrize("num_steps", [1, 3])
def test_accumulation_does_not_hide_the_optimizers_state(num_steps):
    """Before the second step it is made; in a trial of one step before that. What is frozen gets none."""
    model, frozen = Table(mib=8), nn.Parameter(torch.ones(4), requires_grad=False)
    optimizer = torch.optim.AdamW([*model.parameters(), frozen], weight_decay=0.0)
    seen = []

    def step(batch):
        seen.append((model.weight in optimizer.state, model.weight.grad is not None))
        assert (model.weight == 0.5).all()
        assert frozen not in optimizer.state
        assert frozen.grad is None
        model(batch).backward()

    runner = make_runner(step, samples, model, optimizer, num_steps=num_steps)
    seen.clear()
    peak = runner(4)
    # Gradients stay, as in training.
    assert seen == (
        [(True, False)] if num_steps == 1 else [(False, False), (True, True), (True, True)]
    )
    assert peak - runner.memory.in_use() >= 8 * 3 * MIB - SLACK
    assert model.weight.grad is None


def test_only_the_optimizer_that_did_not_step_is_helped():
    generator, critic = Table(mib=4), Table(mib=4)
    first, second = (torch.optim.Adam(part.parameters()) for part in (generator, critic))
    counts = []

    def step(batch):
        before = len(second.state)
        training_step(generator, first)(batch)
        counts.append((int(first.state[generator.weight]["step"]), before))

    runner = make_runner(step, samples, generator, critic, first, second)
    counts.clear()
    runner(4)
    assert counts == [(1, 0), (2, 1)]
    assert not first.state
    assert not second.state


@pytest.mark.parametrize("training", [True, False])
def test_an_optimizer_of_sparse_gradients_works(training):
    model = nn.Embedding(1000, 2048, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    expected = model.weight.detach().clone()

    def step(batch):
        with torch.set_grad_enabled(training):
            loss = model(batch).square().sum()
        if training:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    runner = make_runner(
        step, lambda size: torch.randint(1000, (size,)), model, optimizer, training=training
    )
    assert runner(1000) - runner.memory.in_use() >= 1000 * 8 * 1024
    assert not optimizer.state
    runner.snapshot.restore()
    assert torch.equal(model.weight, expected)


# -- validation


def test_validation_has_the_optimizers_state_resident():
    """Though no trial of it ever steps."""
    model = Table(mib=16)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.5)
    seen = []

    @torch.no_grad()
    def step(batch):
        seen.append((model.weight in optimizer.state, model.weight.grad is None))
        model(batch)

    memory = CpuMemory(CPU)
    memory.clean()
    memory.settle()
    before = memory.in_use()
    runner = make_runner(step, samples, model, optimizer, training=False)
    assert runner.memory.in_use() == pytest.approx(before + 32 * MIB, abs=NOISE)
    moments = optimizer.state[model.weight]["exp_avg"]
    for size in (1, 4):
        assert runner(size) == pytest.approx(before + 32 * MIB, abs=NOISE)
        assert optimizer.state[model.weight]["exp_avg"] is moments
    assert set(seen) == {(True, True)}
    runner.snapshot.restore()
    assert not optimizer.state


# -- nothing stays


def num_tensors():
    return sum(isinstance(thing, Tensor) for thing in gc.get_objects())


def test_many_trials_leave_nothing_behind():
    model = wide_model()
    optimizer = torch.optim.AdamW(model.parameters())
    step, references = training_step(model, optimizer), list[weakref.ref[Tensor]]()

    def leaving_a_cycle(batch):
        cycle = [batch]
        cycle.append(cycle)
        references.append(weakref.ref(batch))
        step(batch)

    runner = make_runner(leaving_a_cycle, samples, model, optimizer, room_mib=60)
    memory = CpuMemory(CPU)
    outcomes = []

    def trial(size):
        try:
            runner(size)
        except OutOfMemory:
            outcomes.append("oom")
        else:
            outcomes.append("ran")

    for size in (500, 30_000):
        trial(size)
    references.clear()
    before, tensors, threads = memory.in_use(), num_tensors(), sys._current_frames().keys()
    for size in (200, 800, 20_000, 5_000_000, 200, 20_000):
        trial(size)
    assert (outcomes.count("oom"), outcomes.count("ran")) == (4, 4)
    assert references
    assert all(reference() is None for reference in references)
    references.clear()
    assert abs(memory.in_use() - before) <= 4 * MIB
    assert num_tensors() == tensors
    assert sys._current_frames().keys() == threads


@pytest.mark.parametrize("wraps", ["while handling", "keeps"])
def test_the_traceback_of_a_failed_trial_keeps_nothing_alive(wraps):
    alive = []
    kept = []
    model = nn.Linear(16, 1)

    def inner(batch):
        activations = torch.empty(20 * MIB // 4)
        alive.extend([weakref.ref(batch), weakref.ref(activations)])
        torch.empty(2000 * MIB // 4)

    def step(batch):
        copy = batch.clone()
        alive.append(weakref.ref(copy))
        try:
            inner(copy)
        except MemoryError as error:
            if wraps == "while handling":
                raise RuntimeError("out of memory")  # noqa: B904
            kept.append(error)
            raise

    runner = make_runner(step, samples, model, room_mib=100, warm=None)
    before = runner.memory.in_use()
    with pytest.raises(OutOfMemory) as caught:
        runner(4)
    assert len(alive) == 3
    assert [reference() for reference in alive] == [None] * 3
    assert runner.memory.in_use() == before
    assert caught.value.__cause__ is None
    assert len(kept) == (wraps == "keeps")


@pytest.mark.parametrize("mib", [50, 200])
def test_a_size_whose_error_the_step_catches_does_not_fit(mib):
    def step(batch):
        with contextlib.suppress(MemoryError):
            torch.empty(mib * MIB // 4)

    runner = make_runner(step, samples, nn.Linear(16, 1), room_mib=100, warm=None)
    with pytest.raises(OutOfMemory) if mib > 100 else contextlib.nullcontext():
        runner(4)


# -- compilation


def test_collections_inside_look_at_new_things_alone(monkeypatch):
    monkeypatch.setattr(gc, "get_freeze_count", COUNT_FROZEN)
    old = [[]]
    gc.unfreeze()
    try:
        with existing_objects_frozen():
            assert gc.get_freeze_count() > 0
            assert not any(thing is old for thing in gc.get_objects())
        assert gc.get_freeze_count() == 0
    finally:
        gc.freeze()
    with existing_objects_frozen():
        pass
    assert gc.get_freeze_count() > 0  # somebody else's freeze is left alone


# -- what trials leave


def test_buffers_steer_each_trial_as_the_first_one():
    """As the pointer of a queue does."""
    model = nn.Linear(16, 1)
    model.register_buffer("pointer", torch.zeros((), dtype=torch.long))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        start = int(model.pointer)
        assert start + len(batch) <= 300
        model.pointer += len(batch)
        training_step(model, optimizer)(batch)

    runner = make_runner(step, samples, model, optimizer, num_steps=1)
    for _ in range(3):
        runner(200)


def test_each_trial_begins_with_the_callers_own_values():
    model = nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        assert torch.equal(model.weight, expected)
        training_step(model, optimizer)(batch)

    expected = model.weight.detach().clone()
    runner = make_runner(step, samples, model, optimizer, num_steps=1)
    runner(4)
    runner(200)
    training_step(model, optimizer)(samples(4))
    assert not torch.equal(model.weight, expected), "a step changes them"
