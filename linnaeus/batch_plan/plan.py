"""The batch plan: everything that depends on the batch size, computed once, before training.

`plan_batches` is a pure function of the configuration and of a few `Facts`; loader, optimizer, schedule and
trainer take their numbers from the `BatchPlan` it returns.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain
from operator import itemgetter
from typing import Any

from linnaeus.batch_plan.advice import plan_advice
from linnaeus.batch_plan.effective_batch import (
    Facts,
    keeps_rest,
    nearby_size,
    plan_epochs,
    unused_keys,
)
from linnaeus.batch_plan.scaling import planned_warmup, scale_factor
from linnaeus.batch_plan.stages import Stage
from linnaeus.config.schema import OptimizerConfig, ScheduleConfig, TrainConfig
from linnaeus.runtime.errors import DataError

OptimizerNode = OptimizerConfig | Mapping[str, Any]
"""The OPTIMIZER node. Learning rate and weight decay of a `_target_` node (a mapping) are never scaled."""


@dataclass(frozen=True)
class BatchPlan:
    """Everything that depends on the batch size. Where the size changes, scalars describe the largest.

    Attributes:
        micro_batch_size: samples per rank and forward pass.
        accumulation_steps: forward passes per optimizer step.
        world_size: number of ranks.
        effective_batch_size: samples per optimizer step over all ranks.
        learning_rate, weight_decay: after scaling; the learning rate is its peak.
        lr_scale, weight_decay_scale: factors of the configured learning rate and weight decay.
        warmup_steps: optimizer steps of the warm-up.
        num_samples: number of training samples.
        epochs: the stages of each epoch.
        lr_scales: `lr_scale` for each effective batch size of the run.
        keep_rest: whether an epoch ends with a smaller step of the micro-batches that are left.
        max_steps: TRAIN.MAX_STEPS, which may end the run within its last epoch.
        notes, warnings: sentences for the user; see `plan_advice`.
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
    max_steps: int | None = None
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
        return tuple(
            sum(s.num_steps * s.effective_batch_size for s in stages) for stages in self.epochs
        )

    @cached_property
    def total_steps(self) -> int:
        """Optimizer steps of the run."""
        return sum(self.steps_per_epoch)

    def is_over(self, epoch: int, samples_done: int) -> bool:
        """Whether no step is left after `epoch` epochs and `samples_done` samples of the next one."""
        is_last = epoch == self.num_epochs - 1 and self.max_steps is not None
        return epoch >= self.num_epochs or (is_last and not self.rest_of_epoch(epoch, samples_done))

    @property
    def changes(self) -> bool:
        """Whether a batch schedule changes the effective batch size."""
        return len(self.lr_scales) > 1

    def with_max_micro_batch(self, max_micro_batch_size: int) -> BatchPlan:
        """The same optimizer steps, split into more micro-batches where theirs are larger than this.

        The sizes of a step's micro-batches differ by one where they do not divide its samples.
        """
        epochs = tuple(
            tuple(stage.with_max_micro_batch(max_micro_batch_size) for stage in each)
            for each in self.epochs
        )
        largest = max(chain.from_iterable(epochs), key=lambda stage: stage.effective_batch_size)
        return replace(
            self,
            micro_batch_size=largest.micro_batch_size,
            accumulation_steps=largest.accumulation_steps,
            epochs=epochs,
        )

    @property
    def smallest_micro_batch(self) -> int:
        """Samples of the smallest micro-batch of the run."""
        return min(stage.micro_batches[-1] for stage in self.stages)

    def rest_of_epoch(self, epoch: int, samples_done: int = 0) -> list[Stage]:
        """Return the stages left in an epoch, counted from 0, after `samples_done` samples over all ranks.

        If an optimizer step of this plan ends there, they are the plan's stages. Otherwise the run was
        resumed with other sizes. Each stage then has the steps that fit in its remaining samples, and leaves
        the rest to the next stage. The rest of the last stage is less than a step.
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
        is_cut = self.max_steps is not None and epoch == self.num_epochs - 1
        num_samples = self.samples_per_epoch[epoch] if is_cut else self.num_samples
        if self.keep_rest and len(planned) > 1:
            planned = planned[:-1]  # the smaller step at the end is computed again
        for stage in planned:
            end += stage.num_steps * stage.effective_batch_size
            limit = num_samples if stage is planned[-1] else end
            steps = max(limit - samples_done, 0) // stage.effective_batch_size
            if steps:
                stages.append(replace(stage, num_steps=steps))
                samples_done += steps * stage.effective_batch_size
        size = planned[-1].micro_batch_size
        micro_batches = (num_samples - samples_done) // (self.world_size * size)
        if self.keep_rest and micro_batches > 0:  # fewer than 0 if the dataset has shrunk
            stages.append(Stage(micro_batches * size, micro_batches, self.world_size, num_steps=1))
        return stages

    def parts(self, epoch: int, samples_done: int, fraction: float) -> tuple[bool, int]:
        """Whether a part of an epoch ends after these samples, and the optimizer steps to the next end.

        Parts are equal fractions of the epoch, rounded to whole steps. The last one ends with the epoch.

        >>> facts = Facts(max_micro_batch_size=8, world_size=1, num_samples=80, learning_rate=0.1)
        >>> plan = plan_batches(TrainConfig(), OptimizerConfig(), ScheduleConfig(), facts)
        >>> [plan.parts(0, 8 * step, 0.25) for step in (0, 2, 4)]
        [(True, 2), (True, 3), (False, 1)]
        """
        num_steps = whole = self.steps_per_epoch[epoch]
        if self.max_steps is not None and epoch == self.num_epochs - 1:  # it may be cut
            whole = max(num_steps, self.num_samples // self.effective_batch_size)
        rest = sum(stage.num_steps for stage in self.rest_of_epoch(epoch, samples_done))
        done = num_steps - rest
        ends = {round(number * fraction * whole) for number in range(math.ceil(1 / fraction))}
        following = min((end for end in ends if end > done), default=whole)
        return done in ends or done == whole, following - done

    def position(self, epoch: int, samples_done: int) -> float:
        """The optimizer steps of this plan before a point of the run; a fraction between two steps.

        A run that follows the plan from its start has a whole number here: its steps so far. The point comes
        after `epoch` finished epochs and `samples_done` samples of the current one, over all ranks.
        """
        if epoch >= self.num_epochs:
            return float(self.total_steps)
        starts = self._starts[epoch]
        row = bisect.bisect_right(starts, samples_done, key=itemgetter(0)) - 1
        samples, steps, stage = starts[row]
        return steps + min(
            (samples_done - samples) / stage.effective_batch_size, float(stage.num_steps)
        )

    @cached_property
    def _starts(self) -> list[list[tuple[int, int, Stage]]]:
        """The stages of each epoch, with the epoch's samples and the run's optimizer steps before each."""
        starts, steps = [], 0
        for stages in self.epochs:
            rows, samples = [], 0
            for stage in stages:
                rows.append((samples, steps, stage))
                samples += stage.num_steps * stage.effective_batch_size
                steps += stage.num_steps
            starts.append(rows)
        return starts

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
    def _stage_ends(self) -> list[int]:
        """The first optimizer step after each stage."""
        return list(accumulate(stage.num_steps for stage in self.stages))

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for `config.yaml`, checkpoints and W&B."""
        steps = self.steps_per_epoch[: -1 if self.max_steps and self.num_epochs > 1 else None]
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
        if self.changes:  # a row for every optimizer step from which on the sizes differ
            rows: list[list[Any]] = [
                ["FROM_STEP", "MICRO_BATCH", "ACCUMULATION_STEPS", "EFFECTIVE_BATCH"]
            ]
            for start, stage in zip([0, *self._stage_ends], self.stages, strict=False):
                row = [
                    start,
                    stage.micro_batch_size,
                    stage.accumulation_steps,
                    stage.effective_batch_size,
                ]
                if rows[-1][1:] != row[1:]:
                    rows.append(row)
            plan["STAGES"] = rows
        return plan | {"NOTES": list(self.notes), "WARNINGS": list(self.warnings)}

    def differences(self, saved: Mapping[str, Any]) -> list[str]:
        """Return differences from a checkpoint's plan (`as_dict`), as `NAME before -> now`."""
        now = self.as_dict()
        names = ("EFFECTIVE_BATCH", "LEARNING_RATE", "TOTAL_STEPS", "WARMUP_STEPS")
        changed = [name for name in names if saved[name] != now[name]]
        return [f"{name} {saved[name]} -> {now[name]}" for name in changed]


def plan_batches(
    train: TrainConfig, optimizer: OptimizerNode, schedule: ScheduleConfig, facts: Facts
) -> BatchPlan:
    """Work out everything that depends on the batch size.

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
        raise DataError(
            f"{facts.num_samples} training samples are too few for {facts.world_size} ranks"
        )
    splits, epochs = plan_epochs(train, facts)
    sizes = [split.samples_per_rank * facts.world_size for split in splits]  # effective batch sizes
    lr_rule = decay_rule = "none"
    base = 1
    if isinstance(optimizer, OptimizerConfig):
        name, base = optimizer.NAME, optimizer.BASE_BATCH_SIZE
        lr_rule, decay_rule = optimizer.LR_SCALING, optimizer.WEIGHT_DECAY_SCALING
    else:
        name = str(optimizer["_target_"])
    lr_scales = {size: scale_factor(lr_rule, size, base) for size in sizes}
    effective_batch_size = max(sizes)
    largest = splits[sizes.index(effective_batch_size)]
    decay_scale = scale_factor(decay_rule, effective_batch_size, base)
    learning_rate = facts.learning_rate * lr_scales[effective_batch_size]
    steps_per_epoch = [sum(stage.num_steps for stage in stages) for stages in epochs]
    advice = plan_advice(
        train,
        facts,
        splits,
        optimizer=name,
        learning_rate=learning_rate,
        min_steps=facts.num_samples // effective_batch_size
        if train.MAX_STEPS
        else min(steps_per_epoch),
    )
    warmup_steps, notes = planned_warmup(schedule, steps_per_epoch, lr_scales[sizes[0]])
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
        max_steps=train.MAX_STEPS,
        notes=(*unused_keys(train), *nearby_size(train, facts), *notes),
        warnings=() if advice is None else (advice,),
    )
