"""The batch plan: everything that depends on the batch size, computed once, before training.

Nothing here needs torch. `plan_batches` is a pure function of the configuration and of a few `Facts`; the
loader, the optimizer, the schedule and the trainer take their numbers from the `BatchPlan` it returns.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain
from typing import Any

from linnaeus.autobatch.split import Split
from linnaeus.batching.advice import plan_warnings
from linnaeus.batching.facts import Facts
from linnaeus.batching.sizes import keeps_rest, plan_epochs, unused_keys
from linnaeus.batching.stages import Stage, make_stage
from linnaeus.config.schema import OptimizerConfig, ScheduleConfig, TrainConfig
from linnaeus.errors import DataError
from linnaeus.words import counted

WARMUP_ADDED_FROM = 8.0
"""A learning rate scaled up this many times gets a warm-up where none is set."""

WARMUP_HINT_FROM = 4.0
"""A learning rate scaled up this many times without a warm-up gets a hint."""

WARMUP_FRACTION = 0.05
"""Length of an added warm-up, as a fraction of all optimizer steps. Large batches fail in the first epochs
unless the learning rate rises slowly (Goyal et al. 2017, section 2.2)."""

WARMUP_MAX_EPOCHS = 5
"""Longest added warm-up, in epochs: as long as that of Goyal et al. 2017."""

OptimizerNode = OptimizerConfig | Mapping[str, Any]
"""The OPTIMIZER node. Learning rate and weight decay of a `_target_` node (a mapping) are never scaled."""

_STAGE_COLUMNS = ("FROM_STEP", "MICRO_BATCH", "ACCUMULATION_STEPS", "EFFECTIVE_BATCH")


@dataclass(frozen=True)
class BatchPlan:
    """Everything that depends on the batch size. Where the size changes, scalars describe the largest.

    Attributes:
        micro_batch_size: samples per rank and forward pass.
        accumulation_steps: forward passes per optimizer step.
        world_size: number of ranks.
        effective_batch_size: samples per optimizer step over all ranks.
        learning_rate: the peak learning rate, after scaling.
        weight_decay: the weight decay, after scaling.
        lr_scale, weight_decay_scale: factors of the configured learning rate and weight decay.
        warmup_steps: optimizer steps of the warm-up.
        num_samples: number of training samples.
        epochs: the stages of each epoch.
        lr_scales: `lr_scale` for each effective batch size of the run.
        keep_rest: whether an epoch ends with a smaller step of the micro-batches that are left.
        notes, warnings: sentences for the user.
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
    keep_rest: bool = False
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of all epochs."""
        return tuple(chain.from_iterable(self.epochs))

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
        """Samples that each epoch really uses, over all ranks."""
        return tuple(sum(s.num_steps * s.effective_batch_size for s in stages) for stages in self.epochs)

    @cached_property
    def total_steps(self) -> int:
        """Optimizer steps of the run."""
        return sum(self.steps_per_epoch)

    @property
    def changes(self) -> bool:
        """Whether a batch schedule changes the effective batch size."""
        return len(self.lr_scales) > 1

    def limited(self, max_micro_batch_size: int) -> BatchPlan:
        """The same optimizer steps, split into more micro-batches where theirs are larger than this.

        The sizes of a step's micro-batches differ by one where they do not divide its samples.
        """
        samples_per_rank = self.effective_batch_size // self.world_size
        largest = Stage(samples_per_rank, self.accumulation_steps, self.world_size, num_steps=0)
        largest = largest.limited(max_micro_batch_size)
        return replace(
            self,
            micro_batch_size=largest.micro_batch_size,
            accumulation_steps=largest.accumulation_steps,
            epochs=tuple(
                tuple(stage.limited(max_micro_batch_size) for stage in stages) for stages in self.epochs
            ),
        )

    @property
    def smallest_micro_batch(self) -> int:
        """Samples of the smallest micro-batch of the run."""
        return min(stage.micro_batches[-1] for stage in self.stages)

    def rest_of_epoch(self, epoch: int, samples_done: int = 0) -> list[Stage]:
        """The remaining stages of an epoch.

        Where an optimizer step of this plan ends after `samples_done`, they are those of the plan. Otherwise
        the run was resumed with other sizes: the steps that fit into each stage's remaining samples follow,
        and what a stage leaves over goes to the next one. What the last one leaves over is less than a step.

        Args:
            epoch: counted from 0.
            samples_done: samples of this epoch that have been trained on, over all ranks.
        """
        planned = self._planned_rest(epoch, samples_done)
        return self._replanned_rest(epoch, samples_done) if planned is None else planned

    def _planned_rest(self, epoch: int, samples_done: int) -> list[Stage] | None:
        """The stages that follow an optimizer step of the plan; None if no step ends after these samples."""
        stages = []
        for stage in self.epochs[epoch]:
            skipped = min(samples_done // stage.effective_batch_size, stage.num_steps)
            samples_done -= skipped * stage.effective_batch_size
            if samples_done and skipped < stage.num_steps:
                return None
            if skipped < stage.num_steps:
                stages.append(replace(stage, num_steps=stage.num_steps - skipped))
        return stages if samples_done == 0 else None

    def _replanned_rest(self, epoch: int, samples_done: int) -> list[Stage]:
        """The steps of a resumed epoch whose samples so far are no whole steps of this plan."""
        stages, end, planned = [], 0, self.epochs[epoch]
        if self.keep_rest and len(planned) > 1:
            planned = planned[:-1]  # the smaller step at the end is worked out anew
        for stage in planned:
            end += stage.num_steps * stage.effective_batch_size
            limit = self.num_samples if stage is planned[-1] else end
            steps = max(limit - samples_done, 0) // stage.effective_batch_size
            if steps:
                stages.append(replace(stage, num_steps=steps))
                samples_done += steps * stage.effective_batch_size
        size = planned[-1].micro_batch_size
        micro_batches = (self.num_samples - samples_done) // (self.world_size * size)
        if self.keep_rest and micro_batches > 0:  # fewer than 0 if the dataset has shrunk
            stages.append(make_stage(1, Split(size, micro_batches), self.world_size))
        return stages

    def position(self, epoch: int, samples_done: int) -> float:
        """The optimizer steps of this plan before a point of the run; a fraction between two steps.

        A run that follows the plan from its start has a whole number here: its steps so far.

        Args:
            epoch: finished epochs.
            samples_done: samples of the current epoch that have been trained on, over all ranks.
        """
        if epoch >= self.num_epochs:
            return float(self.total_steps)
        steps = float(self._epoch_starts[epoch])
        for stage in self.epochs[epoch]:
            in_stage = min(samples_done, stage.num_steps * stage.effective_batch_size)
            steps += in_stage / stage.effective_batch_size
            samples_done -= in_stage
        return steps

    def micro_batches(self, epoch: int, samples_done: int = 0) -> Iterator[int]:
        """The size of each remaining micro-batch of an epoch; arguments as for `rest_of_epoch`."""
        for stage in self.rest_of_epoch(epoch, samples_done):
            for _ in range(stage.num_steps):
                yield from stage.micro_batches

    def batch_size_lr_factor(self, position: float) -> float:
        """Learning-rate factor for the batch size at a position, relative to the peak, in (0, 1]."""
        if not self.changes:
            return 1.0
        number = min(bisect.bisect_right(self._stage_ends, position), len(self.stages) - 1)
        return self.lr_scales[self.stages[number].effective_batch_size] / self.lr_scale

    @cached_property
    def _epoch_starts(self) -> list[int]:
        """Optimizer steps of the plan before each epoch."""
        return [0, *accumulate(self.steps_per_epoch)]

    @cached_property
    def _stage_ends(self) -> list[int]:
        """The first optimizer step after each stage."""
        return list(accumulate(stage.num_steps for stage in self.stages))

    def _size_changes(self) -> list[list[int]]:
        """A row of `_STAGE_COLUMNS` for every optimizer step from which on the sizes differ."""
        rows: list[list[int]] = []
        for start, stage in zip([0, *self._stage_ends], self.stages, strict=False):
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
            plan["STAGES"] = [list(_STAGE_COLUMNS), *self._size_changes()]
        return plan | {"NOTES": list(self.notes), "WARNINGS": list(self.warnings)}

    def differences(self, saved: Mapping[str, Any]) -> list[str]:
        """What differs from the plan that a checkpoint has saved with `as_dict`, as `NAME before -> now`."""
        now = self.as_dict()
        names = ("EFFECTIVE_BATCH", "LEARNING_RATE", "TOTAL_STEPS", "WARMUP_STEPS")
        changed = [name for name in names if saved.get(name, now[name]) != now[name]]
        return [f"{name} {saved[name]} -> {now[name]}" for name in changed]


def plan_batches(
    train: TrainConfig, optimizer: OptimizerNode, schedule: ScheduleConfig, facts: Facts
) -> BatchPlan:
    """Work out everything that depends on the batch size.

    Args:
        train: the TRAIN node.
        optimizer: the OPTIMIZER node.
        schedule: the SCHEDULE node.
        facts: the size that fits, and what else the plan depends on.

    Raises:
        ConfigError: a configured size is not possible; the message names sizes that are.
        DataError: fewer training samples than ranks.

    >>> facts = Facts(max_micro_batch_size=48, world_size=2, num_samples=1000, learning_rate=0.1)
    >>> train = TrainConfig(EFFECTIVE_BATCH_SIZE=128)
    >>> plan = plan_batches(train, OptimizerConfig(), ScheduleConfig(), facts)
    >>> plan.micro_batch_size, plan.accumulation_steps, plan.total_steps
    (32, 2, 84)
    """
    if facts.num_samples < facts.world_size:
        raise DataError(f"{facts.num_samples} training samples are too few for {facts.world_size} processes")
    splits, epochs = plan_epochs(train, facts)
    sizes = [split.samples_per_rank * facts.world_size for split in splits]  # effective batch sizes
    lr_scales = {size: _scales(optimizer, size)[0] for size in sizes}
    effective_batch_size = max(sizes)
    largest = splits[sizes.index(effective_batch_size)]
    _, decay_scale = _scales(optimizer, effective_batch_size)
    learning_rate = facts.learning_rate * lr_scales[effective_batch_size]
    steps_per_epoch = [sum(stage.num_steps for stage in stages) for stages in epochs]
    warmup_steps, notes = _warmup(schedule, steps_per_epoch, lr_scales[sizes[0]])
    name = optimizer.NAME if isinstance(optimizer, OptimizerConfig) else str(optimizer["_target_"])
    return BatchPlan(
        micro_batch_size=largest.micro_batch_size,
        accumulation_steps=largest.accumulation_steps,
        world_size=facts.world_size,
        effective_batch_size=effective_batch_size,
        learning_rate=learning_rate,
        weight_decay=facts.weight_decay * decay_scale,
        lr_scale=lr_scales[effective_batch_size],
        weight_decay_scale=decay_scale,
        warmup_steps=warmup_steps,
        num_samples=facts.num_samples,
        epochs=epochs,
        lr_scales=lr_scales,
        keep_rest=keeps_rest(train),
        notes=(*unused_keys(train), *notes),
        warnings=tuple(plan_warnings(train, facts, splits, optimizer=name, learning_rate=learning_rate)),
    )


def configured_warmup(config: ScheduleConfig, steps_per_epoch: Sequence[int]) -> int:
    """Optimizer steps of the configured warm-up, at most those of the run.

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
    """Optimizer steps in a number of first epochs, which may end in the middle of one."""
    if len(set(steps_per_epoch)) == 1:
        return round(epochs * steps_per_epoch[0])
    whole = int(epochs)
    part = (epochs - whole) * steps_per_epoch[whole] if whole < len(steps_per_epoch) else 0
    return round(sum(steps_per_epoch[:whole]) + part)


def _scales(optimizer: OptimizerNode, effective_batch_size: int) -> tuple[float, float]:
    """Factors of the learning rate and of the weight decay."""
    if not isinstance(optimizer, OptimizerConfig):
        return 1.0, 1.0
    base = optimizer.BASE_BATCH_SIZE
    return (
        scale_factor(optimizer.LR_SCALING, effective_batch_size, base),
        scale_factor(optimizer.WEIGHT_DECAY_SCALING, effective_batch_size, base),
    )


def _warmup(
    schedule: ScheduleConfig, steps_per_epoch: Sequence[int], first_lr_scale: float
) -> tuple[int, list[str]]:
    """Optimizer steps of the warm-up, and notes on it.

    Args:
        first_lr_scale: `lr_scale` of the first optimizer step.
    """
    steps = configured_warmup(schedule, steps_per_epoch)
    if steps or first_lr_scale < WARMUP_HINT_FROM:
        return steps, []
    reason = f"OPTIMIZER.LR_SCALING multiplies the rate by {first_lr_scale:.4g}"
    if first_lr_scale < WARMUP_ADDED_FROM:
        return 0, [f"{reason} and no warm-up is set; SCHEDULE.WARMUP_EPOCHS 1 or more may steady the start"]
    wanted = round(WARMUP_FRACTION * sum(steps_per_epoch))
    steps = max(1, min(wanted, _steps_in(WARMUP_MAX_EPOCHS, steps_per_epoch)))
    return steps, [
        f"{reason} and no warm-up is set, so one of {counted(steps, 'step')} is added "
        f"({WARMUP_FRACTION:.0%} of training, at most {WARMUP_MAX_EPOCHS} epochs); "
        "SCHEDULE.WARMUP_STEPS sets another"
    ]


def scale_factor(rule: str, effective_batch_size: int, base_batch_size: int) -> float:
    """The factor of the learning rate or of the weight decay.

    `linear`: k. A step of k times as many samples replaces k steps of SGD ("Accurate, Large Minibatch SGD",
    Goyal et al. 2017, section 2.1).

    `sqrt`: the square root of k. For the learning rate it keeps the noise of Adam and RMSprop alike ("On the
    SDEs and Scaling Rules for Adaptive Gradient Algorithms", Malladi et al. 2022, definition 5.1; that rule
    also changes the betas and epsilon, which are left alone here). The best weight decay is proportional to
    the root of batch size / (samples × epochs) ("Decoupled Weight Decay Regularization", Loshchilov and
    Hutter 2019, appendix B.1); with a learning rate that also grows by the root, the decay per epoch stays
    the same.

    `none`: 1.

    Args:
        rule: `none`, `linear` or `sqrt`.
        effective_batch_size: samples per optimizer step over all ranks.
        base_batch_size: the effective batch size that the learning rate was tuned for.

    >>> [scale_factor(rule, 1024, 256) for rule in ("linear", "sqrt", "none")]
    [4.0, 2.0, 1.0]
    """
    match rule:
        case "linear":
            return effective_batch_size / base_batch_size
        case "sqrt":
            return math.sqrt(effective_batch_size / base_batch_size)
        case _:
            return 1.0
