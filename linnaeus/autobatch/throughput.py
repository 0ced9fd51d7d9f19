"""Find the smallest size that is about as fast as the fastest. Pure: sizes and seconds, no torch.

Samples per second rise with the batch size until the device is busy, then level off and may fall. Sizes are
timed from the largest downwards at powers of two (the rungs), until two in a row are too slow; then between.
"""

from __future__ import annotations

import bisect
import math
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence

TOLERANCE = 0.05
"""A size is fast enough if its samples per second miss the best by no more than this fraction."""
HALVINGS = 3
"""Bisections between the smallest fast rung and the slow one below it."""


def sizes_by_speed(
    time_steps: Callable[[int], Sequence[float]],
    candidates: Sequence[int],
    *,
    deadline_s: float = math.inf,
) -> tuple[list[int], dict[int, float]]:
    """Time a few candidates and select the sizes that are fast enough.

    >>> min(sizes_by_speed(lambda n: [0.1 + n / 1000] * 5, range(1, 4097))[0])
    1280

    Args:
        time_steps: runs some steps of a size and returns the seconds of each; infinity if it cannot run.
        candidates: the sizes that may be used, ascending. Only the largest is sure to be timed.
        deadline_s: no timing starts later than this many seconds after the call.

    Returns:
        The fast sizes, ascending, and the median seconds per step of every timed size.
    """

    def fast() -> list[int]:
        return fast_sizes({size: size / median for size, median in seconds.items()})

    deadline, largest = time.monotonic() + deadline_s, candidates[-1]
    seconds = {largest: statistics.median(time_steps(largest))}
    slow_in_a_row = 0
    for rung in rungs(candidates):
        if slow_in_a_row == 2 or time.monotonic() >= deadline:
            break
        seconds[rung] = statistics.median(time_steps(rung))
        slow_in_a_row = 0 if rung in fast() else slow_in_a_row + 1
    for _ in range(HALVINGS):
        size = _between(candidates, fast(), seconds)
        if size is None or time.monotonic() >= deadline:
            break
        seconds[size] = statistics.median(time_steps(size))
    return fast(), seconds


def fast_sizes(rates: Mapping[int, float]) -> list[int]:
    """Return the sizes, ascending, whose samples per second are within the tolerance of the best."""
    threshold = (1 - TOLERANCE) * max(rates.values())
    return sorted(size for size, rate in rates.items() if rate >= threshold)


def rungs(candidates: Sequence[int]) -> list[int]:
    """For each power of two below the largest candidate, the largest candidate up to it; descending."""
    largest, smallest = candidates[-1], candidates[0]
    powers = (1 << exponent for exponent in reversed(range(largest.bit_length())))
    rungs = [_at_most(candidates, power) for power in powers if smallest <= power < largest]
    return list(dict.fromkeys(rung for rung in rungs if rung < largest))


def _between(candidates: Sequence[int], fast: Sequence[int], timed: Collection[int]) -> int | None:
    """Return the untimed candidate halfway between the smallest fast size and the slow one below it."""
    slow = max((size for size in timed if size < fast[0]), default=None)
    if slow is None:
        return None
    middle = _at_most(candidates, (slow + fast[0]) // 2)
    return None if middle in timed else middle


def _at_most(candidates: Sequence[int], size: int) -> int:
    """Return the largest candidate up to the size, or the smallest candidate if all are above it."""
    return candidates[max(bisect.bisect_right(candidates, size) - 1, 0)]
