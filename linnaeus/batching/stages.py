"""How each optimizer step is split into micro-batches: for one batch size, and for one that changes.

`samples_per_rank` is the number of samples that one rank takes per optimizer step: the sum of its
micro-batches. The effective batch size is `samples_per_rank` times the number of ranks.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from linnaeus.autobatch.split import MANY_ACCUMULATION_STEPS, Split, split_samples


@dataclass(frozen=True)
class Stage:
    """Consecutive optimizer steps with the same sizes.

    The micro-batches of a step differ by one sample where `accumulation_steps` does not divide its samples.

    Attributes:
        samples_per_rank: samples per rank and optimizer step.
        accumulation_steps: forward passes per optimizer step.
        world_size: number of ranks.
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

    def limited(self, max_micro_batch_size: int) -> Stage:
        """The same steps, split into more micro-batches where theirs are larger than this."""
        steps = max(self.accumulation_steps, -(-self.samples_per_rank // max_micro_batch_size))
        return replace(self, accumulation_steps=steps)


class SizeChange(NamedTuple):
    """A split, and the epoch or optimizer step (counted from 0) from which on it is used."""

    start: int
    split: Split


def growth(name: str, first: int, last: int, length: int, max_micro_batch_size: int) -> list[SizeChange]:
    """Let `samples_per_rank` go from `first` at position 0 to `last` at position `length`.

    In between, the values of the line or the exponential are rounded down to a multiple of the smaller end's
    micro-batch size. Accumulation changes first; where it would exceed `MANY_ACCUMULATION_STEPS`, the
    micro-batch size doubles for as long as it fits.

    Args:
        name: `linear` or `exponential`.
        first, last: `samples_per_rank` at both ends; either may be the larger one.
        length: epochs or optimizer steps, at least 1.
        max_micro_batch_size: the largest micro-batch that fits.

    >>> [(change.start, change.split.samples_per_rank) for change in growth("linear", 8, 32, 4, 16)]
    [(0, 8), (2, 16), (3, 24), (4, 32)]
    """
    low, high = sorted((first, last))
    base_size = split_samples(low, max_micro_batch_size).micro_batch_size
    sign = 1 if last >= first else -1

    def samples_at(position: int) -> int:
        if position in (0, length):
            return last if position else first
        progress = position / length
        target = first + (last - first) * progress
        if name == "exponential":
            target = first * (last / first) ** progress
        samples = math.floor(target + 1e-9)  # an exact power must not be rounded down to one less
        micro_batch_size = _doubled(base_size, samples, max_micro_batch_size)
        return min(max(samples // micro_batch_size * micro_batch_size, low), high)

    starts = [(0, first)]
    while starts[-1][1] != last:
        position, samples = starts[-1]
        position = bisect.bisect_right(
            range(length + 1), sign * samples, lo=position, key=lambda other: sign * samples_at(other)
        )
        starts.append((position, samples_at(position)))
    return milestones(starts, max_micro_batch_size)


def milestones(starts: Sequence[tuple[int, int]], max_micro_batch_size: int) -> list[SizeChange]:
    """Split each size exactly; each applies from its start, an epoch or an optimizer step, on.

    Args:
        starts: pairs of a start, ascending from 0, and the `samples_per_rank` from there on.
        max_micro_batch_size: the largest micro-batch that fits.

    >>> [(change.start, change.split.accumulation_steps) for change in milestones([(0, 8), (5, 24)], 8)]
    [(0, 1), (5, 3)]
    """
    base_size = split_samples(min(samples for _, samples in starts), max_micro_batch_size).micro_batch_size
    return [SizeChange(start, _split(samples, base_size, max_micro_batch_size)) for start, samples in starts]


def _doubled(base_size: int, samples_per_rank: int, max_micro_batch_size: int) -> int:
    """The micro-batch size: `base_size`, doubled while there would be many accumulation steps and it fits."""
    while samples_per_rank // base_size > MANY_ACCUMULATION_STEPS and 2 * base_size <= max_micro_batch_size:
        base_size *= 2
    return base_size


def _split(samples_per_rank: int, base_size: int, max_micro_batch_size: int) -> Split:
    micro_batch_size = _doubled(base_size, samples_per_rank, max_micro_batch_size)
    if samples_per_rank % micro_batch_size == 0:
        return Split(micro_batch_size, samples_per_rank // micro_batch_size)
    return split_samples(samples_per_rank, max_micro_batch_size)


def split_epochs(
    changes: Sequence[SizeChange],
    unit: str,
    num_epochs: int,
    epoch_samples_per_rank: int,
    world_size: int,
    *,
    keep_rest: bool,
) -> tuple[tuple[Stage, ...], ...]:
    """The stages of each epoch.

    Args:
        changes: the splits of the run with ascending starts, the first 0.
        unit: `epochs` or `steps`, what the starts count.
        num_epochs: epochs of the run.
        epoch_samples_per_rank: samples that each rank sees in an epoch.
        world_size: number of ranks.
        keep_rest: make a smaller last step of the micro-batches left at the end of an epoch; otherwise they
            are left out.
    """
    epochs, step = [], 0
    for epoch in range(num_epochs):
        samples_left, stages = epoch_samples_per_rank, []
        while True:
            position = epoch if unit == "epochs" else step
            following = bisect.bisect_right(changes, position, key=lambda change: change.start)
            split = changes[following - 1].split
            steps = samples_left // split.samples_per_rank
            if unit == "steps" and following < len(changes):
                steps = min(steps, changes[following].start - step)
            if steps == 0:
                break
            stages.append(make_stage(steps, split, world_size))
            step, samples_left = step + steps, samples_left - steps * split.samples_per_rank
        if keep_rest and (num_micro_batches := samples_left // split.micro_batch_size):
            stages.append(make_stage(1, Split(split.micro_batch_size, num_micro_batches), world_size))
            step += 1
        epochs.append(tuple(stages))
    return tuple(epochs)


def make_stage(num_steps: int, split: Split, world_size: int) -> Stage:
    """Optimizer steps with the same split on every rank."""
    return Stage(split.samples_per_rank, split.accumulation_steps, world_size, num_steps)
