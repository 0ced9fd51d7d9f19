"""The processes of a run: a single one, or the ranks that torchrun started."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as torch_dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from linnaeus.errors import ConfigError, LinnaeusError

T = TypeVar("T")

_BUCKET_BYTES = 25 * 1024**2  # default bucket size of DistributedDataParallel


@dataclass(frozen=True)
class World:
    """The processes of this run, as one of them sees them.

    Attributes:
        device: where this rank computes.
        store: key-value store of the process group; None if torchrun did not start this process.
        single_rank_group: process group with this rank as its only member; None if `store` is None.
    """

    device: torch.device
    rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    store: torch_dist.Store | None = None
    single_rank_group: torch_dist.ProcessGroup | None = None

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes the run's files."""
        return self.rank == 0

    @property
    def is_distributed(self) -> bool:
        """Whether there are other ranks."""
        return self.world_size > 1

    def warm_up_collectives(self) -> None:
        """Run one all-reduce of a bucket's size, so that the backend allocates its buffers now."""
        if self.is_distributed and self.device.type != "cpu":
            torch_dist.all_reduce(torch.zeros(_BUCKET_BYTES, dtype=torch.uint8, device=self.device))

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank. It must be picklable."""
        if not self.is_distributed:
            return value
        box = [value]
        torch_dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order, on every rank. They must be picklable."""
        if not self.is_distributed:
            return [value]
        values: list[Any] = [None] * self.world_size
        torch_dist.all_gather_object(values, value)
        return values

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """The tensor, overwritten with its mean over the ranks."""
        if self.is_distributed:
            torch_dist.all_reduce(value)
            value /= self.world_size
        return value

    def on_main(self, function: Callable[[], T]) -> T:
        """Call `function` on rank 0 and return its result on every rank.

        Raises:
            LinnaeusError: the function raised it on rank 0; every rank raises it.
        """
        outcome: tuple[T | None, LinnaeusError | None] = (None, None)
        if self.is_main:
            try:
                outcome = (function(), None)
            except LinnaeusError as error:
                outcome = (None, error)
        result, failure = self.broadcast(outcome)
        if failure is not None:
            raise failure
        return result  # type: ignore[no-any-return]

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks of a float64 tensor on the CPU, on every rank."""
        if not self.is_distributed:
            return values
        group = getattr(self, "host_group", None)
        # Without a group for the host, the tensor goes where the default group's backend can see it.
        total = values.to(self.device if group is None else values.device, copy=True)
        torch_dist.all_reduce(total, group=group)
        return total.cpu()


def resolve_device(name: str, local_rank: int = 0) -> torch.device:
    """The device of the process with this local rank, by the name in `EXPERIMENT.DEVICE`.

    Raises:
        ConfigError: when torch does not know the device, or the machine does not have it.
    """
    problem = f"EXPERIMENT.DEVICE: {name!r} "
    if name == "auto":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        name = accelerator.type if accelerator else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(problem + "is not a torch device; use auto, cpu, cuda or cuda:0") from None
    if device.type == "cpu":
        return device
    if device.type == "cuda":
        count = torch.cuda.device_count()
        index = local_rank if device.index is None else device.index
        if index >= count:
            have = "no CUDA device" if count == 0 else f"{count} CUDA device(s)"
            remedy = "use cpu" if count == 0 else f"start at most {count} processes per node or use cpu"
            raise ConfigError(problem + f"needs device {index}, but this machine has {have}; {remedy}")
        return torch.device("cuda", index)
    current = torch.accelerator.current_accelerator(check_available=True)
    if current is None or current.type != device.type:
        raise ConfigError(problem + "is not available on this machine; use auto or cpu")
    return device


def wrap(
    model: nn.Module, world: World, *, find_unused_parameters: bool = False, single_rank: bool = False
) -> nn.Module:
    """The model as the training step calls it: wrapped in DistributedDataParallel if there are other ranks.

    Args:
        model: on its device.
        world: the processes.
        find_unused_parameters: for models that do not use every parameter in every step.
        single_rank: use a process group of this rank alone, with the same buckets and hooks. For trials of
            the batch-size search: the other ranks take no part in them.
    """
    if not world.is_distributed:
        return model
    group = world.single_rank_group if single_rank else torch_dist.group.WORLD
    for module in model.modules():
        if isinstance(module, nn.SyncBatchNorm):
            module.process_group = group
    return DistributedDataParallel(
        model,
        device_ids=None if world.device.type == "cpu" else [world.device],
        process_group=group,
        gradient_as_bucket_view=True,
        find_unused_parameters=find_unused_parameters,
    )


@contextlib.contextmanager
def join(device_name: str, backend: str, timeout: timedelta) -> Iterator[World]:
    """Join the process group that torchrun describes in the environment, if any, and leave it on exit.

    Args:
        device_name: `EXPERIMENT.DEVICE`.
        backend: `auto`, `nccl` or `gloo`.
        timeout: of collectives; the batch-size search uses none to wait.
    """
    device = resolve_device(device_name, local_rank=int(os.environ.get("LOCAL_RANK", "0")))
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index or 0)
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        yield World(device)
        return
    store, rank, world_size = next(torch_dist.rendezvous("env://"))  # processes start at different times
    # After a restart, this attempt must not read the keys of the previous one.
    store = torch_dist.PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    if backend == "auto":
        backend = "nccl" if device.type == "cuda" else "gloo"
    torch_dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    single_rank_group = torch_dist.new_group([rank], use_local_synchronization=True)
    assert isinstance(single_rank_group, torch_dist.ProcessGroup)  # this rank is a member
    try:
        yield World(
            device=device,
            rank=rank,
            world_size=world_size,
            local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            store=torch_dist.PrefixStore("linnaeus", store),
            single_rank_group=single_rank_group,
        )
    finally:
        torch_dist.destroy_process_group()
