"""The learning rate: a function of the position in the run, and with `plateau` of its validations.

>>> factor = lr_factor(ScheduleConfig("linear", MIN_LR_FRACTION=0.0), steps_per_epoch=[5, 5], warmup_steps=2)
>>> [round(factor(step), 3) for step in (0, 1, 2, 6, 10)]
[0.5, 1.0, 1.0, 0.5, 0.0]
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from linnaeus.batch_plan.scaling import steps_in
from linnaeus.config.schema import ScheduleConfig
from linnaeus.metrics import larger_is_better

_PLATEAU_STATE = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch", "_last_lr")
"""Counters of torch's scheduler. The rest of its state is configuration, which a resumed run may change."""


def lr_factor(
    config: ScheduleConfig, *, steps_per_epoch: Sequence[int], warmup_steps: int
) -> Callable[[float], float]:
    """Return the learning rate as a fraction of its peak, for each position in the run.

    A position is a number of optimizer steps, counted from 0; a fraction lies between two steps.

    It rises linearly over `warmup_steps`. Then, up to the last step of the run,

    * `cosine`, `linear`: it falls to MIN_LR_FRACTION along half a cosine (Loshchilov and Hutter 2017, eq. 5)
      or a line;
    * `constant`, `plateau`: it stays;
    * `step`, `multistep`: it is multiplied by GAMMA at epochs that count from the start of the run, as in
      torch's StepLR and MultiStepLR;
    * `wsd`: it stays, then falls to MIN_LR_FRACTION by 1 - sqrt(progress) (Hägele et al. 2024, "Scaling Laws
      and Compute-Optimal Training Beyond Fixed Training Durations"), as in timm's WSDLRScheduler;
    * `onecycle`: it falls along half a cosine, and has risen from START_LR_FRACTION along another one, as in
      torch's OneCycleLR; the momentum stays.

    Args:
        config: the SCHEDULE node; its warm-up keys are not read.
        steps_per_epoch: optimizer steps of each epoch of the run.
        warmup_steps: optimizer steps of the warm-up, which the others include.
    """
    total_steps, low = sum(steps_per_epoch), config.MIN_LR_FRACTION
    begin, end, drops = warmup_steps, total_steps, _milestone_steps(config, steps_per_epoch)
    if config.NAME == "onecycle":  # torch has the peak and the end in a step, not after it
        begin, end = max(warmup_steps - 1, 0), total_steps - 1
    elif config.NAME == "wsd":
        decay = round(0.2 * (total_steps - warmup_steps))  # as in timm
        if config.DECAY_EPOCHS is not None:
            decay = total_steps - steps_in(
                max(len(steps_per_epoch) - config.DECAY_EPOCHS, 0), steps_per_epoch
            )
        begin = max(total_steps - decay, warmup_steps)

    def factor(position: float) -> float:
        if config.NAME == "onecycle" and position < begin:
            return _cosine(config.START_LR_FRACTION, 1.0, position / begin)
        if position < warmup_steps:
            return min((position + 1) / warmup_steps, 1.0)
        progress = min(max(position - begin, 0.0) / max(end - begin, 1), 1.0)
        match config.NAME:
            case "cosine" | "onecycle":
                return _cosine(1.0, low, progress)
            case "linear":
                return low + (1 - low) * (1 - progress)
            case "wsd":
                return low + (1 - low) * (1 - math.sqrt(progress))
            case _:
                return float(config.GAMMA ** bisect.bisect_right(drops, position))

    return factor


def _cosine(start: float, end: float, progress: float) -> float:
    """From `start` to `end` along half a cosine."""
    return end + (start - end) * ((1 + math.cos(math.pi * progress)) / 2)


def _milestone_steps(config: ScheduleConfig, steps_per_epoch: Sequence[int]) -> list[int]:
    """Return the optimizer steps before each drop of `step` and `multistep`."""
    num_epochs = len(steps_per_epoch)
    epochs: Sequence[int] = ()
    if config.NAME == "step":
        length = config.STEP_EPOCHS or -(-num_epochs // 3)
        epochs = range(length, num_epochs, length)
    elif config.NAME == "multistep":
        epochs = config.MILESTONES or (-(-num_epochs // 2), -(-3 * num_epochs // 4))
    return sorted(sum(steps_per_epoch[:epoch]) for epoch in epochs if epoch < num_epochs)


class Schedule:
    """Sets the learning rate of every parameter group: the position decides, and with `plateau` a metric.

    Args:
        config: the SCHEDULE node; its warm-up keys are not read.
        optimizer: its learning rates are the peaks, which each group keeps as `initial_lr`. A group's rate is
            multiplied by its `lr_scale`, if it has one, as timm's schedulers do.
        steps_per_epoch, warmup_steps: as for `lr_factor`.
        batch_size_lr_factor: learning-rate factor for the batch size at a position, in (0, 1].
        metric: name of the metric that `plateau` watches.
        min_delta: an improvement of it is larger than this.

    Attributes:
        lr: the learning rate of the next optimizer step, before any group's `lr_scale`.
    """

    def __init__(
        self,
        config: ScheduleConfig,
        optimizer: torch.optim.Optimizer,
        *,
        steps_per_epoch: Sequence[int],
        warmup_steps: int,
        batch_size_lr_factor: Callable[[float], float] = lambda position: 1.0,
        metric: str = "loss",
        min_delta: float = 0.0,
    ) -> None:
        self._optimizer = optimizer
        self._factor = lr_factor(config, steps_per_epoch=steps_per_epoch, warmup_steps=warmup_steps)
        self._batch_size_lr_factor = batch_size_lr_factor
        self._plateau: ReduceLROnPlateau | None = None
        if (
            config.NAME == "plateau"
        ):  # the optimizer that it sees has the fraction of the peak as its learning rate
            self._plateau = ReduceLROnPlateau(
                torch.optim.SGD([torch.zeros(())], lr=1.0),
                "max" if larger_is_better(metric) else "min",
                factor=config.GAMMA,
                patience=config.PATIENCE,
                min_lr=config.MIN_LR_FRACTION,
                threshold=min_delta,
                threshold_mode="abs",
            )
        for group in optimizer.param_groups:
            group["initial_lr"] = float(group["lr"])
        self.apply(0)

    def apply(self, position: float) -> None:
        """Set the learning rates of the next optimizer step.

        Args:
            position: optimizer steps of the plan before it, as `BatchPlan.position` gives them.
        """
        factor = self._factor(position) * self._batch_size_lr_factor(position)
        if self._plateau is not None:
            factor *= self._plateau.optimizer.param_groups[0]["lr"]
        self.lr = self._optimizer.param_groups[0]["initial_lr"] * factor
        for group in self._optimizer.param_groups:
            lr = group["initial_lr"] * factor * group.get("lr_scale", 1.0)
            if isinstance(
                group["lr"], torch.Tensor
            ):  # compiled and capturable optimizers read it in place
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def validated(self, value: float) -> None:
        """Let `plateau` see the metric of a validation; `apply` then sets the learning rate."""
        if self._plateau is not None:
            self._plateau.step(value)

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state of `plateau` as plain values; None for other schedules, which have no state."""
        if self._plateau is None:
            return None
        state = self._plateau.state_dict()
        return {name: state[name] for name in _PLATEAU_STATE}

    def load_state_dict(self, state: Mapping[str, Any] | None, *, same_metric: bool = True) -> None:
        """Restore a `state_dict`; of another metric, the learning rate alone."""
        if self._plateau is not None and state is not None:
            self._plateau.load_state_dict(dict(state) if same_metric else {})
            self._plateau.optimizer.param_groups[0]["lr"] = state["_last_lr"][0]
