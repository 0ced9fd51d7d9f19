"""The searches of an analysis: one finder for each mode, which all fractions use."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace

from linnaeus.autobatch.finder import BatchSizeFinder
from linnaeus.autobatch.memory.device import GIB
from linnaeus.autobatch.ranks.protocol import RankStatus
from linnaeus.autobatch.result import AutoBatchResult, Mode
from linnaeus.autobatch.search import TrialRecord
from linnaeus.autobatch.settings import SearchSettings
from linnaeus.cli.analyze.breakdown import Breakdown, break_down, counting
from linnaeus.cli.analyze.options import Options
from linnaeus.cli.analyze.results import Analysis, Row
from linnaeus.cli.measure import Speeds, find_largest
from linnaeus.errors import AutoBatchError
from linnaeus.sizing.sizes import SizeSearch
from linnaeus.training.state_bytes import StateBytes
from linnaeus.words import counted

logger = logging.getLogger("linnaeus.analysis")
EXTRA_TRIALS = 0.6
"""All further fractions together may run this many times the trials of the first, and each at least one."""
CLOSE_FRACTION = 0.9
"""A size found is close when it reaches this fraction of the expected size; otherwise more trials are run."""
MAX_TRIALS_WHILE_FAR = 4
"""Bound on the trials of one further fraction while its size is not close."""
NEXT_START_FRACTION = 0.75
"""Position of the next trial between the largest size that fits (0) and the one that failed (1)."""
MARGIN = 0.06
"""Fraction of the budget, less the memory held, that the first guess leaves free, because peaks are noisy."""


def measure_mode(
    search: SizeSearch, mode: Mode, options: Options, analysis: Analysis, status: RankStatus
) -> None:
    """Search every fraction of one mode, the largest first, and time the sizes found.

    A fraction at which nothing fits gets a row with the reason.

    Args:
        search: steps, data and bounds of the run in question.
        mode: which step.
        options: the fractions, and whether further sizes are timed.
        analysis: takes the rows and the speeds as they are measured.
        status: told what is being tried.
    """
    speeds = analysis.speeds[mode] = Speeds()
    rows: list[Row] = []
    fractions = sorted(options.fractions, reverse=True)
    try:
        with (
            counting(search.assembly, search.world.device) as state,
            search.finder(mode, status) as finder,
        ):
            found: list[AutoBatchResult] = []
            for fraction in fractions:
                row = Row(mode, fraction)
                rows.append(row)
                analysis.rows.append(row)
                result = _find(finder, rows, num_fractions=len(fractions))
                if result is not None:
                    found.append(result)
                    row.breakdown = _breakdown(row, rows, state)
                _log(row)
            if found:
                _time(finder, found[0], rows, speeds, options, search.config.AUTOBATCH.TIMEOUT_MINUTES)
    except AutoBatchError as error:  # the bounds leave no size to try
        for fraction in fractions:
            analysis.rows.append(Row(mode, fraction, reason=str(error)))
            _log(analysis.rows[-1])


def _log(row: Row) -> None:
    size = "nothing fits" if row.batch_size is None else f"batch size {row.batch_size}"
    logger.info(
        "%s, %s of the memory: %s, %s",
        row.mode,
        f"{row.memory_fraction:.0%}",
        size,
        counted(len(row.trials), "trial"),
    )


def _find(finder: BatchSizeFinder, rows: Sequence[Row], *, num_fractions: int) -> AutoBatchResult | None:
    """Search the fraction of the last row, and fill the row even when the search is interrupted."""
    row = rows[-1]
    num_before = len(finder.trials)
    result = None
    row.limited_by = "interrupted"
    try:
        if rows[0].budget_bytes is None:
            result = find_largest(finder, row.memory_fraction)
        else:
            result = _find_further(finder, rows, num_fractions)
        row.batch_size, row.certified = result.batch_size, result.certified
        row.limited_by = result.limited_by
    except AutoBatchError as error:
        row.limited_by, row.reason = None, str(error)
    except KeyboardInterrupt:
        row.batch_size = _largest_that_fitted(finder)
        raise
    finally:
        row.budget_bytes = finder.budget_bytes or None
        row.held_bytes = finder.held_bytes
        row.trials = tuple(finder.trials[num_before:])
        row.peak_bytes = _peak(finder.trials, row.batch_size)
    return result


def _find_further(finder: BatchSizeFinder, rows: Sequence[Row], num_fractions: int) -> AutoBatchResult:
    """Search a fraction below the first, starting where the peaks measured so far predict its size.

    Certifying a size takes at least two trials, and many fractions should cost little more than one: so the
    size may remain uncertified.
    """
    first, *others, row = rows
    settings = replace(
        finder.settings, target_memory_fraction=row.memory_fraction, strategy="guided", objective="memory",
        start=None,
    )  # fmt: skip
    num_left = int(EXTRA_TRIALS * len(first.trials)) - sum(len(other.trials) for other in others)
    num_trials = max(1, math.ceil(num_left / (num_fractions - len(others) - 1)))
    expected = start = _expected(finder, rows, finder.settings.memory_limit_gb)
    num_before = len(finder.trials)
    try:
        result = finder.find(replace(settings, start=start, max_trials=1), confirm=False)
        while result.limited_by == "max_trials":
            is_close = start is None or expected is None or result.batch_size >= CLOSE_FRACTION * expected
            if len(finder.trials) - num_before >= (num_trials if is_close else MAX_TRIALS_WHILE_FAR):
                break
            if is_close or start is None:
                start = None
            else:
                start = result.batch_size + int(NEXT_START_FRACTION * (start - result.batch_size))
            result = finder.find(replace(settings, start=start, max_trials=1), confirm=False)
    except AutoBatchError:  # nothing has fitted yet, and a row needs a size
        result = finder.find(replace(settings, max_trials=SearchSettings.max_trials), confirm=False)
    # The bound on trials here is not DATA.AUTOBATCH.MAX_TRIALS, so it must not be reported as that.
    return replace(result, limited_by="memory") if result.limited_by == "max_trials" else result


def _expected(finder: BatchSizeFinder, rows: Sequence[Row], limit_gb: float | None) -> int | None:
    """The size predicted for the last row; the memory held may have changed since the earlier trials."""
    first, row = rows[0], rows[-1]
    total_bytes = finder.memory.total_bytes if limit_gb is None else int(limit_gb * GIB)
    total_bytes = min(total_bytes, finder.memory.total_bytes)
    assert first.budget_bytes is not None
    budget_bytes = first.budget_bytes - int((first.memory_fraction - row.memory_fraction) * total_bytes)
    held_bytes = finder.held_bytes
    points = [
        (trial.size, trial.peak_bytes - other.held_bytes + held_bytes)
        for other in rows
        for trial in other.trials
        if trial.peak_bytes is not None
    ]
    return where_budget_is_met(sorted(points), budget_bytes, held_bytes)


def where_budget_is_met(points: Sequence[tuple[int, int]], budget_bytes: int, held_bytes: int) -> int | None:
    """The size between two measured ones at which the peak comes close to the budget.

    >>> where_budget_is_met([(10, 200), (110, 1200)], budget_bytes=700, held_bytes=100)
    56

    Args:
        points: (size, peak in bytes), ascending.
        budget_bytes: bytes that the process may hold.
        held_bytes: bytes that it holds between trials.

    Returns:
        None when the budget does not lie between two peaks.
    """
    below = [point for point in points if point[1] <= budget_bytes]
    above = [point for point in points if point[1] > budget_bytes]
    if not below or not above:
        return None
    (low, low_bytes), (high, high_bytes) = max(below), min(above)
    wanted_bytes = budget_bytes - MARGIN * (budget_bytes - held_bytes)
    if low >= high or wanted_bytes <= low_bytes:
        return None
    return int(low + (high - low) * (wanted_bytes - low_bytes) / (high_bytes - low_bytes))


def _largest_that_fitted(finder: BatchSizeFinder) -> int | None:
    sizes = (trial.size for trial in finder.trials if trial.fits(finder.budget_bytes))
    return max(sizes, default=None)


def _peak(trials: Sequence[TrialRecord], size: int | None) -> int | None:
    """Peak of the last trial of a size, which the search of an earlier fraction may have run."""
    peaks = [trial.peak_bytes for trial in trials if trial.size == size and trial.peak_bytes is not None]
    return peaks[-1] if peaks else None


def _breakdown(row: Row, rows: Sequence[Row], state: StateBytes) -> Breakdown | None:
    if row.peak_bytes is None:
        return None
    ran_in = next(
        other for other in reversed(rows) if any(trial.size == row.batch_size for trial in other.trials)
    )
    return break_down(row.mode, state, peak_bytes=row.peak_bytes, held_bytes=ran_in.held_bytes)


def _time(
    finder: BatchSizeFinder, largest: AutoBatchResult, rows: Sequence[Row], speeds: Speeds, options: Options,
    timeout_minutes: float,
) -> None:  # fmt: skip
    """Time the sizes found; with `--throughput` further ones up to the largest, for the knee."""
    if options.throughput:
        fast = speeds.find_knee(finder, largest, timeout_minutes)
        row = next(row for row in rows if row.memory_fraction == largest.target_memory_fraction)
        row.trials += fast.trials[len(largest.trials) :]
    for row in rows:
        if row.batch_size is not None and (timing := speeds.time(finder, row.batch_size)) is not None:
            row.samples_per_s = timing.samples_per_s
