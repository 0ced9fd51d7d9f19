"""Joins the running runs of a sweep, starts the others, and watches all to their ends."""

from __future__ import annotations

import logging
import signal
import sys
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from linnaeus.cli.compare.runs import Comparison, Row
from linnaeus.cli.sweep.folder import is_asked, prepare
from linnaeus.cli.sweep.options import PlannedRun
from linnaeus.cli.sweep.source import Source, UnknownMetricError
from linnaeus.cli.sweep.stop import Stop
from linnaeus.console import StatusLine
from linnaeus.errors import ConfigError, LinnaeusError
from linnaeus.files import ASKED, FolderLock
from linnaeus.launchers.interface import Job, Launcher, Task
from linnaeus.launchers.jobs import active_jobs, cancel, lost_outcome
from linnaeus.launchers.outcome import OUTPUT, last_line, read_outcome
from linnaeus.launchers.record import RECORD, read_record
from linnaeus.signals import handled
from linnaeus.words import counted

LOST_LOOKS = 3
"""Consecutive looks without the job and without an outcome after which a local run counts as lost."""
LOST_S = 90.0
"""The seconds of such looks after which a job of SLURM does: a file server may show its outcome late."""
logger = logging.getLogger("linnaeus.sweep")


def words_of(folder: Path) -> tuple[str, ...]:
    """What a run is started with, after `python -m linnaeus.main`."""
    return ("--cfg", str(folder / ASKED))


class Watch:
    """The runs of a sweep, from the first to the last.

    Args:
        sweep: its rows, one for each run, are filled.
        source: the runs in their order.
        launcher: starts them.
        stop: says when to end.
        console: shows which runs are active.
        save: writes the figures; called whenever a row has changed.
        limit: most runs active at once; None leaves it to the launcher.

    Attributes:
        lock: that of the sweep's folder, given back once the launcher is known to have all runs; None for one
            that is kept to the end.
    """

    def __init__(
        self, sweep: Comparison, source: Source, launcher: Launcher, stop: Stop, console: Console,
        save: Callable[[], object], limit: int | None = None,
    ) -> None:  # fmt: skip
        self._sweep, self._source = sweep, source
        self._planned: dict[Path, PlannedRun] = {}
        self._rows: dict[Path, Row] = {}
        self._titles: dict[Path, str] = {}
        self._launcher, self._stop, self._console, self._save = launcher, stop, console, save
        self._limit = limit
        self._waiting: deque[Path] = deque()
        self._active: list[Path] = []
        """The runs that have been started and not ended."""
        self._others: list[Path] = []
        """Runs of the same folder that this sweep does not have, but an earlier one has started."""
        self._looks_without_job: Counter[Path] = Counter()
        """Consecutive looks at each active run that found neither a job nor an outcome."""
        self._has_checked_metric = False
        self.lock: FolderLock | None = None

    @property
    def nothing_to_start(self) -> bool:
        """Whether all runs have ended well, or are active."""
        return not self._waiting and not self._num_left

    @property
    def num_waiting(self) -> int:
        """Runs that are chosen and not started."""
        return len(self._waiting)

    @property
    def _num_left(self) -> int:
        """Runs that are still to be chosen."""
        return 0 if self._stop.requested else self._source.num_left

    def _add(self, planned: PlannedRun) -> None:
        """Add a run to the table."""
        row = Row(planned.combination.values, planned.folder)
        self._sweep.rows.append(row)
        self._planned[planned.folder], self._rows[planned.folder] = planned, row
        number = len(self._sweep.rows)
        self._titles[planned.folder] = f"run {number} of {self._source.num_runs}, {planned.combination.title}"

    def join(self) -> None:
        """Sort the runs that are known: those that are active, those that have ended, and those to start.

        Raises:
            ConfigError: an active run has another configuration.
            UnknownMetricError: the runs do not have the metric of the search; they are asked to end.
        """
        for planned in self._source.earlier():
            self._add(planned)
        self._find_others()
        jobs = active_jobs(self._planned)
        try:
            self._sort(jobs)
        except UnknownMetricError:
            self._active = [*jobs]
            self._cancel()
            raise

    def _sort(self, jobs: dict[Path, Job]) -> None:
        for folder, planned in self._planned.items():
            row, title = self._rows[folder], self._titles[folder]
            if folder in jobs:
                if not is_asked(folder, planned.config):
                    raise ConfigError(
                        f"{folder}: {jobs[folder].name} is active there with another configuration; cancel "
                        "it, or set another EXPERIMENT.NAME"
                    )
                self._active.append(folder)
                row.job = jobs[folder]
                if row.job.kind == "unknown":
                    logger.warning(
                        "%s: may go on: %s, and SLURM does not answer (%s); if it does not, delete %s",
                        title, row.job.name, row.job.reason, folder / RECORD,
                    )  # fmt: skip
                else:
                    logger.info("%s: goes on, %s; output in %s", title, row.job.name, folder / OUTPUT)
            elif not self._has_ended_for_good(row, planned):
                row.outcome = None
                self._waiting.append(folder)
            elif row.status == "finished":
                logger.info("%s: has ended well before%s", title, self._figure(row))

    def _find_others(self) -> None:
        """Find active local runs of earlier sweeps with other values: they have a share of this machine."""
        parents = {folder.parent for folder in self._planned}
        found = {record.parent for parent in parents for record in parent.glob(f"*/{RECORD}")}
        for folder, job in active_jobs(sorted(found - self._planned.keys())).items():
            if not _is_on_slurm(folder):
                self._others.append(folder)
                logger.warning(
                    "%s: %s is active there and takes room, but is no run of this command, whose Ctrl-C does "
                    "not end it", folder, job.name,
                )  # fmt: skip

    def _has_ended_for_good(self, row: Row, planned: PlannedRun) -> bool:
        """Whether an earlier process has run this, and it is neither resumed nor repeated."""
        if is_asked(row.folder, planned.config):
            row.outcome = read_outcome(row.folder) or lost_outcome(row.folder)
        return row.outcome is not None and self._source.record_end(row)

    def to_the_end(self) -> None:
        """Start and watch the runs until all have ended, or somebody has asked to stop.

        Raises:
            LinnaeusError, OSError: runs cannot be started; the active ones continue without this process.
            UnknownMetricError: see `join`.
        """
        self._save()
        while True:
            with StatusLine(self._console) as line:
                try:
                    while not self._stop.is_new and self._step():
                        line.update(self._describe())
                        self._stop.wait(self._launcher.poll_s)
                except UnknownMetricError:
                    self._cancel()
                    raise
            if not self._stop.is_new or not self._continue_after_signal():
                return

    def _step(self) -> bool:
        """Look at the runs and start what there is room for; returns whether any is left."""
        ended = [folder for folder, row in self._rows.items() if row.status in ("failed", "interrupted")]
        jobs = active_jobs([*self._active, *self._others, *ended])
        self._watch_again([folder for folder in ended if folder in jobs], jobs)
        changed = False
        for folder in [*self._active]:
            row = self._rows[folder]
            changed |= row.job != jobs.get(folder)
            row.job = jobs.get(folder)
            if row.job is not None:
                del self._looks_without_job[folder]
                self._check_metric(row)
                if self._source.prunes(row):
                    self._prune(folder)
            elif self._may_have_ended(folder):
                self._active.remove(folder)
                self._end(row)
                changed = True
        changed |= self._start(jobs)
        if changed:
            self._save()
        return bool(self._active or self._waiting or self._num_left)

    def _watch_again(self, ended: list[Path], jobs: dict[Path, Job]) -> None:
        """Watch ended runs that another process has started again; drop jobs that SLURM says nothing of."""
        for folder in ended:
            if jobs[folder].kind == "unknown":
                del jobs[folder]
            elif not self._stop.requested:
                logger.info("%s: has been started again, %s", self._titles[folder], jobs[folder].name)
                self._rows[folder].outcome = None
                self._active.append(folder)

    def _check_metric(self, row: Row) -> None:
        """Warn once, when a run has been validated, of a metric that no run has."""
        if not self._has_checked_metric and row.metrics:
            self._has_checked_metric = True
            if (problem := self._sweep.unknown_metric) is not None:
                logger.warning("--metric: %s", problem)

    def _prune(self, folder: Path) -> None:
        logger.info("%s: pruned, because it is worse than the median of the others", self._titles[folder])
        try:
            cancel([folder])
        except LinnaeusError as error:  # it trains to its end, which does no harm
            logger.warning("%s: cannot be ended: %s", self._titles[folder], error)

    def _start(self, jobs: dict[Path, Job]) -> bool:
        """Start as many runs as there is room for; returns whether there were any."""
        room = self._launcher.room(jobs.values())
        if self._limit is not None:
            room = min(room, self._limit - len(self._active))
        if self._num_left:
            for planned in self._source.more(room - len(self._waiting)):
                self._add(planned)
                self._waiting.append(planned.folder)
        count = 0 if self._stop.requested else max(min(room, len(self._waiting)), 0)
        if count:
            self._submit([self._waiting.popleft() for _ in range(count)], jobs)
        if self.lock is not None and self.nothing_to_start and all(map(self._is_launched, self._active)):
            self.lock.release()
        return bool(count)

    def _is_launched(self, folder: Path) -> bool:
        """Whether the launcher is known to have a run: it need not be submitted again."""
        job = self._rows[folder].job
        return job is not None and job.kind != "unknown"

    def _submit(self, folders: list[Path], jobs: dict[Path, Job]) -> None:
        """Give runs to the launcher. If it fails, those that it has started are active all the same."""
        earlier = {folder: prepare(folder, self._planned[folder].config) for folder in folders}
        tasks = [
            Task(folder, words_of(folder), 0.0 if outcome is None else outcome.seconds)
            for folder, outcome in earlier.items()
        ]
        try:
            self._launcher.submit(tasks, jobs.values())
            self._active += folders
        finally:
            started = active_jobs(folders)
            self._active += [folder for folder in started if folder not in self._active]
            for folder, job in started.items():
                self._rows[folder].job = job
            self._save()
        for folder, outcome in earlier.items():
            how = "started" if outcome is None else "resumed"
            if _is_on_slurm(folder):
                how = f"submitted as {started[folder].name}" if folder in started else "submitted"
            logger.info("%s: %s; output in %s", self._titles[folder], how, folder / OUTPUT)

    def _may_have_ended(self, folder: Path) -> bool:
        """Whether a run without a job has ended or was lost; False while its outcome may still come."""
        if read_outcome(folder) is not None:
            return True
        self._looks_without_job[folder] += 1
        # A run that was cancelled is interrupted, whatever comes.
        is_patient = _is_on_slurm(folder) and not self._stop.requested
        most = LOST_S / self._launcher.poll_s + 1 if is_patient else LOST_LOOKS
        return self._looks_without_job[folder] >= most

    def _end(self, row: Row) -> None:
        """Fill the row of a run that is not active any more, and say how it has ended."""
        row.outcome = outcome = read_outcome(row.folder) or lost_outcome(row.folder)
        del self._looks_without_job[row.folder]
        title = self._titles[row.folder]
        if outcome is None:
            self._submit_again(row.folder)
            return
        self._check_metric(row)
        self._source.record_end(row)
        if row.status == "finished":
            logger.info("%s: done in %.1f s%s", title, outcome.seconds, self._figure(row))
        elif not row.pruned and not (self._stop.requested and outcome.was_stopped):
            logger.info("%s: %s (exit code %d): %s", title, row.status, outcome.exit_code, outcome.reason)

    def _submit_again(self, folder: Path) -> None:
        """Let a run wait whose job was never accepted; without the lock, another sweep may do the same."""
        how = "the same command starts it"
        is_alone = self.lock is None or self.lock.is_held
        if is_alone and _is_on_slurm(folder) and not self._stop.requested:
            self._waiting.append(folder)
            how = "it is submitted again"
        logger.warning("%s: no job has it, and it has not begun; %s", self._titles[folder], how)

    def _continue_after_signal(self) -> bool:
        """End the runs, or leave them to themselves; returns whether to watch them to their ends."""
        self._stop.handle()
        self._waiting.clear()
        if not self._active:
            return False
        if any(map(_is_on_slurm, self._active)) and not self._may_cancel():
            return False
        self._cancel()
        return True

    def _cancel(self) -> None:
        """Ask the active runs to end; a warning says which cannot be asked."""
        try:
            cancel(self._active)
        except LinnaeusError as error:
            logger.warning("not every run has been asked to end: %s", error)

    def _may_cancel(self) -> bool:
        """Ask whether to cancel jobs; without a terminal, after SIGTERM or a second Ctrl-C they stay."""
        if self._stop.signals != [signal.SIGINT] or not sys.stdin.isatty():
            return False
        try:
            with handled((signal.SIGINT, signal.SIGTERM), signal.default_int_handler):
                answer = input(f"cancel {counted(len(self._active), 'job')}? [y/N] ")
            return answer.strip().lower() in ("y", "yes")
        except (KeyboardInterrupt, EOFError):
            return False

    def _describe(self) -> str:
        """The status line: the only active run with its last line, or the number of runs in each status."""
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


def _is_on_slurm(folder: Path) -> bool:
    """Whether SLURM has the run of a folder, or had it last."""
    return (read_record(folder) or {}).get("launcher") == "slurm"
