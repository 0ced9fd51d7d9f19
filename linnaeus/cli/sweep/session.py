"""One sweep, from its runs to its files; and a look at one that another process has started."""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from linnaeus.cli.compare.runs import Comparison, Row, is_smaller_better, read_runs
from linnaeus.cli.compare.session import print_runs, save_plot
from linnaeus.cli.sweep.folder import is_asked, lock_folder
from linnaeus.cli.sweep.options import Options, PlannedRun
from linnaeus.cli.sweep.search import JOBS_ON_SLURM, Search
from linnaeus.cli.sweep.search_plot import save_search_plot
from linnaeus.cli.sweep.source import Source
from linnaeus.cli.sweep.stop import Stop
from linnaeus.cli.sweep.watch import Watch, words_of
from linnaeus.console import make_console
from linnaeus.errors import EXIT_INTERRUPTED, ConfigError, LinnaeusError
from linnaeus.files import STUDY, SWEEP, FolderLock
from linnaeus.launchers.interface import Launcher
from linnaeus.launchers.jobs import cancel_command
from linnaeus.launchers.local import Local, Share, divide, visible_gpus
from linnaeus.launchers.outcome import read_json
from linnaeus.launchers.slurm import Slurm
from linnaeus.launchers.slurm_job import SlurmJob
from linnaeus.log import close_logging, set_up_logging
from linnaeus.words import counted

EXIT_SOME_FAILED = 1
logger = logging.getLogger("linnaeus.sweep")


def run(options: Options, runs: Sequence[PlannedRun]) -> int:
    """Run the runs that have not finished, write the files and show the table.

    Returns:
        The exit code: 0 all ended well, 1 some did not, 130 interrupted.

    Raises:
        ConfigError: the folder cannot be written to, another sweep uses it, or sbatch refuses an option.
        AutoBatchError: for some runs nothing is predicted to fit.
    """
    console = make_console()
    if options.status:
        return _show_status(options, runs, console)
    if not options.launch.dry_run:  # which prints what a shell or sbatch reads
        set_up_logging(None, rank=0, console=console)
    try:
        launcher = _launcher(options, runs)
        if options.predict_gpu:
            # Here and not above: a sweep that predicts nothing does without torch.
            from linnaeus.cli.sweep.predict import check_predictions

            check_predictions(runs, options.predict_gpu, console, world_size=launcher.num_processes)
        if options.launch.dry_run:
            console.print(_dry_run(options, runs, launcher), markup=False, soft_wrap=True, end="")
            return 0
        stop = Stop()
        with stop.listening():
            sweep = _train(options, runs, launcher, stop, console)
    finally:
        close_logging()
    if stop.requested:
        return EXIT_INTERRUPTED
    ended_well = sweep.with_status("finished", "pruned")
    return 0 if ended_well and len(ended_well) == len(sweep.rows) else EXIT_SOME_FAILED


def _train(
    options: Options, runs: Sequence[PlannedRun], launcher: Launcher, stop: Stop, console: Console
) -> Comparison:
    """Run the runs that have not ended well, in a folder that no other sweep uses, and report."""
    folder = runs[0].folder.parent
    sweep = Comparison([], options.metric)
    lock = lock_folder(folder)
    files = _Files(sweep, folder, lock)
    try:
        is_new = options.plan is not None and not (folder / STUDY).exists()
        if is_new and isinstance(launcher, Slurm):
            launcher.check(1)  # before the study, which makes this the folder of a search
        search = None if options.plan is None else Search(folder, options.plan)
        watch = Watch(
            sweep, search or Source(runs), launcher, stop, console, files.save,
            None if search is None else _num_at_once(options),
        )  # fmt: skip
        watch.join()
        if isinstance(launcher, Slurm):
            if not watch.nothing_to_start and not is_new:
                launcher.check(1 if search else watch.num_waiting)
            if search is None:  # the queue is SLURM's: any process may watch it, but only one may search
                watch.lock = lock
        failure = _watch_to_the_end(watch, folder)
    finally:
        lock.release()
        with suppress(OSError):  # nothing has been started, and the folder is empty
            folder.rmdir()
    if sweep.rows:
        _report(options, sweep, files, console)
    if failure is not None:
        raise failure
    if search is not None and (best := search.best()) is not None:
        logger.info("best: %s", best)
    return sweep


def _watch_to_the_end(watch: Watch, folder: Path) -> LinnaeusError | None:
    """Start and watch the runs; returns why that cannot go on, although active runs do."""
    try:
        watch.to_the_end()
    except LinnaeusError as error:
        return error
    except OSError as error:  # a full disk, also where a search keeps its study
        return LinnaeusError(f"{folder}: the sweep cannot go on: {error}; the same command joins its runs")
    return None


def _num_at_once(options: Options) -> int:
    """How many runs of a search are active at once."""
    return options.launch.jobs or (JOBS_ON_SLURM if options.launch.launcher == "slurm" else 1)


def _launcher(options: Options, runs: Sequence[PlannedRun]) -> Launcher:
    launch = options.launch
    if launch.launcher == "slurm":
        folder = runs[0].folder.parent
        describe = SlurmJob(words_of(Path("RUN"))).describe()
        names = "\n".join(f"  {number}: {run.combination.title}" for number, run in enumerate(runs))
        if options.plan is not None:
            names = f"  up to {options.plan.num_trials}, one after another as the search asks for them"
        return Slurm(
            folder / "slurm", launch.slurm, folder.name, limit=launch.jobs,
            describe=f"Each job: {describe}\nRuns, but for those that have ended well:\n{names}",
        )  # fmt: skip
    if launch.jobs is None:
        return Local([Share()])
    is_cpu = all(run.config.EXPERIMENT.DEVICE == "cpu" for run in runs)
    gpus = [] if is_cpu else visible_gpus()
    cores = sorted(os.sched_getaffinity(0)) if launch.jobs > 1 else []
    shares = divide(launch.jobs, gpus, cores)
    logger.info("%s at once, each with its share: %s", counted(launch.jobs, "run"), _listed(shares))
    if 0 < len(gpus) < launch.jobs:
        logger.warning(
            "--jobs: %d runs share %s; what one takes is not free for the others, so give AutoBatch a limit "
            "(DATA.AUTOBATCH.MEMORY_LIMIT_GB) or start fewer", launch.jobs, counted(len(gpus), "GPU"),
        )  # fmt: skip
    return Local(shares)


def _listed(shares: Sequence[Share]) -> str:
    return " | ".join(map(str, shares))


def _dry_run(options: Options, runs: Sequence[PlannedRun], launcher: Launcher) -> str:
    """What would be started."""
    if isinstance(launcher, Slurm):
        return launcher.dry_run(len(runs) if options.plan is None else 1)
    assert isinstance(launcher, Local)
    lines = [f"# {counted(len(launcher.shares), 'run')} at once: {_listed(launcher.shares)}"]
    lines.append("# each reads asked.yaml, which is written when the run starts")
    if options.plan is not None:
        lines.append("# such as these; the search chooses the values")
    for number, planned in enumerate(runs):
        share = launcher.shares[number % len(launcher.shares)]
        env = [f"{name}={value}" for name, value in share.env().items()]
        lines.append(shlex.join([*env, *share.command(words_of(planned.folder))]))
    return "\n".join(lines) + "\n"


def _show_status(options: Options, runs: Sequence[PlannedRun], console: Console) -> int:
    """Show the table of a sweep as it is now; changes nothing."""
    if runs:
        values = {run.folder: run.combination.values for run in runs}
        begun = [run.folder for run in runs if is_asked(run.folder, run.config)]
    else:
        values = _saved_values(options.folder)
        begun = [folder for folder in values if folder.exists()]
    known = dict(zip(begun, read_runs(begun), strict=True))
    rows = [replace(known.get(folder, Row({}, folder)), values=values[folder]) for folder in values]
    print_runs(Comparison(rows, options.metric), console)
    return 0


def _saved_values(folder: Path) -> dict[Path, dict[str, str]]:
    """The values of each run of a sweep, by its folder, as `sweep.json` has them.

    Raises:
        ConfigError: it has none, or is damaged.
    """
    try:
        entries = (read_json(folder / SWEEP) or {})["runs"]
        found = {folder / Path(entry["folder"]).name: dict(entry["values"]) for entry in entries}
    except (KeyError, TypeError, ValueError):
        found = {}
    is_text = all(isinstance(text, str) for values in found.values() for text in values.values())
    if not found or not is_text or len({tuple(values) for values in found.values()}) > 1:
        raise ConfigError(f"--status: {folder / SWEEP} holds no runs; give the command of the sweep instead")
    return found


class _Files:
    """The figures of a sweep in its folder. Runs go on where they cannot be written; that is said once.

    Once the lock is given back, the entries of another sweep that has written the files since are kept.
    """

    def __init__(self, sweep: Comparison, folder: Path, lock: FolderLock) -> None:
        self.sweep, self.folder, self._lock = sweep, folder, lock
        self._has_failed = False

    def save(self) -> bool:
        """Write the figures; returns whether they are written."""
        if not self.sweep.rows:
            return True
        others = [] if self._lock.is_held else self._rows_of_others()
        whole = replace(self.sweep, rows=[*self.sweep.rows, *others])
        try:
            for name in (SWEEP, "sweep.csv"):
                whole.save(self.folder / name)
        except (OSError, LinnaeusError) as error:  # a full disk
            if not self._has_failed:
                logger.warning("the figures cannot be written: %s; runs go on", error)
            self._has_failed = True
            return False
        self._has_failed = False
        return True

    def _rows_of_others(self) -> list[Row]:
        """The rows that are in the file, and not in this sweep."""
        values = {}
        with suppress(ConfigError):  # damaged, or deleted
            values = _saved_values(self.folder)
        own = {row.folder for row in self.sweep.rows}
        wanted = [f for f in values if f not in own and [*values[f]] == self.sweep.keys and f.exists()]
        return [replace(run, values=values[run.folder]) for run in read_runs(wanted)]


def _report(options: Options, sweep: Comparison, files: _Files, console: Console) -> None:
    """Show the figures, then write them to the files."""
    print_runs(sweep, console)
    if sweep.metrics and (problem := sweep.unknown_metric) is not None:
        logger.warning("--metric: %s", problem)
    folder = files.folder
    plot = options.plot or folder / "sweep.png"
    if files.save():
        logger.info("figures: %s and sweep.csv", folder.resolve() / SWEEP)
    try:
        if options.plan is None:
            save_plot(sweep, plot)
        else:
            smaller = is_smaller_better(sweep.metric)
            save_search_plot(sweep, options.plan.space.axes, plot, smaller_is_better=smaller)
        logger.info("picture: %s", plot.resolve())
    except (OSError, LinnaeusError) as error:  # a full disk
        logger.warning("the picture cannot be written: %s", error)
    if left := sweep.with_status("pending", "running", "unknown"):
        logger.info(
            "%s left to go on; the same command joins them, "
            "linnaeus sweep --status %s shows them, and %s cancels them",
            counted(len(left), "run"), shlex.quote(str(folder)), cancel_command([row.folder for row in left]),
        )  # fmt: skip
    elif len(sweep.with_status("finished", "failed", "pruned")) < len(sweep.rows):
        logger.info("interrupted; the same command goes on")
