"""Find the largest size that fits in a budget, in few trials, and prove it. Pure: no torch.

`measure(n)` returns the bytes that size n needs, or raises `OutOfMemory`. Sizes that may be tried are the
*candidates*. The search keeps a bracket: the largest candidate that fitted so far, and the smallest one above
it that did not. Every trial lies strictly inside the bracket, so that no size is tried twice, the bracket
always shrinks, and the size returned has run. When the ends of the bracket are neighbours, the answer is
*certified*. With a tolerance the search ends earlier: when every candidate that may still fit is at most that
fraction above the answer. Trials near an end of the bracket are then moved to where they end the search.

The guided strategy assumes that memory is nearly linear in the size: a fixed cost plus a cost per sample.

1. The first trial is small.
2. A line is drawn through the end of the bracket whose peak is closest to the budget. Its slope comes from
   the next closest peak that gives a plausible one; after a single trial, a tenth of the peak is taken as
   fixed cost.
3. The next trial is where this line meets the budget, a little below it, because a size that fits leaves a
   peak and one that runs out of memory leaves none. After a single trial it is at most four times as large,
   unless the line says that all sizes fit. While no size has left a peak, the next one is at most a quarter
   of it. Where the line reaches far, a parabola through three peaks takes its place if it opens upwards.
4. A size that has failed without a peak although the line says it fits: if the line is wrong by little, the
   next trial lies below that size by an eighth of the bracket's width, and once more by a quarter. Wherever
   else the line contradicts an end of the bracket, the parabola or a bisection gives the next trial.
5. Bisection is by logarithm for large sizes and by difference for small ones, so that a limit without rising
   peaks costs the logarithm of the number of answers that a tolerance tells apart. Without a failure it
   reaches for the largest candidate. After eight trials that did not halve the bracket, all others bisect.

Close to the answer, the point where the line meets the budget is one of the two neighbours that certify it.
Any curve takes at most 2·log2(largest size) + 3 trials.
"""

from __future__ import annotations

import bisect
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["fits", "over", "oom", "kernel"]
LimitedBy = Literal["memory", "kernel", "max_batch_size", "max_trials", "timeout"]

FIRST_SIZE = 16
"""First size of a guided search without a hint: small enough to fit almost always, and large enough for the
cost per sample to show in the peak beside the fixed cost."""
GROWTH = 4
"""The second size is at most this many times the first: one peak alone does not show the cost of a sample.
While no size has left a peak, sizes are divided by it."""
SHORT = 0.02
"""Fraction by which an upward step is shortened: twice the usual noise of a peak (1 %), so that most long
steps end at a size that fits and so leaves a peak."""
RETREAT = 0.125
"""Fraction of the bracket's width to step back from a size that failed although the line says it fits. The
line is usually wrong by a few per cent of that width, so an eighth ends below the answer and close to it."""
FIXED_FRACTION = 0.1
"""Fraction of a peak, less `fixed_bytes`, that is taken as fixed cost before a slope is measured."""
MIN_STEEPNESS = 0.1
"""A slope below this fraction of peak/size is implausible: the two peaks differ by less than their noise, or
lie on a plateau. The bracket is bisected then."""
FAR = 1.25
"""A line that meets the budget beyond this many times a size that failed is wrong by much. One that meets it
beyond this many times the largest measured size gives way to a parabola."""
LEAP = 32
"""While nothing has failed, bisection goes up by at most this factor: it makes batches on the host."""
LINEAR_SIZE = 50
"""Bisection treats sizes well below this as a linear scale and sizes well above it as a logarithmic one: from
here on, a tolerance of 1 % is more than one sample."""
PATIENCE = 8
"""Trials that may leave more than `HALVED` of the bracket. On measured curves one search in a hundred needs
more."""
HALVED = 0.6
"""Fraction of a bracket that bisection leaves at most, with rounding to candidates."""
GRID_LIMIT = 65_535
"""Most blocks in the second and third dimension of a CUDA grid: tried first where a kernel refuses a size."""


class OutOfMemory(Exception):  # noqa: N818 (it names an event; `measure` raises it, searches expect it)
    """Raised by `measure` when a size does not fit on the device and therefore leaves no peak."""

    status: Status = "oom"


class KernelLimit(OutOfMemory):
    """Raised by `measure` when a kernel does not take a size for any memory."""

    status: Status = "kernel"


@dataclass(frozen=True)
class TrialRecord:
    """One size that was tried.

    Attributes:
        size: samples per rank and forward pass.
        status: `fits` (ran within the budget), `over` (ran, above the budget), `oom` (ran out of memory) or
            `kernel` (a kernel does not take the size).
        peak_bytes: the most bytes that the process held; None after `oom` and `kernel`.
        seconds: duration.
    """

    size: int
    status: Status
    peak_bytes: int | None
    seconds: float

    def fits(self, budget_bytes: int) -> bool:
        """Whether it ran with a peak within a budget, of this trial or another."""
        return self.peak_bytes is not None and self.peak_bytes <= budget_bytes

    def as_dict(self) -> dict[str, Any]:
        """The entry of a file."""
        return {
            "batch_size": self.size,
            "status": self.status,
            "peak_bytes": self.peak_bytes,
            "seconds": round(self.seconds, 3),
        }


@dataclass(frozen=True)
class SearchResult:
    """Result of a search.

    Attributes:
        size: the largest size that was seen to fit; None if none was.
        certified: the size ran and fits, and the next candidate ran and does not, or there is no next one. If
            `size` is None: the smallest candidate ran and does not fit.
        limited_by: why the size is not larger: `memory`; `kernel` (one does not take the next size that
            failed); `max_batch_size` (the largest candidate fits); `max_trials` or `timeout` (the search
            ended early).
        trials: every trial of this search, in order, without the known records.
        within: how much larger the largest size may be, as a fraction of `size`: 0 if certified, and infinity
            if `size` is None and the search ended early.
    """

    size: int | None
    certified: bool
    limited_by: LimitedBy
    trials: tuple[TrialRecord, ...]
    within: float = 0.0


def find_largest(
    measure: Callable[[int], int],
    *,
    budget_bytes: int,
    min_size: int,
    max_size: int,
    multiple_of: int = 1,
    strategy: str = "guided",
    tolerance: float = 0.0,
    max_trials: int = 25,
    start: int | None = None,
    deadline_s: float | None = None,
    known: Iterable[TrialRecord] = (),
    fixed_bytes: int = 0,
    clock: Callable[[], float] = time.monotonic,
    on_start: Callable[[int], object] = lambda size: None,
    on_trial: Callable[[TrialRecord], object] = lambda trial: None,
) -> SearchResult:
    """Find the largest size whose peak is within the budget.

    >>> result = find_largest(lambda n: 500 + 7 * n, budget_bytes=2000, min_size=1, max_size=512)
    >>> result.size, result.certified, [trial.size for trial in result.trials]
    (214, True, [16, 56, 211, 214, 215])

    Args:
        measure: runs a size and returns its peak in bytes, or raises `OutOfMemory`. Any other exception ends
            the search. It is called at most once for each size.
        budget_bytes: a size fits if its peak is at most this. It may be zero or negative (others use the
            whole device): then nothing fits, and the smallest candidate is tried to show it.
        min_size, max_size: of the candidates, inclusive; at least 1.
        multiple_of: only its multiples, and sizes below it, are tried.
        strategy: `guided` (see the module), `binary` (bisects the bounds), `power` (doubles from the smallest
            size while that fits) or `binsearch` (doubles, then bisects).
        tolerance: the search may end with a size below the largest, once the largest is known to be at most
            `size * (1 + tolerance)`, because some larger size ran and did not fit; in [0, 1). 0 finds the
            largest size itself.
        start: a size to try first, such as the answer of an earlier run; `binary` ignores it. It need not be
            a candidate.
        deadline_s: no trial starts later than this many seconds after the call.
        known: earlier trials, one for each size. They count as run: they bound and guide the search, and may
            hold its answer. Peaks are judged by this search's budget, not by their status. A record without
            a peak counts as out of memory, so leave those out that had a smaller budget.
        fixed_bytes: part of every peak that is known not to depend on the size, as memory held before
            the first sample. It makes the first guesses of a guided search better.
        clock: seconds, for the deadline and the records.
        on_start: called with each size before it is tried.
        on_trial: called with each record after the trial.

    Raises:
        ValueError: the bounds leave no candidate.
    """
    began, candidates = clock(), Candidates(min_size, max_size, multiple_of)
    if not len(candidates):
        raise ValueError(
            f"multiple_of is {multiple_of}; it has no multiple from {min_size} to {max_size}"
        )
    search = _Search(candidates, budget_bytes, start, fixed_bytes, tolerance)
    search.absorb(known)
    stopped_by: LimitedBy | None = None
    while not search.settled and (index := STRATEGIES[strategy](search)) is not None:
        if len(search.trials) >= max_trials:
            stopped_by = "max_trials"
            break
        if deadline_s is not None and clock() - began >= deadline_s:
            stopped_by = "timeout"
            break
        size = search.candidates[search.inside(index)]
        on_start(size)
        tried, peak_bytes, failed = clock(), None, OutOfMemory.status
        try:
            peak_bytes = measure(size)
        except OutOfMemory as error:
            failed = error.status
        status = status_of(peak_bytes, budget_bytes, failed)
        record = TrialRecord(size, status, peak_bytes, clock() - tried)
        search.add(record)
        on_trial(record)
    return SearchResult(
        size=search.candidates[search.low] if search.low >= 0 else None,
        certified=search.certified,
        limited_by=stopped_by or search.limited_by,
        trials=tuple(search.trials),
        within=search.within,
    )


def status_of(
    peak_bytes: int | None, budget_bytes: int, failed: Status = OutOfMemory.status
) -> Status:
    """The status of a trial with this peak under a budget; `failed` without a peak."""
    if peak_bytes is None:
        return failed
    return "fits" if peak_bytes <= budget_bytes else "over"


class Candidates:
    """Sizes that may be tried, ascending: sizes below `multiple_of`, then its multiples."""

    def __init__(self, min_size: int, max_size: int, multiple_of: int) -> None:
        first_multiple = -(-min_size // multiple_of) * multiple_of
        self._exact = range(min_size, min(multiple_of, max_size + 1))
        self._multiples = range(first_multiple, max_size + 1, multiple_of)

    def __len__(self) -> int:
        return len(self._exact) + len(self._multiples)

    def __getitem__(self, index: int) -> int:
        if index < len(self._exact):
            return self._exact[index]
        return self._multiples[index - len(self._exact)]

    def __iter__(self) -> Iterator[int]:
        return itertools.chain(self._exact, self._multiples)

    def __contains__(self, size: int) -> bool:
        return size in self._exact or size in self._multiples

    def nearest(self, size: float) -> int:
        """Index of the candidate closest to a size, which may lie anywhere."""
        index = bisect.bisect_right(self, size)  # the first candidate above
        if index == 0:
            return 0
        if index == len(self) or size - self[index - 1] <= self[index] - size:
            return index - 1
        return index


@dataclass
class _Search:
    """State of a search: the bracket, the peaks and the trials.

    Attributes:
        start, fixed_bytes, tolerance: as for `find_largest`.
        low: index of the largest candidate that was seen to fit; -1 without one.
        high: index of the smallest candidate above it that was seen not to fit; `len(candidates)` without
            one.
        peaks: peak bytes by size.
        kernel_sizes: sizes that a kernel does not take.
        num_slow: trials that left more than `HALVED` of the bracket.
        num_failed: trials in a row, the last one included, that did not fit.
    """

    candidates: Candidates
    budget_bytes: int
    start: int | None
    fixed_bytes: int
    tolerance: float = 0.0
    low: int = -1
    high: int = 0
    peaks: dict[int, int] = field(default_factory=dict)
    trials: list[TrialRecord] = field(default_factory=list)
    kernel_sizes: set[int] = field(default_factory=set)
    num_slow: int = 0
    num_failed: int = 0

    def __post_init__(self) -> None:
        self.high = len(self.candidates)

    @property
    def certified(self) -> bool:
        return self.high - self.low == 1

    @property
    def settled(self) -> bool:
        """Nothing more is to be tried. Without a failure above it, the largest candidate is tried itself."""
        if self.certified or self.unbounded or self.low < 0:
            return self.certified
        return self.candidates[self.high - 1] <= self._most

    @property
    def within(self) -> float:
        """(largest candidate that may fit - `low`) / `low`."""
        if self.certified:
            return 0.0
        if self.low < 0:
            return math.inf
        size = self.candidates[self.low]
        return (self.candidates[self.high - 1] - size) / size

    @property
    def limited_by(self) -> LimitedBy:
        """Why the size is not larger, once the search has settled."""
        if self.unbounded:
            return "max_batch_size"
        return "kernel" if self.candidates[self.high] in self.kernel_sizes else "memory"

    @property
    def ends(self) -> tuple[int, int]:
        """Sizes at the ends of the bracket: 0 if none has fitted, the largest where none has failed."""
        low = self.candidates[self.low] if self.low >= 0 else 0
        return low, self.candidates[min(self.high, len(self.candidates) - 1)]

    @property
    def width(self) -> float:
        """Of the bracket, on the scale that bisection halves."""
        low, high = self.ends
        return math.log((high + LINEAR_SIZE) / (low + LINEAR_SIZE))

    @property
    def _most(self) -> float:
        """The search may end at `low` if the largest candidate that may fit is at most this."""
        return self.candidates[self.low] * (1 + self.tolerance)

    @property
    def unbounded(self) -> bool:
        """Nothing above `low` has been tried."""
        return self.high == len(self.candidates)

    @property
    def hint(self) -> int | None:
        """Index of the size to start from while it lies inside the bracket."""
        if self.start is None:
            return None
        index = self.candidates.nearest(self.start)
        return index if self.low < index < self.high else None

    def distance(self, size: int) -> tuple[int, int]:
        """Bytes between the peak of a measured size and the budget; on a plateau, larger sizes come first."""
        return abs(self.peaks[size] - self.budget_bytes), -size

    def inside(self, index: int) -> int:
        """Move an index into the bracket, and away from an end where a trial could not end the search.

        Trials below `first` are left out, because a failure at `first` already settles the search. After a
        failure, trials above `last` are left out too, because a fit at `last` settles it.
        """
        first, last = self.low + 1, self.high - 1
        if self.tolerance and self.low >= 0:
            first = min(bisect.bisect_right(self.candidates, self._most), self.high - 1)
        if self.tolerance and not self.unbounded:
            least = self.candidates[self.high - 1] / (1 + self.tolerance)
            last = max(bisect.bisect_left(self.candidates, least), self.low + 1)
        # In a narrow bracket both outcomes settle it, and `first` is above `last`.
        return sorted((first, index, last))[1]

    def add(self, trial: TrialRecord) -> None:
        width = self.width
        self.trials.append(trial)
        self.absorb([trial])
        self.num_slow += self.width > HALVED * width
        self.num_failed = 0 if trial.status == "fits" else self.num_failed + 1

    def absorb(self, records: Iterable[TrialRecord]) -> None:
        """Narrow the bracket. If records contradict each other, the largest size that fitted counts."""
        fits, fails = [self.low], [self.high]
        for record in records:
            if record.peak_bytes is not None:
                self.peaks[record.size] = record.peak_bytes
            if record.status == "kernel":
                self.kernel_sizes.add(record.size)
            if record.size in self.candidates:
                (fits if record.fits(self.budget_bytes) else fails).append(
                    self.candidates.nearest(record.size)
                )
        self.low = max(fits)
        self.high = min(index for index in fails if index > self.low)


def _guided(search: _Search) -> int:
    if search.hint is not None:
        return search.hint
    if search.num_slow >= PATIENCE:
        return _bisect(search)
    if not search.peaks:
        first = (
            FIRST_SIZE
            if search.unbounded
            else min(FIRST_SIZE, search.candidates[search.high] / GROWTH)
        )
        return search.candidates.nearest(first)
    return _where_the_line_meets_the_budget(search)


def _where_the_line_meets_the_budget(search: _Search) -> int:
    candidates = search.candidates
    low_size, high_size = search.ends
    anchor = _anchor(search)
    slope = _slope(search, anchor)
    if slope is None:
        return _bisect(search)
    step = (search.budget_bytes - search.peaks[anchor]) / slope
    target = anchor + step
    bent = _parabola(search)
    fails_below = not search.unbounded and anchor < high_size <= target
    if fails_below and high_size not in search.peaks and high_size not in search.kernel_sizes:
        reach = LEAP if bent is None else FAR
        is_near = target <= FAR * high_size and high_size <= reach * anchor
        if is_near and search.num_failed <= 2:
            share = RETREAT * max(search.num_failed, 1)
            return search.high - round(share * (search.high - search.low))
    is_wrong = fails_below or max(target, 0) < low_size
    if bent is not None and (is_wrong or target > FAR * anchor):
        return bent
    if is_wrong:
        return _bisect(search)
    if step > 0:
        step *= 1 - SHORT
    if len(search.peaks) == 1 and target < high_size:
        step = min(step, (GROWTH - 1) * anchor)
    return candidates.nearest(anchor + step)


def _anchor(search: _Search) -> int:
    """The measured size that the line goes through: an end of the bracket if it left a peak."""
    measured = [size for size in search.ends if size in search.peaks]
    return min(measured or search.peaks, key=search.distance)


def _slope(search: _Search, anchor: int) -> float | None:
    """Bytes per sample at the anchor; None if the peaks in a bracket are too flat to tell."""
    proportional = max(search.peaks[anchor] - search.fixed_bytes, 1) / anchor
    others = sorted(search.peaks.keys() - {anchor}, key=search.distance)
    if not others:
        return (1 - FIXED_FRACTION) * proportional
    slopes = ((search.peaks[size] - search.peaks[anchor]) / (size - anchor) for size in others)
    flattest = MIN_STEEPNESS * proportional
    return next((slope for slope in slopes if slope >= flattest), None)


def _parabola(search: _Search) -> int | None:
    """Where the parabola through the three peaks closest to the budget meets it, if it opens upwards."""
    if len(search.peaks) < 3:
        return None
    (a, p), (b, q), (c, r) = sorted(
        (size, search.peaks[size] - search.budget_bytes)
        for size in sorted(search.peaks, key=search.distance)[:3]
    )
    slope = (r - q) / (c - b)
    bend = (slope - (q - p) / (b - a)) / (c - a)
    slope += bend * (c - b)  # at c
    square = slope * slope - 4 * bend * r
    if bend <= 0 or square < 0:
        return None
    size = c + (math.sqrt(square) - slope) / (2 * bend)
    index = search.candidates.nearest(size * (1 - SHORT) if r < 0 else size)
    return index if search.low < index < search.high else None


def _bisect(search: _Search) -> int:
    """The middle of the bracket on the scale of `width`; where a kernel has failed, the limit of a grid."""
    candidates = search.candidates
    low, high = search.ends
    if high in search.kernel_sizes:
        above = bisect.bisect_right(candidates, GRID_LIMIT)
        for index in (above - 1, above):
            if search.low < index < search.high:
                return index
    middle = math.sqrt((low + LINEAR_SIZE) * (high + LINEAR_SIZE)) - LINEAR_SIZE
    if search.unbounded:
        middle = high if high <= LEAP * low else min(middle, LEAP * low)
    return candidates.nearest(middle)


def _middle(search: _Search) -> int:
    return (search.low + search.high) // 2


def _power(search: _Search) -> int | None:
    """Double the size while it fits; halve it while none has."""
    candidates = search.candidates
    if search.low >= 0:
        return candidates.nearest(2 * candidates[search.low]) if search.unbounded else None
    if search.unbounded:
        return search.hint or 0
    return candidates.nearest(candidates[search.high] / 2)


def _binsearch(search: _Search) -> int | None:
    return _power(search) if search.unbounded else _middle(search)


STRATEGIES: dict[str, Callable[[_Search], int | None]] = {
    "guided": _guided,
    "binary": _middle,
    "power": _power,
    "binsearch": _binsearch,
}
"""By name: a function that gives the index of the next candidate, or None to stop."""
