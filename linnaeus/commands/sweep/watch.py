"""Starts the runs of a sweep, joins those that go on already, and watches them to their ends."""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rich.console import Console

from linnaeus.commands.compare.results import Comparison, Row
from linnaeus.commands.sweep.folder import ASKED, ended_well, is_asked, prepare
from linnaeus.commands.sweep.options import PlannedRun
from linnaeus.commands.sweep.search import Search
from linnaeus.console import StatusLine
from linnaeus.errors import ConfigError, LinnaeusError
from linnaeus.launchers.interface import Job, Launcher, Task
from linnaeus.launchers.jobs import cancel, going, lost
from linnaeus.launchers.outcome import OUTPUT, last_line, read_outcome
from linnaeus.words import counted

LOST_LOOKS = 3
"""A job that is not in the queue has gone after so many looks: a file server may show its outcome late."""
SLICE_S = 0.1
logger = logging.getLogger("linnaeus.sweep")


def words_of(folder: Path) -> tuple[str, ...]:
    """What a run is started with, after `python -m linnaeus.main`."""
    return ("--cfg", str(folder / ASKED))


class Stop:
    """Notes Ctrl-C and SIGTERM.

    Attributes:
        signals: those so far.
    """

    def __init__(self) -> None:
        self.signals: list[int] = []

    @property
    def requested(self) -> bool:
        """Whether somebody has asked to stop."""
        return bool(self.signals)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Note the signals inside the context."""
        before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signals.append(number)


class Watch:
    """The runs of a sweep, from the first to the last.

    Args:
        sweep: its rows, one for each run, are filled.
        runs: in their order.
        launcher: starts them.
        stop: says when to end.
        console: shows which runs go on.
        save: writes the figures; called whenever a row has changed.
        search: adds runs while there is room; None for those of a grid alone.
        limit: how many runs of a search go on at once, beside what the launcher has room for.

    Attributes:
        when_started: called once all runs have been given to the launcher.

    Raises:
        ConfigError: a run goes on with another configuration.
    """

    def __init__(
        self, sweep: Comparison, runs: Sequence[PlannedRun], launcher: Launcher, stop: Stop, console: Console,
        save: Callable[[], None], search: Search | None = None, limit: int = 1,
    ) -> None:  # fmt: skip
        self._sweep = sweep
        self._planned: dict[Path, PlannedRun] = {}
        self._rows: dict[Path, Row] = {}
        self._titles: dict[Path, str] = {}
        self._launcher, self._stop, self._console, self._save = launcher, stop, console, save
        self._search, self._limit = search, limit
        self._total = len(runs) if search is None else search.num_trials
        for planned in runs:
            self._add(planned)
        self._waiting: deque[Path] = deque()
        self._active: dict[Path, int] = {}
        """The runs that have been started and not ended, each with the looks since it was last seen."""
        self.when_started: Callable[[], object] = lambda: None
        self._join()

    @property
    def nothing_to_start(self) -> bool:
        """Whether all runs have ended well, or go on."""
        return not self._waiting and not self._num_left

    @property
    def _num_left(self) -> int:
        """Runs that the search is still to ask for."""
        return 0 if self._search is None or self._stop.requested else self._search.num_left

    def _add(self, planned: PlannedRun) -> Row:
        """Add a run to the table."""
        row = Row(planned.combination.values, planned.folder)
        self._sweep.rows.append(row)
        self._planned[planned.folder], self._rows[planned.folder] = planned, row
        number = len(self._sweep.rows)
        self._titles[planned.folder] = f"run {number} of {self._total}, {planned.combination.title}"
        return row

    def _join(self) -> None:
        """Sort the runs: those that go on, those that have ended well, and those to be started."""
        jobs = going(self._planned)
        for folder, planned in self._planned.items():
            row, title = self._rows[folder], self._titles[folder]
            if folder in jobs:
                if not is_asked(folder, planned.config):
                    raise ConfigError(
                        f"{folder}: {jobs[folder].name} goes on there with another configuration; cancel it, "
                        "or set another EXPERIMENT.NAME"
                    )
                self._active[folder] = 0
                row.job = jobs[folder]
                logger.info("%s: goes on, %s; output in %s", title, row.job.name, folder / OUTPUT)
            elif (outcome := ended_well(folder, planned.config)) is not None:
                row.outcome = outcome
                if self._search is not None:
                    self._search.told(row)
                logger.info("%s: has ended well before%s", title, self._figure(row))
            elif not self._is_closed(row, planned):
                self._waiting.append(folder)

    def _is_closed(self, row: Row, planned: PlannedRun) -> bool:
        """Whether a search repeats a run neither: it was pruned, or has failed."""
        if self._search is None:
            return False
        row.outcome = read_outcome(row.folder) if is_asked(row.folder, planned.config) else None
        closed = self._search.told(row)
        row.outcome = row.outcome if closed else None
        return closed

    def to_the_end(self) -> None:
        """Start and watch the runs until all have ended, or somebody has asked to stop.

        Raises:
            LinnaeusError: runs cannot be started; those that go on are left to themselves.
        """
        self._save()
        handled = 0
        while True:
            with StatusLine(self._console) as line:
                line.update(self._describe)
                while len(self._stop.signals) == handled and self._step():
                    self._pause(handled)
            if len(self._stop.signals) == handled or not self._go_on_after_signal():
                return
            handled = len(self._stop.signals)

    def _step(self) -> bool:
        """Look at the runs and start what there is room for; returns whether any is left."""
        jobs = going(self._active)
        changed = False
        for folder in [*self._active]:
            row = self._rows[folder]
            changed |= row.job != jobs.get(folder)
            row.job = jobs.get(folder)
            if row.job is None and self._has_ended(folder, row):
                del self._active[folder]
                changed = True
            elif row.job is not None and self._search is not None and self._search.prunes(folder):
                self._prune(folder)
        changed |= self._start(jobs)
        if changed:
            self._save()
        return bool(self._active or self._waiting or self._num_left)

    def _prune(self, folder: Path) -> None:
        logger.info("%s: is worse than the others were, and pruned", self._titles[folder])
        try:
            cancel([folder])
        except LinnaeusError as error:  # it goes on to its end, which does no harm
            logger.warning("%s: cannot be ended: %s", self._titles[folder], error)

    def _start(self, jobs: dict[Path, Job]) -> bool:
        room = self._launcher.room(jobs.values())
        if self._search is not None and self._num_left:
            room = min(room, self._limit - len(self._active))
            for planned in self._search.more(max(room - len(self._waiting), 0)):
                self._add(planned)
                self._waiting.append(planned.folder)
        count = max(min(room, len(self._waiting)), 0)
        if count and not self._stop.requested:
            folders = [self._waiting.popleft() for _ in range(count)]
            began = {folder: prepare(folder, self._planned[folder].config) for folder in folders}
            tasks = [
                Task(folder, words_of(folder), 0.0 if earlier is None else earlier.seconds)
                for folder, earlier in began.items()
            ]
            self._launcher.submit(tasks, jobs.values())
            self._active.update(dict.fromkeys(folders, 0))
            for folder, job in going(folders).items():
                self._rows[folder].job = job
            for folder, earlier in began.items():
                how = "going on" if earlier else "started"
                logger.info("%s: %s; output in %s", self._titles[folder], how, folder / OUTPUT)
        if self.nothing_to_start:
            self.when_started()
        return bool(count)

    def _has_ended(self, folder: Path, row: Row) -> bool:
        """Fill the row of a run that does not go on; False where its outcome may still come."""
        row.outcome = read_outcome(folder)
        if row.outcome is None:
            self._active[folder] += 1
            if self._active[folder] < LOST_LOOKS:
                return False
            row.outcome = lost(folder)
        if self._search is not None:
            self._search.told(row)
        title, outcome = self._titles[folder], row.outcome
        if row.status == "finished" and outcome is not None:
            logger.info("%s: done in %.1f s%s", title, outcome.seconds, self._figure(row))
        elif outcome is not None and not row.pruned and not (self._stop.requested and outcome.was_stopped):
            logger.info("%s: %s (exit code %d): %s", title, row.status, outcome.exit_code, outcome.reason)
        return True

    def _pause(self, handled: int) -> None:
        """Until the next look, or a signal."""
        until = time.monotonic() + self._launcher.poll_s
        while time.monotonic() < until and len(self._stop.signals) == handled:
            time.sleep(SLICE_S)

    def _go_on_after_signal(self) -> bool:
        """End the runs, or leave them to themselves; returns whether to watch them to their ends."""
        self._waiting.clear()
        if not self._active:
            return False
        is_on_slurm = any(job is not None and job.slot is None for job in self._jobs())
        if is_on_slurm and not self._may_cancel():
            return False
        cancel([*self._active])
        return True

    def _jobs(self) -> list[Job | None]:
        return [self._rows[folder].job for folder in self._active]

    def _may_cancel(self) -> bool:
        """Ask whether to cancel jobs; without a terminal, after SIGTERM or a second Ctrl-C they stay."""
        if self._stop.signals != [signal.SIGINT] or not sys.stdin.isatty():
            return False
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            answer = input(f"cancel {counted(len(self._active), 'job')}? [y/N] ")
            return answer.strip().lower() in ("y", "yes")
        except (KeyboardInterrupt, EOFError):
            return False
        finally:
            signal.signal(signal.SIGINT, handler)

    def _describe(self) -> str:
        """The status line: the one run that goes on with its last line, or how many do what."""
        if len(self._active) == 1:
            [folder] = self._active
            job = self._rows[folder].job
            doing = job.reason if job is not None and job.reason else last_line(folder)
            return f"{self._titles[folder]}: {doing}"
        statuses = [row.status for row in self._sweep.rows]
        return ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses))

    def _figure(self, row: Row) -> str:
        name = Comparison([row], self._sweep.wanted_metric).metric
        value = row.value(name)
        return "" if value is None else f", {name} {value:.4f}"
