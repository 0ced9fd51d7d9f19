"""What `analyze` and `plan` measure alike: the largest size, and the speed of sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from linnaeus.autobatch.finder import BatchSizeFinder
from linnaeus.autobatch.result import AutoBatchResult, Timing
from linnaeus.autobatch.throughput import TOLERANCE


def find_largest(finder: BatchSizeFinder, fraction: float) -> AutoBatchResult:
    """The largest size within a fraction of the memory, searched as training would search it.

    Raises:
        AutoBatchError: nothing fits.
    """
    return finder.find(
        replace(finder.settings, target_memory_fraction=fraction, objective="memory", start=None)
    )


@dataclass
class Speeds:
    """Speeds of the sizes of one step; a size that ran is timed once.

    Attributes:
        timings: by size, only of sizes that ran.
        covers_knee: whether the sizes around the knee have been timed.
    """

    timings: dict[int, Timing] = field(default_factory=dict)
    covers_knee: bool = False

    @property
    def knee(self) -> int | None:
        """The smallest size within 5 % of the best samples per second; None before `find_knee`."""
        if not self.covers_knee or not self.timings:
            return None
        enough = (1 - TOLERANCE) * self.fastest.samples_per_s
        return next(timing.batch_size for timing in self.ascending() if timing.samples_per_s >= enough)

    def time(self, finder: BatchSizeFinder, size: int) -> Timing | None:
        """Time a size; None when it no longer fits, because something else takes memory now."""
        if size not in self.timings:
            self._add(finder.time(size))
        return self.timings.get(size)

    def find_knee(
        self, finder: BatchSizeFinder, largest: AutoBatchResult, timeout_minutes: float
    ) -> AutoBatchResult:
        """Time sizes up to the largest that fits, until the knee is known; the result has them all."""
        fast = finder.prefer_throughput(largest, timeout_minutes=timeout_minutes)
        self.covers_knee = True
        for timing in fast.timings:
            self._add(timing)
        return fast

    @property
    def fastest(self) -> Timing:
        """The timing with the most samples per second; needs at least one."""
        return max(self.ascending(), key=lambda timing: timing.samples_per_s)

    def ascending(self) -> list[Timing]:
        """The timings by ascending size."""
        return [self.timings[size] for size in sorted(self.timings)]

    def _add(self, timing: Timing) -> None:
        if math.isfinite(timing.seconds_per_step):
            self.timings[timing.batch_size] = timing
