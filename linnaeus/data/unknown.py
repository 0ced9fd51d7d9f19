"""Leaves labels out, as if a sample had been identified to a coarse rank only."""

from __future__ import annotations

from collections.abc import Sequence

from linnaeus.data.taxonomy import UNKNOWN
from linnaeus.rng import derive_seed

_STREAM = 7
"""Keeps these random numbers apart from others that are derived from the index of a sample."""


def known_labels(labels: Sequence[int], index: int, fraction: float) -> list[int]:
    """The labels of a sample; with probability `fraction` the finer ones are unknown.

    The finest label that stays known is at a random level above the finest one. Sample and fraction decide
    it alone, so that every epoch, process and run sees the same labels. A larger fraction leaves out the
    finest labels of the same samples and of others.

    Args:
        labels: coarse to fine.
        index: of the sample.
        fraction: in [0, 1).

    >>> [known_labels([1, 2, 5], index, 0.5) for index in range(3)]
    [[1, 2, 5], [1, -1, -1], [1, 2, 5]]
    """
    draw = derive_seed(_STREAM, index) / 2**64
    if draw >= fraction:
        return list(labels)
    # The draw is uniform in [0, fraction), so it also decides the level.
    num_known = min(1 + int(draw / fraction * (len(labels) - 1)), len(labels) - 1)
    return [*labels[:num_known], *[UNKNOWN] * (len(labels) - num_known)]
