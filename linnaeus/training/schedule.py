"""The learning rate, a pure function of the position in the run.

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
) -> Callable[[float], float]:
    """The learning rate as a fraction of its peak, for each position in the run.

    A position is a number of optimizer steps, counted from 0; a fraction lies between two steps.

    It rises linearly over `warmup_steps`, then falls to `min_fraction` at `total_steps`: along half a cosine
    (Loshchilov and Hutter 2017, eq. 5), along a line, or not at all.

    Args:
        name: `cosine`, `linear` or `constant`.
        total_steps: optimizer steps of the whole run, the warm-up included.
        warmup_steps: optimizer steps of the warm-up.
        min_fraction: fraction of the peak at the end.
    """

    def factor(position: float) -> float:
        if position < warmup_steps:
            return min((position + 1) / warmup_steps, 1.0)
        progress = min((position - warmup_steps) / max(total_steps - warmup_steps, 1), 1.0)
        match name:
            case "cosine":
                remaining = (1 + math.cos(math.pi * progress)) / 2
            case "linear":
                remaining = 1 - progress
            case _:
                return 1.0
        return min_fraction + (1 - min_fraction) * remaining

    return factor


class Schedule:
    """Sets the learning rate of every parameter group. It has no state: the position decides.

    Args:
        config: the SCHEDULE node; its warm-up keys are not read.
        optimizer: its learning rates are the peaks, which each group keeps as `initial_lr`. A group's rate is
            multiplied by its `lr_scale`, where it has one, as timm's schedulers do.
        total_steps: optimizer steps of the whole run, the warm-up included.
        warmup_steps: optimizer steps of the warm-up.
        batch_size_lr_factor: learning-rate factor for the batch size at a position, in (0, 1].

    Attributes:
        lr: the learning rate of the next optimizer step, before any group's `lr_scale`.
    """

    def __init__(
        self,
        config: ScheduleConfig,
        optimizer: torch.optim.Optimizer,
        *,
        total_steps: int,
        warmup_steps: int,
        batch_size_lr_factor: Callable[[float], float] = lambda position: 1.0,
    ) -> None:
        self._optimizer = optimizer
        self._factor = lr_factor(
            config.NAME, total_steps=total_steps, warmup_steps=warmup_steps,
            min_fraction=config.MIN_LR_FRACTION,
        )  # fmt: skip
        self._batch_size_lr_factor = batch_size_lr_factor
        for group in optimizer.param_groups:
            group["initial_lr"] = float(group["lr"])
        self.apply(0)

    def apply(self, position: float) -> None:
        """Set the learning rates of the next optimizer step.

        Args:
            position: optimizer steps of the plan before it, as `BatchPlan.position` gives them.
        """
        factor = self._factor(position) * self._batch_size_lr_factor(position)
        self.lr = self._optimizer.param_groups[0]["initial_lr"] * factor
        for group in self._optimizer.param_groups:
            lr = group["initial_lr"] * factor * group.get("lr_scale", 1.0)
            if isinstance(group["lr"], torch.Tensor):  # compiled and capturable optimizers read it in place
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
