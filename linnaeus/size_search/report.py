"""Progress of a search; its results as a sentence, as tables of the tracker and as `autobatch.json`."""

from __future__ import annotations

import logging
import platform
from contextlib import suppress
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from linnaeus.autobatch.observer import Purpose, SearchLog, budget_of_total, doing, gib, speed
from linnaeus.autobatch.ranks.protocol import RankStatus
from linnaeus.autobatch.result import AutoBatchResult, Mode, Timing
from linnaeus.autobatch.search import TrialRecord
from linnaeus.runtime.console import is_interactive
from linnaeus.runtime.log import SHOWN_ELSEWHERE
from linnaeus.runtime.words import counted

logger = logging.getLogger("linnaeus.run")

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
        self.status = status
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
        self.status.update(f"{doing(self.mode, size, purpose)}{number}{self._so_far}")

    def trial_finished(self, trial: TrialRecord, budget_bytes: int) -> None:
        """Add a row."""
        super().trial_finished(trial, budget_bytes)
        peak = of_budget = ""
        if trial.peak_bytes is not None:
            peak, of_budget = (
                gib(trial.peak_bytes),
                f"{trial.peak_bytes / max(budget_bytes, 1):.1%}",
            )
        seconds = f"{trial.seconds:.2f}"
        self._row(self.num_trials, trial.size, trial.status, peak, of_budget, seconds, self.note)
        last = trial.status if trial.peak_bytes is None else f"{peak} of {gib(budget_bytes)} GiB"
        self._so_far = f" ({trial.size}: {last})"

    def size_timed(self, timing: Timing) -> None:
        """Add a row."""
        super().size_timed(timing)
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


_LIMITS = {
    "memory": "the memory budget",
    "kernel": "a kernel, which takes no larger size",
    "max_batch_size": "MAX_BATCH_SIZE",
    "steps_per_epoch": "MIN_STEPS_PER_EPOCH",
    "dataset": "the samples of one rank",
    "effective_batch": "the requested effective batch",
    "host_memory": "host memory for the loader",
    "checkpoint": "the size in the checkpoint",
    "max_trials": "MAX_TRIALS",
    "timeout": "TIMEOUT_MINUTES",
    "throughput": "samples per second, which more would not raise by 5 %",
}


def device_environment(device: torch.device) -> dict[str, Any]:
    """Device and versions that the sizes found depend on."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = platform.processor() or platform.machine()
    return {
        "device": str(device),
        "device_name": name,
        "torch": str(torch.__version__),  # plain text: a checkpoint holds it
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def summary(result: AutoBatchResult) -> str:
    """Return one sentence with the size found, its limit, and the proven bound on the maximum."""
    limit = _LIMITS[result.limited_by]
    if result.limited_by == "max_batch_size" and result.mode == "val":
        limit = "MAX_BATCH_SIZE_VAL"
    name = "DATA.AUTOBATCH.MEMORY_LIMIT_GB" if result.total_is_limit else ""
    budget = budget_of_total(result.budget_bytes, result.total_bytes, name)
    return (
        f"AutoBatch {result.mode}: batch size {result.batch_size}, limited by {limit}, {_proof(result)}; "
        f"{counted(len(result.trials), 'trial')} in {result.seconds:.1f} s, budget {budget}"
        f"{_room_above(result)}"
    )


def _room_above(result: AutoBatchResult) -> str:
    """How large a batch memory would allow, where another bound is the reason for the size.

    A line through the smallest and the largest trial says it, or else the part of the budget that is left.
    """
    peaks = {
        trial.size: trial.peak_bytes for trial in result.trials if trial.peak_bytes is not None
    }
    used_bytes = peaks.get(result.batch_size)
    is_bound = result.limited_by in ("max_batch_size", "steps_per_epoch")
    if not is_bound or used_bytes is None or used_bytes >= result.budget_bytes:
        return ""
    smaller = [size for size in peaks if size < result.batch_size and peaks[size] < used_bytes]
    if not smaller:
        return f"; {1 - used_bytes / result.budget_bytes:.0%} of it is left"
    other = min(smaller)
    slope = (used_bytes - peaks[other]) / (result.batch_size - other)
    aim = result.batch_size + int((result.budget_bytes - used_bytes) / slope)
    most = result.max_batch_size
    if result.limited_by == "steps_per_epoch" and most is not None and aim > most:
        return f"; memory would allow more than {most}"
    aim = round(aim, 2 - len(str(aim)))  # a line says no more than two digits
    return f"; memory would allow about {max(aim, result.batch_size)}"


def _proof(result: AutoBatchResult) -> str:
    """Return whether the largest size that fits is known, and if not, how much larger it may be."""
    if result.certified:
        return "certified"
    if all(trial.size <= result.batch_size for trial in result.trials):
        return "no larger size was tried"
    if result.within > 1:
        return f"the largest is at most {1 + result.within:.3g} times as large"
    return f"within {100 * result.within:.1f} % of the largest"
