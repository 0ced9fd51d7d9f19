"""How each rank splits an effective batch into micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

MANY_ACCUMULATION_STEPS = 16
"""More are slow: the plan warns, and a growing batch takes a larger micro-batch instead where one fits."""


@dataclass(frozen=True)
class Split:
    """How one rank splits its samples of an optimizer step.

    Attributes:
        micro_batch_size: samples per rank and forward pass.
        accumulation_steps: forward passes per optimizer step.
    """

    micro_batch_size: int
    accumulation_steps: int

    @property
    def samples_per_rank(self) -> int:
        """Samples per rank and optimizer step."""
        return self.micro_batch_size * self.accumulation_steps


def split_samples(samples_per_rank: int, max_micro_batch_size: int) -> Split:
    """Return the split with the largest micro-batch size that divides `samples_per_rank`.

    >>> split_samples(96, 40), split_samples(131, 131), split_samples(131, 128)
    (Split(micro_batch_size=32, accumulation_steps=3), Split(micro_batch_size=131, accumulation_steps=1), Split(micro_batch_size=1, accumulation_steps=131))
    """  # noqa: E501
    fewest_steps = -(-samples_per_rank // max_micro_batch_size)
    steps = next(n for n in range(fewest_steps, samples_per_rank + 1) if samples_per_rank % n == 0)
    return Split(samples_per_rank // steps, steps)


def nearest(size: int, largest: int, suits: Callable[[int], bool]) -> list[int]:
    """Return the closest suitable sizes below and above `size`, where there are any up to `largest`.

    >>> nearest(10, 100, lambda size: size % 4 == 0), nearest(3, 100, lambda size: size % 4 == 0)
    ([8, 12], [4])
    """
    below = next((other for other in range(min(size - 1, largest), 0, -1) if suits(other)), None)
    above = next((other for other in range(size + 1, largest + 1) if suits(other)), None)
    return [other for other in (below, above) if other is not None]
