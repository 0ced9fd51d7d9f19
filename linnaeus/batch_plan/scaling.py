"""How learning rate, weight decay and warm-up follow the batch size."""

from __future__ import annotations

import math
from collections.abc import Sequence

from linnaeus.config.schema import ScheduleConfig
from linnaeus.runtime.words import counted

WARMUP_ADDED_FROM = 8.0
"""A learning rate scaled up this many times gets a warm-up where none is set."""

WARMUP_FRACTION = 0.05
"""Length of an added warm-up, as a fraction of all optimizer steps. Large batches fail in the first epochs
unless the learning rate rises slowly (Goyal et al. 2017, section 2.2)."""

WARMUP_MAX_EPOCHS = 5
"""Longest added warm-up in epochs, as in Goyal et al. 2017."""


def scale_factor(rule: str, effective_batch_size: int, base_batch_size: int) -> float:
    """Return the factor of the learning rate or of the weight decay, for a `rule`.

    `linear`: k. A step of k times as many samples replaces k steps of SGD ("Accurate, Large Minibatch SGD",
    Goyal et al. 2017, section 2.1).

    `sqrt`: the square root of k. For the learning rate it keeps the noise of Adam and RMSprop alike ("On the
    SDEs and Scaling Rules for Adaptive Gradient Algorithms", Malladi et al. 2022, definition 5.1; that rule
    also changes the betas and epsilon, which are left alone here). The best weight decay is proportional to
    the root of batch size / (samples × epochs) ("Decoupled Weight Decay Regularization", Loshchilov and
    Hutter 2019, appendix B.1); with a learning rate that also grows by the root, the decay per epoch stays
    the same.

    `none`: 1.

    Here k is the effective batch size over that which the learning rate was tuned for.

    >>> [scale_factor(rule, 1024, 256) for rule in ("linear", "sqrt", "none")]
    [4.0, 2.0, 1.0]
    """
    k = effective_batch_size / base_batch_size
    return {"none": 1.0, "linear": k, "sqrt": math.sqrt(k)}[rule]


def planned_warmup(
    schedule: ScheduleConfig, steps_per_epoch: Sequence[int], first_lr_scale: float
) -> tuple[int, list[str]]:
    """Return the optimizer steps of the warm-up, and notes on it.

    `first_lr_scale` is the factor of the learning rate in the first step.
    """
    steps = configured_warmup(schedule, steps_per_epoch)
    if steps or first_lr_scale < WARMUP_ADDED_FROM:
        return steps, []
    wanted = round(WARMUP_FRACTION * sum(steps_per_epoch))
    steps = max(1, min(wanted, steps_in(WARMUP_MAX_EPOCHS, steps_per_epoch)))
    return steps, [
        f"OPTIMIZER.LR_SCALING multiplies the learning rate by {first_lr_scale:.4g} and no "
        "warm-up is set, so one of "
        f"{counted(steps, 'step')} is added "
        f"({WARMUP_FRACTION:.0%} of training, at most {WARMUP_MAX_EPOCHS} epochs); "
        "SCHEDULE.WARMUP_STEPS sets another"
    ]


def configured_warmup(config: ScheduleConfig, steps_per_epoch: Sequence[int]) -> int:
    """Return the optimizer steps of the configured warm-up, at most all steps of the run.

    WARMUP_STEPS wins over WARMUP_FRACTION, and that over WARMUP_EPOCHS. `onecycle` always has one.

    >>> configured_warmup(ScheduleConfig(WARMUP_EPOCHS=1.5), [10, 20, 20])
    20
    """
    total_steps = sum(steps_per_epoch)
    if config.WARMUP_STEPS is not None:
        steps = config.WARMUP_STEPS
    elif config.WARMUP_FRACTION is not None:
        steps = round(config.WARMUP_FRACTION * total_steps)
    elif config.NAME == "onecycle" and config.WARMUP_EPOCHS is None:
        steps = round(0.3 * total_steps)  # torch's `pct_start`
    else:
        steps = steps_in(config.WARMUP_EPOCHS or 0.0, steps_per_epoch)
    return min(steps, total_steps)


def steps_in(epochs: float, steps_per_epoch: Sequence[int]) -> int:
    """Optimizer steps in a number of first epochs, which may end in the middle of one."""
    whole = int(epochs)
    part = (epochs - whole) * steps_per_epoch[whole] if whole < len(steps_per_epoch) else 0
    return round(sum(steps_per_epoch[:whole]) + part)
