"""From the largest batch that fits to all that depends on the batch: worked out once, before training.

Nothing here needs torch. `plan_batches` is a pure function of the configuration and of a few `Facts`; the
loader, the optimizer, the schedule and the trainer take their numbers from the `BatchPlan` it returns.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain
from typing import Any

from linnaeus.batching.advice import AdviceContext, warnings
from linnaeus.batching.scaling import (
    WARMUP_ADDED_FROM,
    WARMUP_FRACTION,
    WARMUP_HINT_FROM,
    WARMUP_MAX_EPOCHS,
    added_warmup,
    lr_scale,
    weight_decay_scale,
)
from linnaeus.batching.sizes import EFFECTIVE, SCHEDULE, SizeLimits, plan_epochs, unused_keys
from linnaeus.batching.stages import Stage
from linnaeus.config.schema import OptimizerConfig, ScheduleConfig, TrainConfig
from linnaeus.errors import DataError

_STAGE_COLUMNS = ("FROM_STEP", "MICRO_BATCH", "ACCUMULATION_STEPS", "EFFECTIVE_BATCH")


@dataclass(frozen=True)
class Facts:
    """What a plan depends on beside the configuration.

    Attributes:
        max_micro_batch_size: samples per process and forward pass that fit.
        world_size: processes.
        num_samples: of the training data.
        learning_rate: the optimizer's, before scaling.
        weight_decay: the optimizer's, before scaling.
        optimizer: its name; what a high rate is depends on it.
        batchnorm: `none`, `local` to each process, or `synchronised` over all.
        pretrained: whether training starts from somebody's weights.
    """

    max_micro_batch_size: int
    world_size: int
    num_samples: int
    learning_rate: float
    weight_decay: float = 0.0
    optimizer: str = "adamw"
    batchnorm: str = "none"
    pretrained: bool = False


@dataclass(frozen=True)
class BatchPlan:
    """All that depends on the batch size. Where the size changes, the largest is meant.

    Attributes:
        micro_batch_size: samples per process and forward pass.
        accumulation_steps: forward passes per optimizer step.
        world_size: processes.
        effective_batch_size: samples per optimizer step over all processes.
        learning_rate: the peak.
        weight_decay: as it is used.
        lr_scale, weight_decay_scale: what the configured values were multiplied by.
        warmup_steps: optimizer steps of the warm-up.
        num_samples: of the training data.
        epochs: the stages of each epoch.
        lr_scales: the rate's scale of each effective batch that occurs.
        notes, warnings: what the user should know.
    """

    micro_batch_size: int
    accumulation_steps: int
    world_size: int
    effective_batch_size: int
    learning_rate: float
    weight_decay: float
    lr_scale: float
    weight_decay_scale: float
    warmup_steps: int
    num_samples: int
    epochs: tuple[tuple[Stage, ...], ...]
    lr_scales: dict[int, float]
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def num_epochs(self) -> int:
        """Epochs of the run."""
        return len(self.epochs)

    @cached_property
    def steps_per_epoch(self) -> tuple[int, ...]:
        """Optimizer steps of each epoch."""
        return tuple(sum(stage.num_steps for stage in stages) for stages in self.epochs)

    @cached_property
    def samples_per_epoch(self) -> tuple[int, ...]:
        """Samples of each epoch over all processes, those left out not counted."""
        return tuple(sum(s.num_steps * s.effective_batch_size for s in stages) for stages in self.epochs)

    @cached_property
    def total_steps(self) -> int:
        """Optimizer steps of the run."""
        return sum(self.steps_per_epoch)

    @property
    def changes(self) -> bool:
        """Whether the effective batch changes on purpose."""
        return len(self.lr_scales) > 1

    def rest_of_epoch(self, epoch: int, samples_done: int = 0) -> list[Stage]:
        """The stages that are left of an epoch.

        Args:
            epoch: counted from 0.
            samples_done: samples of the epoch that are done, per process.
        """
        stages = []
        for stage in self.epochs[epoch]:
            samples = stage.num_steps * stage.samples_per_rank
            skipped = min(samples_done, samples)
            samples_done -= skipped
            steps = (samples - skipped) // stage.samples_per_rank
            if steps:
                stages.append(replace(stage, num_steps=steps))
        return stages

    def micro_batches(self, epoch: int, samples_done: int = 0) -> Iterator[int]:
        """The size of each micro-batch that is left of an epoch; arguments as for `rest_of_epoch`."""
        for stage in self.rest_of_epoch(epoch, samples_done):
            for _ in range(stage.num_steps * stage.accumulation_steps):
                yield stage.micro_batch_size

    def batch_size_lr_factor(self, step: int) -> float:
        """Learning-rate factor for the effective batch size of an optimizer step, relative to the peak."""
        if not self.changes:
            return 1.0
        ends, stages = self._timeline
        stage = stages[min(bisect.bisect_right(ends, step), len(stages) - 1)]
        return self.lr_scales[stage.effective_batch_size] / self.lr_scale

    @cached_property
    def _timeline(self) -> tuple[list[int], list[Stage]]:
        """All stages of the run, and the optimizer step after the last of each."""
        stages = list(chain.from_iterable(self.epochs))
        return list(accumulate(stage.num_steps for stage in stages)), stages

    def _changes(self) -> list[list[int]]:
        """A row of `_STAGE_COLUMNS` for every optimizer step from which on another size holds."""
        rows: list[list[int]] = []
        ends, stages = self._timeline
        for start, stage in zip([0, *ends], stages, strict=False):
            row = [start, stage.micro_batch_size, stage.accumulation_steps, stage.effective_batch_size]
            if not rows or rows[-1][1:] != row[1:]:
                rows.append(row)
        return rows

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for `config.yaml`, checkpoints and W&B."""
        steps = self.steps_per_epoch
        plan: dict[str, Any] = {
            "MICRO_BATCH": self.micro_batch_size,
            "ACCUMULATION_STEPS": self.accumulation_steps,
            "WORLD_SIZE": self.world_size,
            "EFFECTIVE_BATCH": self.effective_batch_size,
            "LEARNING_RATE": self.learning_rate,
            "WEIGHT_DECAY": self.weight_decay,
            "WARMUP_STEPS": self.warmup_steps,
            "STEPS_PER_EPOCH": steps[0] if len(set(steps)) == 1 else list(steps),
            "TOTAL_STEPS": self.total_steps,
        }
        if self.changes:
            plan["STAGES"] = [list(_STAGE_COLUMNS), *self._changes()]
        return plan | {"NOTES": list(self.notes), "WARNINGS": list(self.warnings)}


def plan_batches(
    train: TrainConfig, optimizer: OptimizerConfig | None, schedule: ScheduleConfig, facts: Facts
) -> BatchPlan:
    """Work out everything that depends on the batch size.

    Args:
        train: the TRAIN node.
        optimizer: the OPTIMIZER node; None for a `_target_` node, whose rate is never scaled.
        schedule: the SCHEDULE node.
        facts: sizes, and what the warnings look at.

    Raises:
        ConfigError: the sizes asked for cannot be had; the message names sizes that can.
        DataError: fewer training samples than processes.

    >>> facts = Facts(max_micro_batch_size=48, world_size=2, num_samples=1000, learning_rate=0.1)
    >>> plan = plan_batches(TrainConfig(EFFECTIVE_BATCH_SIZE=128), None, ScheduleConfig(), facts)
    >>> plan.micro_batch_size, plan.accumulation_steps, plan.total_steps
    (32, 2, 84)
    """
    world_size, num_samples = facts.world_size, facts.num_samples
    if num_samples < world_size:
        raise DataError(f"{num_samples} training samples are too few for {world_size} processes")
    limits = SizeLimits(
        facts.max_micro_batch_size, world_size, num_samples, batchnorm=facts.batchnorm == "local"
    )
    splits, epochs = plan_epochs(train, limits)
    largest = max(splits, key=lambda split: split.samples_per_rank)
    effective = largest.samples_per_rank * world_size
    scales = {
        split.samples_per_rank * world_size: _lr_scale(optimizer, split.samples_per_rank * world_size)
        for split in splits
    }
    decay_scale = 1.0
    if optimizer is not None:
        rule = optimizer.WEIGHT_DECAY_SCALING
        decay_scale = weight_decay_scale(rule, effective, optimizer.BASE_BATCH_SIZE)
    plan = BatchPlan(
        micro_batch_size=largest.micro_batch_size,
        accumulation_steps=largest.accumulation_steps,
        world_size=world_size,
        effective_batch_size=effective,
        learning_rate=facts.learning_rate * scales[effective],
        weight_decay=facts.weight_decay * decay_scale,
        lr_scale=scales[effective],
        weight_decay_scale=decay_scale,
        warmup_steps=0,
        num_samples=num_samples,
        epochs=epochs,
        lr_scales=scales,
    )
    first_lr_scale = scales[splits[0].samples_per_rank * world_size]
    warmup_steps, notes = _warmup(schedule, plan.steps_per_epoch, first_lr_scale)
    context = AdviceContext(
        splits=splits, limits=limits, batchnorm=facts.batchnorm, pretrained=facts.pretrained,
        optimizer=facts.optimizer, learning_rate=plan.learning_rate, size_key=_size_key(train),
        micro_batch_key=_micro_batch_key(train),
    )  # fmt: skip
    return replace(
        plan,
        warmup_steps=warmup_steps,
        notes=(*unused_keys(train), *notes),
        warnings=tuple(warnings(context)),
    )


def configured_warmup(config: ScheduleConfig, steps_per_epoch: Sequence[int]) -> int:
    """The warm-up that the configuration sets, in optimizer steps, never longer than the run.

    WARMUP_STEPS wins over WARMUP_FRACTION, and that over WARMUP_EPOCHS.

    >>> configured_warmup(ScheduleConfig(WARMUP_EPOCHS=1.5), [10, 20, 20])
    20
    """
    total_steps = sum(steps_per_epoch)
    if config.WARMUP_STEPS is not None:
        steps = config.WARMUP_STEPS
    elif config.WARMUP_FRACTION is not None:
        steps = round(config.WARMUP_FRACTION * total_steps)
    else:
        steps = _steps_in(config.WARMUP_EPOCHS or 0.0, steps_per_epoch)
    return min(steps, total_steps)


def _steps_in(epochs: float, steps_per_epoch: Sequence[int]) -> int:
    """Optimizer steps in the first epochs, the last of which may be a part of one."""
    if len(set(steps_per_epoch)) == 1:
        return round(epochs * steps_per_epoch[0])
    whole = int(epochs)
    part = (epochs - whole) * steps_per_epoch[whole] if whole < len(steps_per_epoch) else 0
    return round(sum(steps_per_epoch[:whole]) + part)


def _lr_scale(optimizer: OptimizerConfig | None, effective_batch_size: int) -> float:
    if optimizer is None:
        return 1.0
    return lr_scale(optimizer.LR_SCALING, effective_batch_size, optimizer.BASE_BATCH_SIZE)


def _warmup(
    schedule: ScheduleConfig, steps_per_epoch: Sequence[int], first_lr_scale: float
) -> tuple[int, list[str]]:
    """Optimizer steps of the warm-up, and the notes on it; `first_lr_scale` is the LR scale at the start."""
    steps = configured_warmup(schedule, steps_per_epoch)
    if steps or first_lr_scale < WARMUP_HINT_FROM:
        return steps, []
    reason = f"OPTIMIZER.LR_SCALING multiplies the rate by {first_lr_scale:.4g}"
    if first_lr_scale < WARMUP_ADDED_FROM:
        return 0, [f"{reason} and no warm-up is set; SCHEDULE.WARMUP_EPOCHS 1 or more may steady the start"]
    steps = added_warmup(sum(steps_per_epoch), _steps_in(WARMUP_MAX_EPOCHS, steps_per_epoch))
    return steps, [
        f"{reason} and no warm-up is set, so one of {steps} steps is added ({WARMUP_FRACTION:.0%} of "
        f"training, at most {WARMUP_MAX_EPOCHS} epochs); SCHEDULE.WARMUP_STEPS sets another"
    ]


def _size_key(train: TrainConfig) -> str:
    """The key that sets the largest effective batch."""
    name = train.BATCH_SCHEDULE.NAME
    if name != "constant":
        return f"{SCHEDULE}.MILESTONES" if name == "milestones" else f"{SCHEDULE}.LAST"
    if train.EFFECTIVE_BATCH_SIZE is not None:
        return EFFECTIVE
    return "TRAIN.ACCUMULATION_STEPS" if train.ACCUMULATION_STEPS > 1 else "DATA.BATCH_SIZE"


def _micro_batch_key(train: TrainConfig) -> str:
    """The key that sets the smallest micro-batch."""
    if train.BATCH_SCHEDULE.NAME != "constant":
        return f"{SCHEDULE}.FIRST"
    return "DATA.BATCH_SIZE" if train.EFFECTIVE_BATCH_SIZE is None else f"DATA.BATCH_SIZE, {EFFECTIVE}"
