"""A search as it is watched: on a terminal a row for each trial, and what is being tried as a status."""

from __future__ import annotations

import logging
from contextlib import suppress

from rich.console import Console
from rich.text import Text

from linnaeus.autobatch.observer import Purpose, SearchLog, gib, speed
from linnaeus.autobatch.ranks.protocol import RankStatus
from linnaeus.autobatch.result import Mode, Timing
from linnaeus.autobatch.search import TrialRecord
from linnaeus.console import is_interactive
from linnaeus.log import SHOWN_ELSEWHERE

_HEADINGS = ("trial", "batch size", "status", "peak GiB", "of budget", "seconds")
_ROW = "{:>5}  {:>10}  {:<6}  {:>8}  {:>9}  {:>7}"


class SearchProgress(SearchLog):
    """Shows a search on rank 0's terminal, and tells the status of this rank.

    On a terminal, trials are rows of a table that grows; their log lines then go to the log file alone.
    Where the level of the logger is above INFO, no row is shown.

    Args:
        mode: begins every line.
        status: told each size that is tried, with the last peak.
        console: rank 0's; None on the other ranks.
    """

    def __init__(self, mode: Mode, status: RankStatus, console: Console | None) -> None:
        super().__init__(mode)
        self._status = status
        is_logged = logging.getLogger("linnaeus.autobatch").isEnabledFor(logging.INFO)
        is_shown = console is not None and is_interactive(console) and is_logged
        self._console = console if is_shown else None
        self.extra = SHOWN_ELSEWHERE if is_shown else {}
        self._has_heading = False
        self._so_far = ""

    def trial_started(self, size: int, purpose: Purpose) -> None:
        """Update the status."""
        super().trial_started(size, purpose)
        number = f", trial {self.num_trials + 1}" if purpose in ("trial", "confirmation") else ""
        self._status.update(f"{self.doing(size)}{number}{self._so_far}")

    def trial_finished(self, trial: TrialRecord, budget_bytes: int) -> None:
        """Add a row."""
        super().trial_finished(trial, budget_bytes)
        peak = of_budget = ""
        if trial.peak_bytes is not None:
            peak, of_budget = gib(trial.peak_bytes), f"{trial.peak_bytes / max(budget_bytes, 1):.1%}"
        seconds = f"{trial.seconds:.2f}"
        self._row(self.num_trials, trial.size, trial.status, peak, of_budget, seconds, self.note)
        last = trial.status if trial.peak_bytes is None else f"{peak} of {gib(budget_bytes)} GiB"
        self._so_far = f" ({trial.size}: {last})"

    def size_timed(self, timing: Timing) -> None:
        """Add a row, unless the size has been timed before and still fits."""
        is_new = timing.batch_size not in self.timed_sizes
        super().size_timed(timing)
        if is_new or not timing.samples_per_s:
            seconds = f"{timing.seconds_per_step:.3f}"
            self._row("", timing.batch_size, "timed", "", "", seconds, speed(timing))

    def _row(self, *cells: object) -> None:
        if self._console is None:
            return
        *columns, note = cells
        if not self._has_heading:
            self._has_heading = True
            self._print(_ROW.format(*_HEADINGS), style="bold")
        self._print(f"{_ROW.format(*columns)}  {note}".rstrip())

    def _print(self, text: str, style: str = "") -> None:
        assert self._console is not None
        with suppress(OSError):  # a terminal that has gone does not end the search
            self._console.print(Text(text, style), soft_wrap=True)
