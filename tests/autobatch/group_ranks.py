"""What two ranks of a process group do together in the tests of `test_group`: each function is a test's body.

A process runs all of them, as `work` of `tests.helpers.processes.compute`.
"""

import contextlib
import datetime
import os
import signal
import threading
import traceback
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional_collectives
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from linnaeus import BudgetBatchSampler, find_budget
from linnaeus.autobatch.ranks import exchange, group, heartbeat, single_rank
from linnaeus.autobatch.ranks.group import joined_ranks, of_main
from linnaeus.autobatch.state import snapshot
from linnaeus.autobatch.state.sharded import is_fake
from linnaeus.runtime.errors import AutoBatchError
from linnaeus.utils.autobatch import auto_find_batch_size
from tests.helpers import children
from tests.helpers.greedy import allocate_too_much
from tests.helpers.ledger import limit_with_room_for
from tests.helpers.runs import freeze_what_is_there, wait_until

MIB = 2**20
ROOM_MIB = 80
CPU = torch.device("cpu")


def samples(n):
    return torch.ones(n, MIB // 4)


def find(step=lambda batch: None, num_samples=32, **arguments):
    """A search over samples of one MiB, under a limit for so many of them."""
    defaults = {
        "max_batch_size": 64,
        "memory_limit_gb": limit_with_room_for(num_samples) / 0.8,
    }
    return auto_find_batch_size(step, samples, **{**defaults, **arguments})


def broken_on(failing):
    """A step that fails on one rank."""

    def step(batch):
        if dist.get_rank() == failing:
            raise KeyError("broken")

    return step


def of_all(value):
    """The value of each rank."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def error_of(function, *arguments, **options):
    try:
        found = function(*arguments, **options)
    except Exception as error:
        return error
    raise AssertionError(f"no error, but {found}")


def refuses(word, function, *arguments, **options):
    """The function raises an `AutoBatchError` that has the word in it."""
    error = error_of(function, *arguments, **options)
    assert isinstance(error, AutoBatchError), error
    assert word in str(error), error


# --- searches ---


def the_size_of_all_fits_on_each(rank):
    result = find(num_samples=40 if rank == 0 else 20)
    assert 15 <= result.batch_size <= 20, "20 samples fit on rank 1, 40 on rank 0"
    assert result.ran_on_every_rank == (result.batch_size,)
    assert len(set(of_all(result.batch_size))) == 1
    result = find(
        num_samples=64, bounds=({"dataset": 9, "host": 12}, {"dataset": 7, "own": 20})[rank]
    )
    assert (result.batch_size, result.limited_by) == (7, "dataset")
    if rank == 0:
        result = find(max_batch_size=8, group=False)
        assert (result.batch_size, result.ran_on_every_rank) == (8, ()), "a rank may search alone"


def an_error_of_one_rank_is_raised_there_and_told_to_the_others(rank):
    def prepares():
        """Rank 1 fails before its search, while rank 0 is in it."""
        with joined_ranks():
            if rank == 1:
                raise OSError("broken")
            return find()

    cases = [
        (0, KeyError, lambda: find(broken_on(0))),
        (1, AutoBatchError, lambda: find(memory_limit_gb=0.01 if rank == 1 else 8.0)),
        (1, TypeError, lambda: find(max_batch_size="many" if rank == 1 else 8)),
        (1, OSError, prepares),
    ]
    for failing, kind, function in cases:
        error = error_of(function)
        told = str(error).removeprefix("AutoBatch: ")
        if rank == failing:
            assert isinstance(error, kind)
            told = told if kind is AutoBatchError else f"{kind.__name__}: {error}"
        else:
            assert isinstance(error, AutoBatchError)
            assert told.startswith(f"rank {failing}: ")
        assert len({each.removeprefix(f"rank {failing}: ") for each in of_all(told)}) == 1
    refuses("max_batch_size", find, max_batch_size=8 + rank)
    assert find(max_batch_size=4).batch_size == 4, (
        "an earlier failure does not reach a later search"
    )


def a_rank_that_does_not_call_is_named(rank):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group, "ARRIVAL_S", 0.05)
        patch.setattr(exchange, "FAREWELL_S", 0.0)
        if rank == 0:
            refuses("rank 1", find)
    dist.barrier()
    if rank == 1:
        refuses("rank 1 has not called", find)  # the one that is late learns of it
    assert find(max_batch_size=4).batch_size == 4


def a_search_may_take_longer_than_the_timeout_of_the_group(rank):
    brief = dist.new_group()
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(milliseconds=1), brief)
    trials = []
    options = {"max_batch_size": 16, "memory_limit_gb": 8.0, "group": brief}
    assert find(lambda batch: trials.append(len(batch)), **options).batch_size == 16
    assert trials
    dist.barrier()
    if rank == 0:
        assert isinstance(error_of(dist.barrier, group=brief), RuntimeError), "rank 1 does not come"


def searches_in_one_context_share_its_control_plane(rank):
    with joined_ranks() as plane:
        assert of_main(plane, f"of {rank}") == "of 0"
        assert [find(max_batch_size=size).batch_size for size in (4, 8)] == [4, 8]
        with joined_ranks() as inner:
            assert inner is plane
        assert threading.active_count() > 1
    dist.barrier()
    wait_until(lambda: threading.active_count() == 1)


# --- steps that communicate ---


def a_collective_of_a_later_step_is_an_error_and_no_hang(rank):
    """Whichever group it names, whoever calls it, and only once in a search."""
    others, one = dist.new_group(), group_of_one(rank)
    communications = {
        "allreduce": lambda group: dist.all_reduce(torch.ones(1), group=group),
        "all": lambda group: functional_collectives.all_reduce(
            torch.ones(2), "sum", group or dist.group.WORLD
        ).sum(),
    }
    for word, communicate in communications.items():
        for named in (None, others, one):
            calls = 0

            def step(batch):
                nonlocal calls
                calls += 1
                if calls == 4:
                    communicate(named)  # noqa: B023

            if named is one:
                assert find(step, max_batch_size=4).batch_size == 4
            else:
                refuses(word, find, step, max_batch_size=4)
                assert calls == (0 if rank else 4), "it is not tried again"


def group_of_one(rank):
    return [dist.new_group([each]) for each in range(dist.get_world_size())][rank]


def what_no_rank_can_step_alone_is_refused_by_name(rank):
    """Also if one rank alone has it, before any collective."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    stateless = DistributedDataParallel(nn.Linear(8, 8))
    stateless.register_comm_hook(dist.group.WORLD, fp16_compress_hook)
    assert find(state=(stateless,), max_batch_size=4).batch_size == 4
    stateful = DistributedDataParallel(nn.Linear(8, 8))
    stateful.register_comm_hook(PowerSGDState(None), powerSGD_hook)
    hooked = DistributedDataParallel(nn.Linear(8, 8))
    hooked._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    parts = {
        "FullyShardedDataParallel": FullyShardedDataParallel(nn.Linear(8, 8), device_id=CPU),
        "ZeroRedundancyOptimizer": ZeroRedundancyOptimizer(
            hooked.parameters(), torch.optim.SGD, lr=0.1
        ),
        "a built-in communication hook": hooked,
        "PowerSGDState": stateful,
    }
    for name, part in parts.items():
        refuses(name, find, state=(part if rank else stateless,))


class Net(nn.Module):
    """With BatchNorm; a parameter that no step uses, and one that steps use on some of the batches."""

    def __init__(self):
        super().__init__()
        self.enter, self.norm, self.leave = (
            nn.Linear(64, 256),
            nn.BatchNorm1d(256),
            nn.Linear(256, 8),
        )
        self.sometimes = nn.Linear(8, 8)
        self.never = nn.Linear(8, 8)
        self.num_calls = 0

    def forward(self, x, detour=False):
        self.num_calls += 1
        y = self.leave(self.norm(self.enter(x)).relu())
        return self.sometimes(y) if detour else y


class WithoutUnused(Net):
    def __init__(self):
        super().__init__()
        del self.never, self.sometimes


def halved_allreduce(_, bucket):  # torch compares annotations
    """A communication hook that training cannot do without."""
    summed = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return summed.then(lambda future: future.value()[0] / 4)


def trained(model, steps_before, search=None):
    """The tensors after some steps, a search if so wanted, and further steps; and what it has found."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    batches = torch.Generator().manual_seed(dist.get_rank())

    def step(*inputs):
        with torch.set_grad_enabled(model.training):
            loss = model(*inputs).square().mean()
        if model.training:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    def train(num_steps):
        for _ in range(num_steps):
            step(torch.randn(16, 64, generator=batches))

    train(steps_before)
    found = None
    if search is not None:
        found = auto_find_batch_size(
            lambda inputs: step(*inputs), state=(model, optimizer), **search
        )
    train(3)
    moments = [value for entry in optimizer.state.values() for value in entry.values()]
    counts = [model.training, *(getattr(each, "num_calls", 0) for each in model.modules())]
    state = [*model.state_dict().values(), *moments, torch.rand(4), torch.tensor(counts)]
    return [getattr(value, "_local_tensor", value) for value in state], found


def is_trained_the_same(make, steps_before, search):
    """Whether training after a search equals that without one, bit for bit; and what it has found."""
    expected, _ = trained(make(), steps_before)
    values, found = trained(make(), steps_before, search)
    return len(values) == len(expected) and all(map(torch.equal, values, expected)), found


def is_wrapper_trained_the_same(kind, steps_before, hook=None, **options):
    def make():
        torch.manual_seed(0)
        wrapper = DistributedDataParallel(kind(), **options)
        if hook is not None:
            wrapper.register_comm_hook(None, hook)
        return wrapper

    detours = "find_unused_parameters" in options
    limits = {"max_batch_size": 16, "memory_limit_gb": 8.0}
    search = {"make_batch": lambda n: (torch.randn(n, 64), detours), **limits}
    is_same, found = is_trained_the_same(make, steps_before, search)
    assert found.batch_size == 16
    return is_same


def training_after_a_search_is_that_without_one(rank):
    is_same = is_wrapper_trained_the_same
    assert is_same(WithoutUnused, 1)
    assert is_same(Net, 2, find_unused_parameters=True)
    assert is_same(WithoutUnused, 0, halved_allreduce, static_graph=True)
    for steps_before in (0, 1):
        assert is_same(Net, steps_before, static_graph=True, gradient_as_bucket_view=True)


def without_the_reducer_of_all_ranks_training_differs(rank):
    def make(wrapper, group, hooks):
        if group.size() == 1:
            made(wrapper, group, hooks)

    made = single_rank._make_reducer
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(single_rank, "_make_reducer", make)
        assert not is_wrapper_trained_the_same(WithoutUnused, 0)


def backward_of(model):
    return lambda x: model(x.unflatten(1, (-1, 64))).square().mean().backward()


def the_hooks_of_a_wrapper_run_in_a_joint_step_and_count(rank):
    """What the hook of the last rank allocates is in no trial of a rank alone."""
    sizes = {}
    for mib_per_sample in (0, 1, 50):
        calls = []
        size = 1
        wrapper = DistributedDataParallel(Residual(64))

        def hook(_, bucket):  # torch compares annotations
            mib = size * mib_per_sample if rank else 0  # noqa: B023
            calls.append(torch.ones(mib * MIB // 4).numel())  # noqa: B023
            return halved_allreduce(None, bucket)

        def step(x):
            nonlocal size
            size = len(x)
            backward_of(wrapper)(x)  # noqa: B023

        if mib_per_sample:
            wrapper.register_comm_hook(None, hook)
        found = find(step, 2 * ROOM_MIB, state=(wrapper,), max_batch_size=4).batch_size
        sizes[mib_per_sample] = found
        assert len(set(of_all(found))) == 1
        assert bool(calls) == bool(mib_per_sample)
        num_calls = len(calls)
        step(samples(1))
        assert len(calls) == num_calls + bool(mib_per_sample), "training has its hook again"
    assert sizes[0] == sizes[1] == 4
    assert 1 <= sizes[50] < 4


def a_wrapper_that_state_does_not_hold_is_refused_by_name(rank):
    step = backward_of(DistributedDataParallel(Residual(64)))
    refuses("DistributedDataParallel wrapper", find, step, memory_limit_gb=8.0)


def sync_batchnorm_normalises_over_one_rank_in_a_search(rank):
    """torch's own runs on accelerators alone: what it is told in a search, and afterwards."""
    model = nn.SyncBatchNorm.convert_sync_batchnorm(WithoutUnused(), dist.group.WORLD)
    with single_rank.stepping_alone((model,)):
        assert dist.get_world_size(model.norm.process_group) == 1
    assert dist.get_world_size(model.norm.process_group) == 2


# --- sharded models ---


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


def sharded(how):
    """A model in two blocks that share nothing, of odd sizes."""
    ranks = dist.get_world_size()
    torch.manual_seed(0)
    if how == "tensor parallel":
        model = Residual(64)
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        return parallelize_module(model, dist.init_device_mesh("cpu", (ranks,)), plan)
    blocks = nn.Sequential(Residual(64), Residual(64), nn.Linear(64, 5), nn.Tanh())
    shape, names = (
        ((ranks,), ("shard",)) if how == "full" else ((2, ranks // 2), ("replicate", "shard"))
    )
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=names)
    for module in (blocks[0], blocks[1], blocks):
        fully_shard(module, mesh=mesh, reshard_after_forward=how != "kept")
    return blocks


def is_sharded_training_the_same(how, steps_before, mode):
    """Whether it is so bit for bit; trials run out of memory, and all ranks find one size."""
    search = {
        "make_batch": lambda n: (torch.randn(n, 2048, 64),),
        "mode": mode,
        "max_batch_size": 64,
        "tolerance": 0.2,
        "memory_limit_gb": limit_with_room_for(ROOM_MIB) / 0.8,
    }
    is_same, found = is_trained_the_same(partial(sharded, how), steps_before, search)
    assert 1 < found.batch_size < 64, found
    assert len(set(of_all(found.batch_size))) == 1
    assert found.batch_size in found.ran_on_every_rank
    assert any(of_all(any(trial.status == "oom" for trial in found.trials)))
    return is_same


def sharded_training_after_a_search_is_that_without_one(rank):
    assert is_sharded_training_the_same("full", 1, "train")


def without_a_reset_of_what_shards_it_training_fails_or_differs(rank):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot, "reset_of", lambda modules: lambda: None)
        with contextlib.suppress(AutoBatchError, RuntimeError, AttributeError):
            assert not is_sharded_training_the_same("full", 1, "train")


def training_of_each_kind_after_a_search_is_that_without_one(rank):
    cases = [("full", 0, "train"), ("full", 1, "val"), ("hybrid", 1, "train"), ("hybrid", 0, "val")]
    for case in (*cases, ("tensor parallel", 1, "train")):
        assert is_sharded_training_the_same(*case), case


def is_joint(model):
    """Whether a step of a sharded model communicates with other ranks now."""
    (group,) = next(model.parameters()).device_mesh.get_all_groups()
    return not is_fake(dist.distributed_c10d._resolve_process_group(group.group_name))


def an_error_in_a_joint_step_is_tried_once_and_raised_on_all(rank):
    """In a forward pass, and of memory in a backward pass; the groups are as good as before."""
    model = sharded("full")

    def fail(_):
        raise KeyError("broken")

    def search(failing_call, fail, in_backward):
        calls = 0

        def step(x):
            nonlocal calls
            calls += is_joint(model)
            is_failing = rank == 1 and is_joint(model) and calls == failing_call
            y = model(x.unflatten(1, (-1, 64)))
            if is_failing and in_backward:
                y.register_hook(fail)
            elif is_failing:
                fail(y)
            y.square().mean().backward()

        error = error_of(find, step, state=(model,), max_batch_size=2, memory_limit_gb=8.0)
        assert calls == failing_call, error
        assert isinstance(error, AutoBatchError), error
        (text,) = set(of_all(str(error)))
        return text

    assert search(1, fail, False).startswith("AutoBatch: rank 1: KeyError: 'broken'")
    text = search(6, allocate_too_much, True)
    assert text.startswith("AutoBatch: rank 1: ")
    assert "max_batch_size" in text
    found = find(backward_of(model), state=(model,), max_batch_size=2, memory_limit_gb=8.0)
    assert found.batch_size == 2


# --- four ranks ---


def two_groups_search_at_once(rank):
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[rank // 2]
    result = find(group=mine, num_samples=40 if rank < 2 else 20)
    first, same, third, fourth = of_all(result.batch_size)
    assert first == same > third == fourth
    search = partial(find, broken_on(3), group=mine, max_batch_size=4, memory_limit_gb=8.0)
    if rank < 2:
        assert search().ran_on_every_rank == (4,)
    elif rank == 2:
        refuses("rank 3: ", search)
    else:
        assert isinstance(error_of(search), KeyError)
    wrapper = DistributedDataParallel(nn.Linear(8, 8))
    refuses("2, 3" if rank < 2 else "0, 1", find, group=mine, state=(wrapper,), max_batch_size=4)


# --- the processes ---


def ranks_find_one_budget_and_share_the_batches_out(rank):
    lengths = [3 + 7 * index % 50 for index in range(90)]
    texts = [torch.ones(MIB // 64, length) for length in lengths]
    limit_gb = limit_with_room_for(ROOM_MIB if rank == 0 else ROOM_MIB / 2)
    found = find_budget(
        lambda batch: batch * 2,
        texts,
        lambda samples: torch.cat(samples, 1),
        cost=lengths,
        state=[DistributedDataParallel(nn.Linear(1, 1))],
        target_memory_fraction=1.0,
        memory_limit_gb=limit_gb,
    )
    sampler = BudgetBatchSampler(found.costs, found.budget)
    shares = of_all((found.budget, list(sampler)))
    assert found.limited_by == "memory"
    assert [(budget, len(share)) for budget, share in shares] == [(found.budget, len(sampler))] * 2
    taken = [index for _, share in shares for batch in share for index in batch]
    assert sorted(taken) == list(range(90))


OF_TWO = (
    ranks_find_one_budget_and_share_the_batches_out,
    the_size_of_all_fits_on_each,
    an_error_of_one_rank_is_raised_there_and_told_to_the_others,
    a_rank_that_does_not_call_is_named,
    a_search_may_take_longer_than_the_timeout_of_the_group,
    searches_in_one_context_share_its_control_plane,
    a_collective_of_a_later_step_is_an_error_and_no_hang,
    what_no_rank_can_step_alone_is_refused_by_name,
    training_after_a_search_is_that_without_one,
    without_the_reducer_of_all_ranks_training_differs,
    the_hooks_of_a_wrapper_run_in_a_joint_step_and_count,
    a_wrapper_that_state_does_not_hold_is_refused_by_name,
    sync_batchnorm_normalises_over_one_rank_in_a_search,
    sharded_training_after_a_search_is_that_without_one,
    an_error_in_a_joint_step_is_tried_once_and_raised_on_all,
)
BODIES = {
    2: OF_TWO,
    4: (
        two_groups_search_at_once,
        training_of_each_kind_after_a_search_is_that_without_one,
        without_a_reset_of_what_shards_it_training_fails_or_differs,
    ),
}
"""By the number of ranks that they need."""


def work(rank, folder):
    """What went wrong in each body; nothing in most of them."""
    place = Path(folder)
    num_ranks = int((place / "num_ranks").read_text())
    join(rank, num_ranks, place)
    find(
        max_batch_size=2, memory_limit_gb=8.0, group=False
    )  # loads what searches use: limits are exact
    wrong = {}
    for body in BODIES[num_ranks]:
        freeze_what_is_there()  # as the one before has loaded more
        wrong[body.__name__] = ""
        try:
            body(rank)
        except Exception:
            wrong[body.__name__] = traceback.format_exc()
            print(
                rank, wrong[body.__name__], flush=True
            )  # in case that the other rank waits for ever
        dist.barrier()
    return wrong


def join(rank, num_ranks, folder):
    """Join the process group, over a store that rank 0 serves."""
    port, wait = folder / "port", datetime.timedelta(seconds=children.limit_s)
    if rank == 0:
        store = dist.TCPStore("localhost", 0, num_ranks, is_master=True, wait_for_workers=False)
        (folder / "new").write_text(str(store.port))
        (folder / "new").rename(port)
    else:
        wait_until(port.exists)
        store = dist.TCPStore("localhost", int(port.read_text()), num_ranks, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=wait)


def search_until_one_dies(rank, dead, folder, joint=False):
    """Rank 0 is killed in its first step, or kills rank 1 there, which waits for it; or in a joint step."""
    join(rank, 2, folder)
    pid = of_all(os.getpid())[dead]
    model = sharded("full") if joint else None

    def step(batch):
        if model is not None:
            model(batch.unflatten(1, (-1, 64))).square().mean().backward()
            if not is_joint(model):
                return
        if not has_ended(pid):
            os.kill(pid, signal.SIGKILL)

    state = () if model is None else (model,)
    error = error_of(
        find, step, 512, max_batch_size=2, state=state
    )  # with room for what joins hold
    (folder / "error.txt").write_text(f"{type(error).__name__}: {error}")


def search_until_one_fails_within_a_collective(rank, folder):
    """Rank 1 fails where rank 0 waits for it already, and stays until rank 0 has ended."""
    join(rank, 2, folder)
    pid = of_all(os.getpid())[0]
    heartbeat.BEAT_S = 0.05
    wrapper = DistributedDataParallel(Residual(64))

    def hook(_, bucket):  # torch compares annotations
        op = dist.ReduceOp.BAND if rank else dist.ReduceOp.SUM  # of floats there is none
        return dist.all_reduce(bucket.buffer(), op, async_op=True).get_future()

    wrapper.register_comm_hook(None, hook)
    error = error_of(find, backward_of(wrapper), 512, state=(wrapper,), max_batch_size=2)
    (folder / "error.txt").write_text(str(error))
    wait_until(lambda: has_ended(pid))


def has_ended(pid):
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
