"""The learning rate, a pure function of the optimizer step.

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
    """The learning rate as a fraction of its peak, for each optimizer step, counted from 0.

    It rises linearly over `warmup_steps`, then falls to `min_fraction` at `total_steps`: along half a cosine
    (Loshchilov and Hutter 2017, eq. 5), along a line, or not at all.

    Args:
        name: `cosine`, `linear` or `constant`.
        total_steps: optimizer steps of the whole run, the warm-up included.
        warmup_steps: optimizer steps of the warm-up.
        min_fraction: fraction of the peak at the end.
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


def build_schedule(
    config: ScheduleConfig,
    optimizer: torch.optim.Optimizer,
    *,
    total_steps: int,
    warmup_steps: int,
    batch_size_lr_factor: Callable[[int], float] = lambda step: 1.0,
) -> torch.optim.lr_scheduler.LambdaLR:
    """The schedule; call its `step` once per optimizer step.

    Args:
        config: the SCHEDULE node; its warm-up keys are not read.
        optimizer: its learning rates are the peaks.
        total_steps: optimizer steps of the whole run, the warm-up included.
        warmup_steps: optimizer steps of the warm-up.
        batch_size_lr_factor: learning-rate factor for the batch size of an optimizer step, in (0, 1].
    """
    factor = lr_factor(
        config.NAME, total_steps=total_steps, warmup_steps=warmup_steps, min_fraction=config.MIN_LR_FRACTION
    )
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: factor(step) * batch_size_lr_factor(step)
    )
