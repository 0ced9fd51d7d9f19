"""DistributedDataParallel: wrap the model, and make BatchNorm's statistics equal on all ranks.

Every rank gathers running statistics from its own samples. They are made equal before a validation, and
before a checkpoint between an epoch's last step and its validation. Other checkpoints within an epoch hold
the statistics of one rank. At the first forward pass of the next optimizer step, DistributedDataParallel
copies the statistics of rank 0 to every rank. Training is therefore bit-identical, whether or not it stops
and resumes in between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from linnaeus.models.weights import BATCHNORM_STATISTICS
from linnaeus.runtime.distributed import World
from linnaeus.training.callbacks import CallbackState


def wrap(
    model: nn.Module,
    world: World,
    *,
    find_unused_parameters: bool = False,
    single_rank: bool = False,
) -> nn.Module:
    """The model as the training step calls it: in DistributedDataParallel where other ranks have copies.

    Args:
        model: on its device.
        world: the ranks.
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
    if isinstance(model, FSDPModule):
        return model
    wrapper = DistributedDataParallel(
        model,
        device_ids=None if world.device.type == "cpu" else [world.device],
        process_group=group,
        gradient_as_bucket_view=True,
        find_unused_parameters=find_unused_parameters,
    )
    has_sparse_gradients = any(getattr(module, "sparse", False) for module in model.modules())
    if not find_unused_parameters and not has_sparse_gradients:
        _rebuild_buckets_now(wrapper)
    return wrapper


def _rebuild_buckets_now(wrapper: DistributedDataParallel) -> None:
    """Force the wrapper to rebuild its buckets before the first step.

    After its first backward pass, a wrapper sorts the gradients into new buckets, in order of their arrival.
    With three or more ranks, the rounding of a sum depends on its place in a bucket. The first step of a
    resumed run would then differ from an uninterrupted run. A backward pass of zeros, from the last parameter
    to the first, sets the order before the first step.
    """
    parameters = [parameter for parameter in wrapper.module.parameters() if parameter.requires_grad]
    wrapper.reducer.prepare_for_backward([])
    for parameter in reversed(parameters):
        parameter.backward(torch.zeros_like(parameter))
    for parameter in parameters:
        parameter.grad = None


@torch.no_grad()
def broadcast_tensors(module: nn.Module, world: World) -> None:
    """Give rank 0's parameters and buffers to all ranks. Collective."""
    for tensor in (*module.parameters(), *module.buffers()) if world.is_distributed else ():
        torch_dist.broadcast(tensor, src=0)


class BatchNormBroadcast:
    """Callback that gives rank 0's statistics to all ranks of a sharded model, as DDP does."""

    @torch.no_grad()
    def on_step_start(self, state: CallbackState) -> None:
        """Broadcast the running statistics."""
        mesh: Any = next(state.model.parameters()).device_mesh  # type: ignore[attr-defined]

        def of_first(vector: Tensor) -> Tensor:
            for group in mesh.get_all_groups():
                torch_dist.broadcast(vector, group=group, group_src=0)
            return vector

        _replace_statistics(state.model, of_first)


@torch.no_grad()
def distribute_batchnorm(model: nn.Module, ema_module: nn.Module | None, world: World) -> None:
    """Average the running statistics over the ranks. Every rank must call this.

    All ranks then validate the same model, which a checkpoint of rank 0 holds. The average of the weights
    takes the statistics of rank 0, because each rank's average follows its own statistics and drifts from the
    others, and a checkpoint holds only the average of rank 0.

    Args:
        model: without DistributedDataParallel.
        ema_module: the average of its weights; None without EMA.
        world: the ranks; if there is only one, nothing happens.
    """
    if not world.is_distributed:
        return
    _replace_statistics(model, world.mean)
    if ema_module is not None:
        _replace_statistics(ema_module, _of_main)


def _replace_statistics(module: nn.Module, combine: Callable[[Tensor], Tensor]) -> None:
    """Replace all statistics, as one vector, by the result of `combine`."""
    named = module.named_buffers()
    buffers = [buffer for name, buffer in named if name.rpartition(".")[2] in BATCHNORM_STATISTICS]
    if not buffers:
        return
    # In float64, so that the mean of equal float32 values is that value, for any number of ranks: averaging
    # statistics a second time, after a stop between the last step and the validation, changes no bit.
    vector = combine(torch.cat([buffer.flatten().double() for buffer in buffers]))
    for buffer, values in zip(
        buffers, vector.split([buffer.numel() for buffer in buffers]), strict=True
    ):
        buffer.copy_(values.view_as(buffer))


def _of_main(vector: Tensor) -> Tensor:
    torch_dist.broadcast(vector, src=0)
    return vector
