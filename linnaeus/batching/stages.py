"""Which micro-batches make up each optimizer step: for one size, and for a size that changes.

`samples_per_rank` is what one rank takes per optimizer step: its micro-batch size times the accumulation
steps. The effective batch size is `samples_per_rank` times the number of ranks.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MANY_ACCUMULATION_STEPS = 16
"""More are slow: the plan warns, and a growing batch takes a larger micro-batch instead where one fits."""


@dataclass(frozen=True)
class Split:
    """How one rank splits its samples of an optimizer step.

    Attributes:
        micro_batch_size: samples per process and forward pass.
        accumulation_steps: forward passes per optimizer step.
    """

    micro_batch_size: int
    accumulation_steps: int

    @property
    def samples_per_rank(self) -> int:
        """Samples per process and optimizer step."""
        return self.micro_batch_size * self.accumulation_steps


@dataclass(frozen=True)
class Stage:
    """Optimizer steps in a row that are alike.

    Attributes:
        num_steps: optimizer steps.
        micro_batch_size: samples per process and forward pass.
        accumulation_steps: forward passes per optimizer step.
        effective_batch_size: samples per optimizer step over all processes.
    """

    num_steps: int
    micro_batch_size: int
    accumulation_steps: int
    effective_batch_size: int

    @property
    def samples_per_rank(self) -> int:
        """Samples per process and optimizer step."""
        return self.micro_batch_size * self.accumulation_steps


SizeChange = tuple[int, Split]
"""From which epoch or optimizer step on, counted from 0, a split holds."""


def split_samples(samples_per_rank: int, max_micro_batch_size: int) -> Split:
    """The largest micro-batch size that divides `samples_per_rank`, hence the fewest accumulation steps.

    >>> split_samples(96, 40), split_samples(131, 131), split_samples(131, 128)
    (Split(micro_batch_size=32, accumulation_steps=3), Split(micro_batch_size=131, accumulation_steps=1), Split(micro_batch_size=1, accumulation_steps=131))
    """  # noqa: E501
    fewest = -(-samples_per_rank // max_micro_batch_size)
    steps = next(steps for steps in range(fewest, samples_per_rank + 1) if samples_per_rank % steps == 0)
    return Split(samples_per_rank // steps, steps)


def nearest(size: int, largest: int, suits: Callable[[int], bool]) -> list[int]:
    """The nearest sizes below and above that suit, as far as there are any within 1 and `largest`.

    >>> nearest(10, 100, lambda size: size % 4 == 0), nearest(3, 100, lambda size: size % 4 == 0)
    ([8, 12], [4])
    """
    below = next((other for other in range(min(size - 1, largest), 0, -1) if suits(other)), None)
    above = next((other for other in range(size + 1, largest + 1) if suits(other)), None)
    return [other for other in (below, above) if other is not None]


def growth(name: str, first: int, last: int, length: int, max_micro_batch_size: int) -> list[SizeChange]:
    """Samples per rank from `first` at unit 0 to `last` at unit `length`, along a line or an exponential.

    In between it is rounded down to whole micro-batches of the smaller end. Accumulation changes first; where
    it would come to more than `MANY_ACCUMULATION_STEPS`, the micro-batch doubles for as long as that fits.

    Args:
        name: `linear` or `exponential`.
        first, last: samples per rank; either may be the larger one.
        length: epochs or optimizer steps, at least 1.
        max_micro_batch_size: the largest micro-batch that fits.

    >>> [(start, split.samples_per_rank) for start, split in growth("linear", 8, 32, 4, 16)]
    [(0, 8), (2, 16), (3, 24), (4, 32)]
    """
    low, high = sorted((first, last))
    unit = split_samples(low, max_micro_batch_size).micro_batch_size
    sign = 1 if last >= first else -1

    def samples_at(position: int) -> int:
        if position in (0, length):
            return last if position else first
        progress = position / length
        target = first + (last - first) * progress
        if name == "exponential":
            target = first * (last / first) ** progress
        samples = math.floor(target + 1e-9)  # an exact power must not be rounded down to one less
        coarse = _coarse(samples, unit, max_micro_batch_size)
        return min(max(samples // coarse * coarse, low), high)

    changes = [(0, first)]
    while changes[-1][1] != last:
        start, samples_per_rank = changes[-1]
        start = bisect.bisect_right(
            range(length + 1),
            sign * samples_per_rank,
            lo=start,
            key=lambda position: sign * samples_at(position),
        )
        changes.append((start, samples_at(start)))
    return [
        (start, _split(samples_per_rank, unit, max_micro_batch_size)) for start, samples_per_rank in changes
    ]


def milestones(first: int, later: Sequence[tuple[int, int]], max_micro_batch_size: int) -> list[SizeChange]:
    """Samples per rank that hold from given units on, each exactly.

    >>> [(start, split.accumulation_steps) for start, split in milestones(8, [(5, 16), (9, 24)], 8)]
    [(0, 1), (5, 2), (9, 3)]
    """
    starts = [(0, first), *later]
    unit = split_samples(
        min(samples_per_rank for _, samples_per_rank in starts), max_micro_batch_size
    ).micro_batch_size
    return [
        (start, _split(samples_per_rank, unit, max_micro_batch_size)) for start, samples_per_rank in starts
    ]


def _coarse(samples_per_rank: int, unit: int, max_micro_batch_size: int) -> int:
    """The micro-batch, doubled from `unit` while there would be many accumulation steps."""
    while samples_per_rank // unit > MANY_ACCUMULATION_STEPS and 2 * unit <= max_micro_batch_size:
        unit *= 2
    return unit


def _split(samples_per_rank: int, unit: int, max_micro_batch_size: int) -> Split:
    micro_batch_size = _coarse(samples_per_rank, unit, max_micro_batch_size)
    if samples_per_rank % micro_batch_size == 0:
        return Split(micro_batch_size, samples_per_rank // micro_batch_size)
    return split_samples(samples_per_rank, max_micro_batch_size)


def equal_epochs(
    split: Split, num_epochs: int, epoch_samples_per_rank: int, world_size: int, *, keep_rest: bool
) -> tuple[tuple[Stage, ...], ...]:
    """The stages of each epoch where the size never changes.

    Args:
        split: of every optimizer step.
        num_epochs: epochs of the run.
        epoch_samples_per_rank: of one epoch.
        world_size: processes.
        keep_rest: take the micro-batches that are left over as one smaller step; else they are left out.
    """
    num_micro_batches = epoch_samples_per_rank // split.micro_batch_size
    steps, rest = divmod(num_micro_batches, split.accumulation_steps)
    stages = [_stage(steps, split, world_size)]
    if keep_rest and rest:
        stages.append(_stage(1, Split(split.micro_batch_size, rest), world_size))
    return (tuple(stages),) * num_epochs


def changing_epochs(
    changes: Sequence[SizeChange], unit: str, num_epochs: int, epoch_samples_per_rank: int, world_size: int
) -> tuple[tuple[Stage, ...], ...]:
    """The stages of each epoch under changes of growing or shrinking size.

    What is left of an epoch when it has not enough samples for one more optimizer step is left out.

    Args:
        changes: ascending starts, the first 0.
        unit: `epochs` or `steps`, what the starts count.
        num_epochs: epochs of the run.
        epoch_samples_per_rank: of one epoch.
        world_size: processes.
    """
    epochs, step = [], 0
    for epoch in range(num_epochs):
        left, stages = epoch_samples_per_rank, []
        while True:
            position = epoch if unit == "epochs" else step
            number = bisect.bisect_right(changes, position, key=lambda change: change[0]) - 1
            split = changes[number][1]
            steps = left // split.samples_per_rank
            if unit == "steps" and number + 1 < len(changes):
                steps = min(steps, changes[number + 1][0] - step)
            if steps == 0:
                break
            stages.append(_stage(steps, split, world_size))
            step, left = step + steps, left - steps * split.samples_per_rank
        epochs.append(tuple(stages))
    return tuple(epochs)


def _stage(num_steps: int, split: Split, world_size: int) -> Stage:
    return Stage(
        num_steps, split.micro_batch_size, split.accumulation_steps, split.samples_per_rank * world_size
    )
