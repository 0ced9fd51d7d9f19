"""BatchNorm's running statistics, which every rank gathers from its own samples, made equal on all ranks.

This happens before a validation, and before a checkpoint between an epoch's last step and its validation.
Any other checkpoint within an epoch holds the statistics of rank 0 as they are: at the first forward pass of
the next optimizer step DistributedDataParallel gives them to every rank anyway. Training is therefore the
same bit for bit, whether or not it stops and resumes in between.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn

from linnaeus.dist import World

TOO_FEW_FOR_BATCHNORM = "Expected more than 1 value per channel when training"
"""What torch says of a micro-batch of one sample, where a feature map has one pixel."""

_STATISTICS = ("running_mean", "running_var")


@torch.no_grad()
def distribute_batchnorm(model: nn.Module, ema_module: nn.Module | None, world: World, how: str) -> None:
    """Make the running statistics equal on all ranks. Every rank must call this.

    All ranks then validate one and the same model, the one that a checkpoint of rank 0 holds. The statistics
    of the average are rank 0's in both modes: the average of each rank follows the statistics of that rank
    and drifts from the others, and only that of rank 0 is in a checkpoint, to resume from.

    Args:
        model: without DistributedDataParallel.
        ema_module: the average of its weights; None without EMA.
        world: the processes; if there is only one, nothing happens.
        how: `reduce` averages the model's statistics over the ranks, `broadcast` takes those of rank 0,
            `none` leaves all as it is.
    """
    if how == "none" or not world.is_distributed:
        return
    _replace_statistics(model, world.mean if how == "reduce" else _of_main)
    if ema_module is not None:
        _replace_statistics(ema_module, _of_main)


def _replace_statistics(module: nn.Module, combine: Callable[[Tensor], Tensor]) -> None:
    """Replace all statistics, as one vector, by what `combine` makes of it."""
    buffers = [buffer for name, buffer in module.named_buffers() if name.rpartition(".")[2] in _STATISTICS]
    if not buffers:
        return
    # In float64, so that the mean of equal float32 values is that value, for any number of ranks: averaging
    # statistics a second time, after a stop between the last step and the validation, changes no bit.
    vector = combine(torch.cat([buffer.flatten().double() for buffer in buffers]))
    for buffer, values in zip(buffers, vector.split([buffer.numel() for buffer in buffers]), strict=True):
        buffer.copy_(values.view_as(buffer))


def _of_main(vector: Tensor) -> Tensor:
    torch_dist.broadcast(vector, src=0)
    return vector
