"""The smallest size that is about as fast as the fastest: no torch in it, only sizes and seconds.

Samples per second rise with the size until the device is busy, then stay level and may fall. Rungs are timed
from the largest size downwards, at powers of two, until two in a row are clearly slow; then the step between
the smallest fast rung and the slow one below it is halved a few times. Where a size lies so close to the
threshold that the spread of its steps leaves it open, it and the fastest are timed again side by side.
"""

from __future__ import annotations

import bisect
import math
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

TOLERANCE = 0.05
"""A size is fast enough within this share of the best samples per second."""
ROUNDS = 3
"""Times that a doubtful size is timed at most."""
HALVINGS = 3
"""Sizes timed between the smallest fast rung and the slow one below it."""


def sizes_by_speed(
    time_steps: Callable[[int], Sequence[float]],
    candidates: Sequence[int],
    *,
    tolerance: float = TOLERANCE,
    deadline_s: float = math.inf,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[list[int], dict[int, float]]:
    """Time a few candidates and tell which of them are fast enough.

    >>> fast, seconds = sizes_by_speed(lambda n: [0.1 + n / 1000] * 5, range(1, 4097))
    >>> min(fast)
    1280

    Args:
        time_steps: runs some steps of a size and gives the seconds of each; infinity where it cannot run.
        candidates: the sizes that may be used, ascending; all but the largest may go untimed.
        tolerance: share of the best samples per second that may be missing.
        deadline_s: no timing starts later than this many seconds after the call.
        clock: seconds.

    Returns:
        The timed sizes within the tolerance, ascending, and every timed size's median seconds per step.
    """
    deadline = clock() + deadline_s
    stopwatch = _Stopwatch(time_steps, tolerance, lambda: clock() >= deadline)
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
    """Seconds of all steps timed so far, by size."""

    time_steps: Callable[[int], Sequence[float]]
    tolerance: float
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
        threshold = (1 - self.tolerance) * self.rate(self.best)
        return sorted(size for size in self.seconds if self.rate(size) >= threshold)

    def is_fast(self, size: int) -> bool:
        """Time a size, again while its verdict is open."""
        self.add(size)
        for _ in range(ROUNDS - 1):
            if not self._is_open(size) or self.is_late():
                break
            for either in {size, self.best}:
                self.add(either)
        return size in self.fast()

    def _is_open(self, size: int) -> bool:
        """Whether two standard errors of the ratio to the best reach across the threshold."""
        if size == self.best or not self.rate(self.best):
            return False
        ratio = self.rate(size) / self.rate(self.best)
        error = math.hypot(_relative_error(self.seconds[size]), _relative_error(self.seconds[self.best]))
        return abs(ratio - (1 - self.tolerance)) < 2 * error * ratio


def _relative_error(seconds: Sequence[float]) -> float:
    """Standard error of the median as a share of it, for a spread taken from the median deviation.

    For normal deviations sigma is 1.4826 times their median, and a median of n has the error
    sqrt(pi / 2) * sigma / sqrt(n) (Kenney and Keeping, Mathematics of Statistics, 1962).
    """
    median = statistics.median(seconds)
    if not math.isfinite(median):
        return 0.0
    deviation = statistics.median(abs(second - median) for second in seconds)
    return math.sqrt(math.pi / 2) * 1.4826 * deviation / math.sqrt(len(seconds)) / median


def rungs(candidates: Sequence[int]) -> list[int]:
    """The candidates at or next below the powers of two under the largest, descending."""
    largest, smallest = candidates[-1], candidates[0]
    powers = (1 << exponent for exponent in reversed(range(largest.bit_length())))
    rungs = [_at_most(candidates, power) for power in powers if smallest <= power < largest]
    return list(dict.fromkeys(rung for rung in rungs if rung < largest))


def _between(candidates: Sequence[int], fast: Sequence[int], timed: Collection[int]) -> int | None:
    """An untimed candidate in the middle between the smallest fast size and the slow one below it."""
    slow = max((size for size in timed if size < fast[0]), default=None)
    if slow is None:
        return None
    middle = _at_most(candidates, (slow + fast[0]) // 2)
    return None if middle in timed else middle


def _at_most(candidates: Sequence[int], size: int) -> int:
    """The largest candidate that is not above the size, else the smallest."""
    return candidates[max(bisect.bisect_right(candidates, size) - 1, 0)]
