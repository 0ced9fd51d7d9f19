"""Which micro-batches make up each optimizer step: for one size, and for a size that changes.

A share is what one process takes for one optimizer step: its micro-batch times the accumulation steps. The
effective batch is the share times the number of processes.
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
    """How one process makes up its share of an optimizer step.

    Attributes:
        micro_batch: samples per process and forward pass.
        accumulation_steps: forward passes per optimizer step.
    """

    micro_batch: int
    accumulation_steps: int

    @property
    def share(self) -> int:
        """Samples per process and optimizer step."""
        return self.micro_batch * self.accumulation_steps


@dataclass(frozen=True)
class Stage:
    """Optimizer steps in a row that are alike.

    Attributes:
        num_steps: optimizer steps.
        micro_batch: samples per process and forward pass.
        accumulation_steps: forward passes per optimizer step.
        effective_batch: samples per optimizer step over all processes.
    """

    num_steps: int
    micro_batch: int
    accumulation_steps: int
    effective_batch: int

    @property
    def share(self) -> int:
        """Samples per process and optimizer step."""
        return self.micro_batch * self.accumulation_steps


Piece = tuple[int, Split]
"""From which epoch or optimizer step on, counted from 0, a split holds."""


def split_share(share: int, max_micro_batch: int) -> Split:
    """The largest micro-batch that divides a share exactly, and so the fewest accumulation steps.

    >>> split_share(96, 40), split_share(131, 131), split_share(131, 128)
    (Split(micro_batch=32, accumulation_steps=3), Split(micro_batch=131, accumulation_steps=1), Split(micro_batch=1, accumulation_steps=131))
    """  # noqa: E501
    fewest = -(-share // max_micro_batch)
    steps = next(steps for steps in range(fewest, share + 1) if share % steps == 0)
    return Split(share // steps, steps)


def nearest(size: int, largest: int, suits: Callable[[int], bool]) -> list[int]:
    """The nearest sizes below and above that suit, as far as there are any within 1 and `largest`.

    >>> nearest(10, 100, lambda size: size % 4 == 0), nearest(3, 100, lambda size: size % 4 == 0)
    ([8, 12], [4])
    """
    below = next((other for other in range(min(size - 1, largest), 0, -1) if suits(other)), None)
    above = next((other for other in range(size + 1, largest + 1) if suits(other)), None)
    return [other for other in (below, above) if other is not None]


def growth(name: str, first: int, last: int, length: int, max_micro_batch: int) -> list[Piece]:
    """A share that goes from `first` at unit 0 to `last` at unit `length`, along a line or an exponential.

    In between it is rounded down to whole micro-batches of the smaller end. Accumulation changes first; where
    it would come to more than `MANY_ACCUMULATION_STEPS`, the micro-batch doubles for as long as that fits.

    Args:
        name: `linear` or `exponential`.
        first, last: shares; either may be the larger one.
        length: epochs or optimizer steps, at least 1.
        max_micro_batch: the largest micro-batch that fits.

    >>> [(start, split.share) for start, split in growth("linear", 8, 32, 4, 16)]
    [(0, 8), (2, 16), (3, 24), (4, 32)]
    """
    low, high = sorted((first, last))
    unit = split_share(low, max_micro_batch).micro_batch
    sign = 1 if last >= first else -1

    def share_at(position: int) -> int:
        if position in (0, length):
            return last if position else first
        progress = position / length
        target = first + (last - first) * progress
        if name == "exponential":
            target = first * (last / first) ** progress
        samples = math.floor(target + 1e-9)  # an exact power must not be rounded down to one less
        coarse = _coarse(samples, unit, max_micro_batch)
        return min(max(samples // coarse * coarse, low), high)

    pieces = [(0, first)]
    while pieces[-1][1] != last:
        start, share = pieces[-1]
        start = bisect.bisect_right(
            range(length + 1), sign * share, lo=start, key=lambda position: sign * share_at(position)
        )
        pieces.append((start, share_at(start)))
    return [(start, _split(share, unit, max_micro_batch)) for start, share in pieces]


def milestones(first: int, later: Sequence[tuple[int, int]], max_micro_batch: int) -> list[Piece]:
    """Shares that hold from given units on, each exactly.

    >>> [(start, split.accumulation_steps) for start, split in milestones(8, [(5, 16), (9, 24)], 8)]
    [(0, 1), (5, 2), (9, 3)]
    """
    shares = [(0, first), *later]
    unit = split_share(min(share for _, share in shares), max_micro_batch).micro_batch
    return [(start, _split(share, unit, max_micro_batch)) for start, share in shares]


def _coarse(share: int, unit: int, max_micro_batch: int) -> int:
    """The micro-batch, doubled from `unit` while there would be many accumulation steps."""
    while share // unit > MANY_ACCUMULATION_STEPS and 2 * unit <= max_micro_batch:
        unit *= 2
    return unit


def _split(share: int, unit: int, max_micro_batch: int) -> Split:
    micro_batch = _coarse(share, unit, max_micro_batch)
    if share % micro_batch == 0:
        return Split(micro_batch, share // micro_batch)
    return split_share(share, max_micro_batch)


def equal_epochs(
    split: Split, num_epochs: int, samples_per_process: int, world_size: int, *, keep_rest: bool
) -> tuple[tuple[Stage, ...], ...]:
    """The stages of each epoch where the size never changes.

    Args:
        split: of every optimizer step.
        num_epochs: epochs of the run.
        samples_per_process: of one epoch.
        world_size: processes.
        keep_rest: take the micro-batches that are left over as one smaller step; else they are left out.
    """
    num_micro_batches = samples_per_process // split.micro_batch
    steps, rest = divmod(num_micro_batches, split.accumulation_steps)
    stages = [_stage(steps, split, world_size)]
    if keep_rest and rest:
        stages.append(_stage(1, Split(split.micro_batch, rest), world_size))
    return (tuple(stages),) * num_epochs


def changing_epochs(
    pieces: Sequence[Piece], unit: str, num_epochs: int, samples_per_process: int, world_size: int
) -> tuple[tuple[Stage, ...], ...]:
    """The stages of each epoch under pieces of growing or shrinking size.

    What is left of an epoch when it has not enough samples for one more optimizer step is left out.

    Args:
        pieces: ascending starts, the first 0.
        unit: `epochs` or `steps`, what the starts count.
        num_epochs: epochs of the run.
        samples_per_process: of one epoch.
        world_size: processes.
    """
    epochs, step = [], 0
    for epoch in range(num_epochs):
        left, stages = samples_per_process, []
        while True:
            position = epoch if unit == "epochs" else step
            number = bisect.bisect_right(pieces, position, key=lambda piece: piece[0]) - 1
            split = pieces[number][1]
            steps = left // split.share
            if unit == "steps" and number + 1 < len(pieces):
                steps = min(steps, pieces[number + 1][0] - step)
            if steps == 0:
                break
            stages.append(_stage(steps, split, world_size))
            step, left = step + steps, left - steps * split.share
        epochs.append(tuple(stages))
    return tuple(epochs)


def _stage(num_steps: int, split: Split, world_size: int) -> Stage:
    return Stage(num_steps, split.micro_batch, split.accumulation_steps, split.share * world_size)
