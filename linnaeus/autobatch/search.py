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
   peak and one that runs out of memory leaves none. After a single trial it is at most four times as large.
   While no size has left a peak, the next one is at most a quarter of it.
4. If the line says that a size fits which has failed, the next trial bisects the bracket where that size has
   left a peak: the cost per sample jumps. Otherwise it lies below that size by an eighth of the
   bracket's width, and by twice as much after each further failure.
5. After eight trials the line is given up in favour of doubling steps and bisection.

Close to the answer, the point where the line meets the budget is one of the two neighbours that certify it.
Any curve takes at most 2·log2(candidates) + 9 trials.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import math
import operator
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["fits", "over", "oom"]
LimitedBy = Literal["memory", "max_batch_size", "max_trials", "timeout"]

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
lie on a plateau. While nothing less than `GROWTH` times as large has failed, the next size is at most that
many times as large, and at most where this slope meets the budget; otherwise the bracket is bisected."""
GUIDED_TRIALS = 8
"""Trials that follow the line. On measured curves one search in a hundred needs more."""


class OutOfMemory(Exception):  # noqa: N818 (it names an event; `measure` raises it, searches expect it)
    """Raised by `measure` when a size does not fit on the device and therefore leaves no peak."""


@dataclass(frozen=True)
class TrialRecord:
    """One size that was tried.

    Attributes:
        status: `fits` (ran within the budget), `over` (ran, above the budget) or `oom` (did not run).
        peak_bytes: what `measure` returned; None when it raised `OutOfMemory`.
    """

    size: int
    status: Status
    peak_bytes: int | None
    seconds: float

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size is {self.size}; it must be at least 1")

    def fits(self, budget_bytes: int) -> bool:
        """Whether it ran with a peak within a budget, which need not be that of the trial."""
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
    """What a search found.

    Attributes:
        size: the largest size that was seen to fit; None if none was.
        certified: the size ran and fits, and the next candidate ran and does not, or there is no next one. If
            `size` is None: the smallest candidate ran and does not fit.
        limited_by: why the size is not larger: `memory`; `max_batch_size` (the largest candidate fits);
            `max_trials` or `timeout` (the search ended early).
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
        multiple_of: only its multiples are candidates, and every size below the first of them.
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
        fixed_bytes: part of every peak that is known not to depend on the size, such as what is held before
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
    stopped_by: LimitedBy = "memory"
    while not search.settled and (index := STRATEGIES[strategy](search)) is not None:
        if len(search.trials) >= max_trials:
            stopped_by = "max_trials"
            break
        if deadline_s is not None and clock() - began >= deadline_s:
            stopped_by = "timeout"
            break
        size = search.candidates[search.inside(index)]
        on_start(size)
        tried, peak_bytes = clock(), None
        with contextlib.suppress(OutOfMemory):
            peak_bytes = measure(size)
        record = TrialRecord(size, status_of(peak_bytes, budget_bytes), peak_bytes, clock() - tried)
        search.add(record)
        on_trial(record)
    return SearchResult(
        size=search.candidates[search.low] if search.low >= 0 else None,
        certified=search.certified,
        limited_by="max_batch_size" if search.low == len(search.candidates) - 1 else stopped_by,
        trials=tuple(search.trials),
        within=search.within,
    )


def status_of(peak_bytes: int | None, budget_bytes: int) -> Status:
    """The status of a trial with this peak under a budget."""
    if peak_bytes is None:
        return "oom"
    return "fits" if peak_bytes <= budget_bytes else "over"


class Candidates:
    """The sizes that may be tried, ascending: all those below `multiple_of`, then its multiples."""

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
        """How much larger than `low` the largest candidate that may fit is, as a fraction of the former."""
        if self.certified:
            return 0.0
        if self.low < 0:
            return math.inf
        size = self.candidates[self.low]
        return (self.candidates[self.high - 1] - size) / size

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

    @property
    def num_failed_again(self) -> int:
        """Number of failed trials in a row at the end, less one."""
        fits = (record.status == "fits" for record in reversed(self.trials))
        return max(sum(1 for _ in itertools.takewhile(operator.not_, fits)) - 1, 0)

    def distance(self, size: int) -> int:
        """Bytes between the peak of a measured size and the budget."""
        return abs(self.peaks[size] - self.budget_bytes)

    def inside(self, index: int) -> int:
        """The index inside the bracket that is closest to the given one, but not needlessly near its ends.

        Trials below `first` are left out, because a failure at `first` already settles the search; likewise
        those above `last` where something has failed, because a fit at `last` settles it.
        """
        first, last = self.low + 1, self.high - 1
        if self.tolerance and self.low >= 0:
            first = min(bisect.bisect_right(self.candidates, self._most), self.high - 1)
        if self.tolerance and not self.unbounded:
            least = self.candidates[self.high - 1] / (1 + self.tolerance)
            last = max(bisect.bisect_left(self.candidates, least), self.low + 1)
        first, last = (
            min(first, last),
            max(first, last),
        )  # in a narrow bracket both outcomes settle it
        return max(first, min(index, last))

    def add(self, trial: TrialRecord) -> None:
        self.trials.append(trial)
        self.absorb([trial])

    def absorb(self, records: Iterable[TrialRecord]) -> None:
        """Narrow the bracket. If records contradict each other, the largest size that fitted counts."""
        fits, fails = [self.low], [self.high]
        for record in records:
            if record.peak_bytes is not None:
                self.peaks[record.size] = record.peak_bytes
            if record.size in self.candidates:
                (fits if record.fits(self.budget_bytes) else fails).append(
                    self.candidates.nearest(record.size)
                )
        self.low = max(fits)
        self.high = min(index for index in fails if index > self.low)


def _guided(search: _Search) -> int:
    if search.hint is not None:
        return search.hint
    if (num_more := len(search.trials) - GUIDED_TRIALS) >= 0:
        return search.low + 2**num_more if search.unbounded else _middle(search)
    if not search.peaks:
        first = (
            FIRST_SIZE
            if search.unbounded
            else min(FIRST_SIZE, search.candidates[search.high] / GROWTH)
        )
        return search.candidates.nearest(first)
    return _where_the_line_meets_the_budget(search)


def _where_the_line_meets_the_budget(search: _Search) -> int:
    candidates, high = search.candidates, search.high
    anchor = _anchor(search)
    slope = _slope(search, anchor)
    if slope is None:
        return _middle(search)
    step = (search.budget_bytes - search.peaks[anchor]) / slope
    if not search.unbounded and anchor < candidates[high] <= anchor + step:
        if candidates[high] in search.peaks:
            return _middle(search)
        return high - round(RETREAT * (1 << search.num_failed_again) * (high - search.low))
    if step > 0:
        step *= 1 - SHORT
    if len(search.peaks) == 1:
        step = min(step, (GROWTH - 1) * anchor)
    return candidates.nearest(anchor + step)


def _anchor(search: _Search) -> int:
    """The measured size that the line goes through: an end of the bracket if it left a peak."""
    ends = (
        search.candidates[i] for i in (search.low, search.high) if 0 <= i < len(search.candidates)
    )
    measured = [size for size in ends if size in search.peaks]
    return min(measured or search.peaks, key=search.distance)


def _slope(search: _Search, anchor: int) -> float | None:
    """Bytes per sample at the anchor; None if the peaks in a bracket are too flat to tell."""
    proportional = max(search.peaks[anchor] - search.fixed_bytes, 1) / anchor
    others = sorted(search.peaks.keys() - {anchor}, key=search.distance)
    if not others:
        return (1 - FIXED_FRACTION) * proportional
    slopes = ((search.peaks[size] - search.peaks[anchor]) / (size - anchor) for size in others)
    flattest = MIN_STEEPNESS * proportional
    fourfold = (search.budget_bytes - search.peaks[anchor]) / ((GROWTH - 1) * anchor)
    is_far = search.unbounded or search.candidates[search.high] > GROWTH * anchor
    return next(
        (slope for slope in slopes if slope >= flattest),
        max(flattest, fourfold) if is_far else None,
    )


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
