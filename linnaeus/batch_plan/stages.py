"""How each optimizer step is split into micro-batches: for one batch size, and for one that changes.

`samples_per_rank` is the number of samples that one rank takes per optimizer step: the sum of its
micro-batches. The effective batch size is `samples_per_rank` times the number of ranks.
"""

from __future__ import annotations

import bisect
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from linnaeus.autobatch.split import MANY_ACCUMULATION_STEPS, Split, split_samples


@dataclass(frozen=True)
class Stage:
    """Consecutive optimizer steps with the same sizes.

    The micro-batches of a step differ by one sample where `accumulation_steps` does not divide its samples.

    Attributes:
        accumulation_steps: forward passes per optimizer step.
        num_steps: optimizer steps.
    """

    samples_per_rank: int
    accumulation_steps: int
    world_size: int
    num_steps: int

    @property
    def micro_batch_size(self) -> int:
        """Samples per rank of the largest micro-batch."""
        return -(-self.samples_per_rank // self.accumulation_steps)

    @property
    def effective_batch_size(self) -> int:
        """Samples per optimizer step over all ranks."""
        return self.samples_per_rank * self.world_size

    @property
    def micro_batches(self) -> list[int]:
        """Sizes of the micro-batches of one optimizer step, per rank: the larger ones first.

        >>> Stage(samples_per_rank=15, accumulation_steps=2, world_size=1, num_steps=1).micro_batches
        [8, 7]
        """
        smaller, num_larger = divmod(self.samples_per_rank, self.accumulation_steps)
        return [smaller + (number < num_larger) for number in range(self.accumulation_steps)]

    def with_max_micro_batch(self, max_micro_batch_size: int) -> Stage:
        """The same steps, split into more micro-batches where theirs are larger than this."""
        steps = max(self.accumulation_steps, -(-self.samples_per_rank // max_micro_batch_size))
        return replace(self, accumulation_steps=steps)

    def with_micro_batch(self, max_micro_batch_size: int) -> Stage:
        """The same steps, split into the fewest micro-batches that are not larger than this."""
        return replace(self, accumulation_steps=-(-self.samples_per_rank // max_micro_batch_size))


class SizeChange(NamedTuple):
    """A split, and the epoch or optimizer step (counted from 0) from which on it is used."""

    start: int
    split: Split


def growth(
    name: str, first: int, last: int, length: int, max_micro_batch_size: int
) -> list[SizeChange]:
    """Let `samples_per_rank` go from `first` at position 0 to `last` at position `length`, at least 1.

    In between, the values of the line or the exponential (`name`: `linear`, `exponential`) are rounded down
    to a multiple of the smaller end's micro-batch size. Accumulation changes first; where it would exceed
    `MANY_ACCUMULATION_STEPS`, the micro-batch size doubles for as long as it fits.

    >>> [(change.start, change.split.samples_per_rank) for change in growth("linear", 8, 32, 4, 16)]
    [(0, 8), (2, 16), (3, 24), (4, 32)]
    """
    low, high = sorted((first, last))
    base_size = split_samples(low, max_micro_batch_size).micro_batch_size
    starts = [(0, first)]
    for position in range(1, length):
        progress = position / length
        target = first + (last - first) * progress
        if name == "exponential":
            target = first * (last / first) ** progress
        samples = math.floor(target + 1e-9)  # an exact power must not be rounded down to one less
        micro_batch_size = _doubled(base_size, samples, max_micro_batch_size)
        samples = min(max(samples // micro_batch_size * micro_batch_size, low), high)
        if samples != starts[-1][1]:
            starts.append((position, samples))
    return milestones(
        [*starts, (length, last)] if starts[-1][1] != last else starts, max_micro_batch_size
    )


def milestones(starts: Sequence[tuple[int, int]], max_micro_batch_size: int) -> list[SizeChange]:
    """Split each size exactly, given starts (epochs or optimizer steps) and `samples_per_rank` from there on.

    >>> [(change.start, change.split.accumulation_steps) for change in milestones([(0, 8), (5, 24)], 8)]
    [(0, 1), (5, 3)]
    """
    base_size = split_samples(
        min(samples for _, samples in starts), max_micro_batch_size
    ).micro_batch_size
    changes = []
    for start, samples in starts:
        size = _doubled(base_size, samples, max_micro_batch_size)
        is_multiple = samples % size == 0
        split = (
            Split(size, samples // size)
            if is_multiple
            else split_samples(samples, max_micro_batch_size)
        )
        changes.append(SizeChange(start, split))
    return changes


def _doubled(base_size: int, samples_per_rank: int, max_micro_batch_size: int) -> int:
    """The micro-batch size: `base_size`, doubled while there would be many accumulation steps and it fits."""
    while (
        samples_per_rank // base_size > MANY_ACCUMULATION_STEPS
        and 2 * base_size <= max_micro_batch_size
    ):
        base_size *= 2
    return base_size


def split_epochs(
    changes: Sequence[SizeChange],
    unit: str,
    num_epochs: int,
    samples_per_epoch: int,
    world_size: int,
    *,
    keep_rest: bool,
    max_steps: int | None = None,
) -> tuple[tuple[Stage, ...], ...]:
    """The stages of each epoch, in which each rank sees `samples_per_epoch`.

    Args:
        changes: the splits of the run with ascending starts, the first 0.
        unit: of the starts, `epochs` or `steps`.
        keep_rest: end an epoch with a smaller step of the micro-batches left over; else they are left out.
        max_steps: optimizer steps of all epochs; decides in place of `num_epochs`.
    """
    epochs: list[tuple[Stage, ...]] = []
    step, last_step = 0, sys.maxsize if max_steps is None else max_steps
    while len(epochs) < num_epochs if max_steps is None else step < max_steps:
        epoch, samples_left = len(epochs), samples_per_epoch
        stages: list[Stage] = []
        while True:
            position = epoch if unit == "epochs" else step
            following = bisect.bisect_right(changes, position, key=lambda change: change.start)
            split = changes[following - 1].split
            steps = min(samples_left // split.samples_per_rank, last_step - step)
            if unit == "steps" and following < len(changes):
                steps = min(steps, changes[following].start - step)
            if steps == 0:
                break
            stages.append(
                Stage(split.samples_per_rank, split.accumulation_steps, world_size, steps)
            )
            step, samples_left = step + steps, samples_left - steps * split.samples_per_rank
        size = split.micro_batch_size
        if keep_rest and step < last_step and (num_micro_batches := samples_left // size):
            stages.append(
                Stage(num_micro_batches * size, num_micro_batches, world_size, num_steps=1)
            )
            step += 1
        epochs.append(tuple(stages))
    return tuple(epochs)
