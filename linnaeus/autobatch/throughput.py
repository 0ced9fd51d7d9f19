"""Find the smallest size that is about as fast as the fastest. Pure: sizes and seconds, no torch.

Samples per second rise with the batch size until the device is busy, then level off and may fall. Sizes are
timed from the largest downwards at powers of two (the rungs), until two in a row are too slow. Then the
interval between the smallest fast rung and the slow one below it is bisected a few times. If
noise decides whether a size is fast enough, it and the fastest size are timed again, alternately.
"""

from __future__ import annotations

import bisect
import math
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

TOLERANCE = 0.05
"""A size is fast enough if its samples per second miss the best by no more than this fraction."""
ROUNDS = 3
"""How often a size near the threshold is timed at most."""
HALVINGS = 3
"""Bisections between the smallest fast rung and the slow one below it."""


def sizes_by_speed(
    time_steps: Callable[[int], Sequence[float]],
    candidates: Sequence[int],
    *,
    deadline_s: float = math.inf,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[list[int], dict[int, float]]:
    """Time a few candidates and select those that are fast enough.

    >>> fast, seconds = sizes_by_speed(lambda n: [0.1 + n / 1000] * 5, range(1, 4097))
    >>> min(fast)
    1280

    Args:
        time_steps: runs some steps of a size and returns the seconds of each; infinity if it cannot run.
        candidates: the sizes that may be used, ascending. Only the largest is sure to be timed.
        deadline_s: no timing starts later than this many seconds after the call.
        clock: seconds.

    Returns:
        The fast sizes, ascending, and the median seconds per step of every timed size.
    """
    deadline = clock() + deadline_s
    stopwatch = _Stopwatch(time_steps, lambda: clock() >= deadline)
    largest = candidates[-1]
    stopwatch.add(largest)
    slow_in_a_row = 0
    for rung in rungs(candidates):
        if slow_in_a_row == 2 or stopwatch.is_late():
            break
        slow_in_a_row = 0 if stopwatch.is_fast(rung) else slow_in_a_row + 1
    for _ in range(HALVINGS):
        size = _between(candidates, stopwatch.fast(), stopwatch.seconds)
        if size is None or stopwatch.is_late():
            break
        stopwatch.is_fast(size)
    medians = {size: statistics.median(seconds) for size, seconds in stopwatch.seconds.items()}
    return stopwatch.fast(), medians


@dataclass
class _Stopwatch:
    """Seconds of each timed step, by size, and the verdicts that follow from them."""

    time_steps: Callable[[int], Sequence[float]]
    is_late: Callable[[], bool]
    seconds: dict[int, list[float]] = field(default_factory=dict)

    def add(self, size: int) -> None:
        self.seconds.setdefault(size, []).extend(self.time_steps(size))

    def rate(self, size: int) -> float:
        """Samples per second."""
        return size / statistics.median(self.seconds[size])

    @property
    def best(self) -> int:
        return max(self.seconds, key=self.rate)

    def fast(self) -> list[int]:
        """The sizes within the tolerance, ascending."""
        threshold = (1 - TOLERANCE) * self.rate(self.best)
        return sorted(size for size in self.seconds if self.rate(size) >= threshold)

    def is_fast(self, size: int) -> bool:
        """Time a size, and again while its verdict is uncertain."""
        self.add(size)
        for _ in range(ROUNDS - 1):
            if not self._is_uncertain(size) or self.is_late():
                break
            for either in {size, self.best}:
                self.add(either)
        return size in self.fast()

    def _is_uncertain(self, size: int) -> bool:
        """Whether the threshold lies within two standard errors of the size's ratio to the best."""
        if size == self.best or not self.rate(self.best):
            return False
        ratio = self.rate(size) / self.rate(self.best)
        error = math.hypot(_relative_error(self.seconds[size]), _relative_error(self.seconds[self.best]))
        return abs(ratio - (1 - TOLERANCE)) < 2 * error * ratio


def _relative_error(seconds: Sequence[float]) -> float:
    """Standard error of the median, relative to the median, from the median absolute deviation.

    For normally distributed values, sigma is 1.4826 times the median absolute deviation, and the median of n
    values has the standard error sqrt(pi / 2) * sigma / sqrt(n) (Kenney and Keeping, Mathematics of
    Statistics, 1962).
    """
    median = statistics.median(seconds)
    if not math.isfinite(median):
        return 0.0
    deviation = statistics.median(abs(second - median) for second in seconds)
    return math.sqrt(math.pi / 2) * 1.4826 * deviation / math.sqrt(len(seconds)) / median


def rungs(candidates: Sequence[int]) -> list[int]:
    """For each power of two below the largest candidate, the largest candidate up to it; descending."""
    largest, smallest = candidates[-1], candidates[0]
    powers = (1 << exponent for exponent in reversed(range(largest.bit_length())))
    rungs = [_at_most(candidates, power) for power in powers if smallest <= power < largest]
    return list(dict.fromkeys(rung for rung in rungs if rung < largest))


def _between(candidates: Sequence[int], fast: Sequence[int], timed: Collection[int]) -> int | None:
    """The untimed candidate halfway between the smallest fast size and the slow one below it."""
    slow = max((size for size in timed if size < fast[0]), default=None)
    if slow is None:
        return None
    middle = _at_most(candidates, (slow + fast[0]) // 2)
    return None if middle in timed else middle


def _at_most(candidates: Sequence[int], size: int) -> int:
    """The largest candidate up to the size, or the smallest candidate if all are above it."""
    return candidates[max(bisect.bisect_right(candidates, size) - 1, 0)]
