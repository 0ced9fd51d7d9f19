"""Learning rate as a pure function of the optimizer step.

>>> factor = lr_factor("linear", total_steps=10, warmup_steps=2, min_fraction=0.0)
>>> [round(factor(step), 3) for step in (0, 1, 2, 6, 10)]
[0.5, 1.0, 1.0, 0.5, 0.0]
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from linnaeus.config.schema import ScheduleConfig


def lr_factor(
    name: str, *, total_steps: int, warmup_steps: int, min_fraction: float
) -> Callable[[int], float]:
    """The share of the peak rate at each optimizer step, counted from 0.

    The rate rises linearly to the peak over `warmup_steps`, then falls to `min_fraction` at `total_steps`:
    along half a cosine (Loshchilov and Hutter 2017, eq. 5), along a line, or not at all.

    Args:
        name: `cosine`, `linear` or `constant`.
        total_steps: optimizer steps of the whole run, the warm-up included.
        warmup_steps: optimizer steps of the warm-up.
        min_fraction: share of the peak at the end.
    """

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = min((step - warmup_steps) / max(total_steps - warmup_steps, 1), 1.0)
        match name:
            case "cosine":
                remaining = (1 + math.cos(math.pi * progress)) / 2
            case "linear":
                remaining = 1 - progress
            case _:
                return 1.0
        return min_fraction + (1 - min_fraction) * remaining

    return factor


def warmup_steps(config: ScheduleConfig, *, steps_per_epoch: int, total_steps: int) -> int:
    """Length of the warm-up in optimizer steps, never longer than the run.

    >>> warmup_steps(ScheduleConfig(WARMUP_EPOCHS=1.5), steps_per_epoch=10, total_steps=100)
    15
    """
    steps = config.WARMUP_STEPS
    if steps is None:
        steps = round(config.WARMUP_EPOCHS * steps_per_epoch)
    return min(steps, total_steps)


def build_schedule(
    config: ScheduleConfig, optimizer: torch.optim.Optimizer, *, steps_per_epoch: int, num_epochs: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """The schedule; call its `step` once per optimizer step.

    Args:
        config: the SCHEDULE node.
        optimizer: its rates are the peaks.
        steps_per_epoch: optimizer steps in one epoch, from the final batch size.
        num_epochs: epochs of the whole run.
    """
    total_steps = steps_per_epoch * num_epochs
    warmup = warmup_steps(config, steps_per_epoch=steps_per_epoch, total_steps=total_steps)
    factor = lr_factor(
        config.NAME, total_steps=total_steps, warmup_steps=warmup, min_fraction=config.MIN_LR_FRACTION
    )
    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
