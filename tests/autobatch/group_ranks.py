"""`auto_find_batch_size` on each rank of a process group, as a program: what each scenario gave, as JSON.

    python -m tests.autobatch.group_ranks FOLDER SCENARIO...

A rank writes `FOLDER/<rank>.json`: of each scenario what it returned, or the error that it raised. RANK,
WORLD_SIZE and the address of the store are in the environment.
"""

from __future__ import annotations

import datetime
import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional_collectives
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from linnaeus.autobatch import silence
from linnaeus.autobatch.group import of_main, together
from linnaeus.memory.process import held_bytes
from linnaeus.utils.autobatch import AutoBatchResult, auto_find_batch_size

MIB = 2**20
GROUP_TIMEOUT_S = 2
"""Of the process group's collectives: every search that takes longer must do without them."""

Step = Callable[[Any], object]


def limit_gb(num_samples: float) -> float:
    """The limit under which about so many samples of one MiB fit, at a fraction of 0.8."""
    return (held_bytes() + num_samples * MIB) / 2**30 / 0.8


def find(step: Step | None = None, num_samples: float = 32, **arguments: Any) -> AutoBatchResult:
    """A search over samples of one MiB, under a limit for so many of them."""
    defaults: dict[str, Any] = {"max_batch_size": 64, "memory_limit_gb": limit_gb(num_samples)}
    return auto_find_batch_size(step or (lambda batch: None), samples, **{**defaults, **arguments})


def samples(n: int) -> torch.Tensor:
    return torch.ones(n, MIB // 4)


def facts(result: AutoBatchResult) -> dict[str, Any]:
    return {"size": result.batch_size, "ran": list(result.ran_on_every_rank)}


def unequal_limits(rank: int) -> Any:
    return facts(find(num_samples=40 if rank == 0 else 20))


def slower_than_the_group(rank: int) -> Any:
    began = time.monotonic()
    result = find(lambda batch: time.sleep(0.7), max_batch_size=4, num_samples=64)
    return facts(result) | {"seconds": time.monotonic() - began}


def alone(rank: int) -> Any:
    return facts(find(max_batch_size=8, group=False)) if rank == 0 else None


def different_arguments(rank: int) -> Any:
    return facts(find(max_batch_size=8 + rank))


def wrong_argument(rank: int) -> Any:
    return facts(find(max_batch_size="many" if rank == 1 else 8))


def raises_on_main(rank: int) -> Any:
    def step(batch: Any) -> None:
        if rank == 0:
            raise KeyError("a broken step")

    return facts(find(step))


def raises_on_other(rank: int) -> Any:
    def step(batch: Any) -> None:
        if rank == 1:
            raise KeyError("a broken step")

    return facts(find(step))


def nothing_fits_on_other(rank: int) -> Any:
    return facts(find(memory_limit_gb=0.01 if rank == 1 else limit_gb(32)))


def prepares(rank: int) -> Any:
    """Rank 1 fails before its search, while rank 0 is in it."""
    with together() as control:
        assert control is not None
        if rank == 1:
            raise OSError("no such data set")
        return facts(find())


def together_twice(rank: int) -> Any:
    with together() as control:
        answers = [of_main(control, f"of {rank}")]
        found = [facts(find(max_batch_size=size))["size"] for size in (4, 8)]
        with together() as inner:
            answers.append(of_main(inner, rank))
            found.append(inner is control)
    return [*answers, *found]


def fails_in_the_second(rank: int) -> Any:
    with together():
        find(max_batch_size=4)
        return raises_on_other(rank)


def unequal_bounds(rank: int) -> Any:
    bounds = ({"dataset": 9, "host": 12}, {"dataset": 7, "own": 20})[rank]
    result = find(num_samples=64, bounds=bounds)
    return facts(result) | {"limited_by": result.limited_by}


def good_again(rank: int) -> Any:
    return facts(find(max_batch_size=4))


def collective(rank: int) -> Any:
    return facts(find(lambda batch: dist.all_reduce(batch)))


def collective_in_make_batch(rank: int) -> Any:
    def make_batch(n: int) -> torch.Tensor:
        dist.barrier()
        return samples(n)

    return facts(auto_find_batch_size(lambda batch: None, make_batch, memory_limit_gb=8.0))


def functional(rank: int) -> Any:
    """Functional collectives of all ranks, and of one."""
    alone = group_of_one(rank)

    def found(group: dist.ProcessGroup) -> Any:
        def step(batch: torch.Tensor) -> None:
            functional_collectives.all_reduce(batch, "sum", group).sum()

        return facts(find(step, max_batch_size=4))

    return {"alone": attempt(found, alone), "all": attempt(found, dist.group.WORLD)}


def refused_on_one(rank: int) -> Any:
    """Rank 0 would begin a collective of its wrapper."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8)))
    model(torch.ones(2, 8)).sum().backward()
    if rank == 1:
        model.module.append(DeepSpeedEngine(8, 8))
    return facts(find(state=(model,), max_batch_size=4))


def unequal_wrappers(rank: int) -> Any:
    """Rank 1 wraps its model once more; then a wrapper that only garbage collection can remove."""
    alone = group_of_one(rank)
    model = nn.Linear(8, 8)
    wrapper = DistributedDataParallel(model)
    more = [DistributedDataParallel(model, process_group=alone)] if rank == 1 else []
    outcomes = [attempt(lambda rank: facts(find(state=(model,), max_batch_size=4)), rank)]
    gc.disable()
    try:
        if more:
            more[0].cycle = more
            more = []
        outcomes.append(attempt(lambda rank: facts(find(state=(model,), max_batch_size=4)), rank))
    finally:
        gc.enable()
    return [*outcomes, wrapper.module is model]


def group_of_one(rank: int) -> Any:
    return [dist.new_group([each]) for each in range(2)][rank]


def what_remains(rank: int) -> Any:
    def around() -> list[Any]:
        connections = psutil.Process().net_connections("tcp")
        return [sorted(each.name for each in threading.enumerate()), len(connections)]

    dist.barrier()
    before = around()
    find(max_batch_size=4)
    dist.barrier()
    return [before, around()]


def not_called(rank: int) -> Any:
    from linnaeus.autobatch import group

    usual, group.ARRIVAL_S = group.ARRIVAL_S, 1.0
    try:
        return facts(find()) if rank == 0 else None
    finally:
        group.ARRIVAL_S = usual


def subgroups(rank: int) -> Any:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine, other = pairs if rank < 2 else reversed(pairs)
    refused = ""
    try:
        find(group=other)
    except ValueError as error:
        refused = str(error)
    found = facts(find(group=mine, num_samples=40 if rank < 2 else 20))

    def step(batch: Any) -> None:
        if rank == 3:
            raise KeyError("a broken step")

    found["error"] = attempt(lambda rank: facts(find(step, group=mine, max_batch_size=4)), rank)
    found["different"] = attempt(lambda rank: facts(find(group=mine, max_batch_size=4 + rank)), rank)
    return found | {"refused": refused}


class Net(nn.Module):
    """With BatchNorm; a parameter that no step uses, and one that steps use on some of the batches."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm, self.leave = nn.Linear(64, 256), nn.BatchNorm1d(256), nn.Linear(256, 8)
        self.sometimes = nn.Linear(8, 8)
        self.never = nn.Linear(8, 8)
        self.num_calls = 0

    def forward(self, x: torch.Tensor, detour: bool) -> torch.Tensor:
        self.num_calls += 1
        y: torch.Tensor = self.leave(self.norm(self.enter(x)).relu())
        return self.sometimes(y) if detour else y


class WithoutUnused(Net):
    def __init__(self) -> None:
        super().__init__()
        del self.never, self.sometimes


def halved_allreduce(_, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations
    """A communication hook that training cannot do without."""
    summed = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return summed.then(lambda future: future.value()[0] / 4)


def training(kind: type[Net], steps_before: int, options: dict[str, Any], search: bool) -> tuple[Any, int]:
    """The tensors after some steps, a search if so wanted, and further steps."""
    torch.manual_seed(0)
    wrapper = DistributedDataParallel(kind(), **{name: options[name] for name in options if name != "hook"})
    if options.get("hook"):
        wrapper.register_comm_hook(None, halved_allreduce)
    optimizer = torch.optim.AdamW(wrapper.parameters(), lr=1e-2, weight_decay=0.1)
    batches = torch.Generator().manual_seed(dist.get_rank())

    def step(x: torch.Tensor, detour: bool = False) -> None:
        wrapper(x, detour).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def train(num_steps: int) -> None:
        for _ in range(num_steps):
            step(torch.randn(16, 64, generator=batches))

    train(steps_before)
    size = 0
    if search:
        uses_all = bool(options.get("find_unused_parameters"))
        size = auto_find_batch_size(
            lambda x: step(x, detour=uses_all), lambda n: torch.randn(n, 64), state=(wrapper, optimizer),
            max_batch_size=16, memory_limit_gb=8.0,
        ).batch_size  # fmt: skip
    train(3)
    moments = [value for entry in optimizer.state.values() for value in entry.values()]
    return [
        *wrapper.state_dict().values(),
        *moments,
        torch.rand(4),
        torch.tensor(wrapper.module.num_calls),
    ], size


WRAPPERS: dict[str, tuple[type[Net], dict[str, Any]]] = {
    "plain": (WithoutUnused, {}),
    "views": (WithoutUnused, {"gradient_as_bucket_view": True}),
    "unused": (Net, {"find_unused_parameters": True}),
    "static": (WithoutUnused, {"static_graph": True}),
    "static with a hook": (WithoutUnused, {"static_graph": True, "hook": True}),
    "static with unused": (Net, {"static_graph": True, "gradient_as_bucket_view": True}),
}


def compared(name: str, steps_before: int) -> dict[str, Any]:
    """Whether training after a search equals that without one, bit for bit."""
    kind, options = WRAPPERS[name]
    expected, _ = training(kind, steps_before, options, search=False)
    found, size = training(kind, steps_before, options, search=True)
    is_same = len(found) == len(expected) and all(map(torch.equal, found, expected))
    return {"same": is_same, "size": size}


def wrappers(rank: int) -> Any:
    cases = [(name, 0) for name in WRAPPERS] + [("plain", 1), ("unused", 2), ("static", 1), ("static", 2)]
    return {f"{name} {before}": compared(name, before) for name, before in cases}


def negative_control(rank: int) -> Any:
    """What the comparison says where the reducer's notes are not undone."""
    undo = silence._forget_trials
    silence._forget_trials = lambda wrapper: None
    try:
        outcomes = {name: attempt(lambda name: compared(name, 0), name) for name in ("unused", "static")}
        return outcomes
    finally:
        silence._forget_trials = undo


def bare_model(rank: int) -> Any:
    """`state` holds the model, the step uses its wrapper."""
    model = WithoutUnused()
    wrapper = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> None:
        wrapper(x, False).sum().backward()
        optimizer.step()

    return facts(
        auto_find_batch_size(
            step,
            lambda n: torch.randn(n, 64),
            state=(model, optimizer),
            max_batch_size=8,
            memory_limit_gb=8.0,
        )
    )


def sync_batchnorm(rank: int) -> Any:
    """torch's own runs on accelerators alone: what it is told in a search, and afterwards."""
    model = nn.SyncBatchNorm.convert_sync_batchnorm(WithoutUnused(), dist.group.WORLD)
    with silence.silenced((model,)):
        inside = dist.get_world_size(model.norm.process_group)
    return [inside, dist.get_world_size(model.norm.process_group)]


class DeepSpeedEngine(nn.Linear):
    """By its name."""


def refused(rank: int) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    sharded = nn.Linear(8, 8)
    fully_shard(sharded, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    hooked = DistributedDataParallel(nn.Linear(8, 8), static_graph=True)
    hooked._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    model = nn.Linear(8, 8)
    parts = {
        "FSDP1": lambda: FullyShardedDataParallel(nn.Linear(8, 8), device_id=torch.device("cpu")),
        "FSDP2": lambda: sharded,
        "DeepSpeed": lambda: DeepSpeedEngine(8, 8),
        "ZeRO": lambda: ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1),
        "hook": lambda: hooked,
    }
    return {name: attempt(lambda part: facts(find(state=(part(),))), part) for name, part in parts.items()}


def dies(rank: int) -> Any:
    """The rank in DIES is killed while rank 0 tries sizes."""

    def step(batch: Any) -> None:
        if rank == int(os.environ["DIES"]) == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.5)

    if rank == int(os.environ["DIES"]) == 1:
        threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
    return facts(find(step))


def describe(error: BaseException) -> dict[str, str]:
    kind = next(kind for kind in type(error).__mro__ if not kind.__name__.startswith("_"))
    return {"kind": kind.__name__, "text": str(error)}


def attempt(function: Callable[[Any], Any], argument: Any) -> Any:
    try:
        return function(argument)
    except Exception as error:
        return describe(error)


def run(folder: Path, names: list[str], **options: Any) -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=GROUP_TIMEOUT_S), **options)
    patient = dist.new_group(timeout=datetime.timedelta(seconds=60))
    rank, found = dist.get_rank(), {}
    find(
        max_batch_size=2, memory_limit_gb=8.0, group=False
    )  # loads what searches use, so that limits are exact
    for name in names:
        found[name] = attempt(globals()[name], rank)
        (folder / f"{rank}.json").write_text(json.dumps(found))
        if len(names) > 1:
            dist.barrier(group=patient)


def spawned(rank: int, folder: Path, names: list[str]) -> None:
    """For `torch.multiprocessing.spawn`."""
    torch.set_num_threads(1)
    run(folder, names, init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2:])
