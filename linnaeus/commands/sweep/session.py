"""One sweep, from its runs to its files; and a look at one that another process has started."""

from __future__ import annotations

import json
import logging
import os
import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from rich.console import Console

from linnaeus.commands.sweep.folder import is_asked, locked
from linnaeus.commands.sweep.options import Options, PlannedRun
from linnaeus.commands.sweep.output import results_table
from linnaeus.commands.sweep.plot import save_plot
from linnaeus.commands.sweep.results import Row, Sweep
from linnaeus.commands.sweep.search import JOBS_ON_SLURM, Search
from linnaeus.commands.sweep.search_plot import save_search_plot
from linnaeus.commands.sweep.watch import Stop, Watch, words_of
from linnaeus.console import make_console
from linnaeus.errors import EXIT_INTERRUPTED
from linnaeus.launchers.interface import Launcher
from linnaeus.launchers.jobs import cancel_command, going, lost
from linnaeus.launchers.local import Local, Share, divide, visible_gpus
from linnaeus.launchers.outcome import OUTPUT, last_line, read_outcome
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
    """
    console = make_console()
    if options.status:
        return _show_status(options, runs, console)
    folder = runs[0].folder.parent
    if options.launch.dry_run:
        console.print(_dry_run(options, runs), markup=False, soft_wrap=True, end="")
        return 0
    sweep = Sweep([], options.metric)
    stop = Stop()
    set_up_logging(None, rank=0, console=console)
    try:
        launcher = _launcher(options, runs)
        with stop.listening(), ExitStack() as lock:
            _sign(lock.enter_context(locked(folder)))
            search = None if options.plan is None else Search(folder, options.plan)
            watch = Watch(
                sweep, runs if search is None else search.earlier(), launcher, stop, console,
                lambda: _save(sweep, folder), search, _num_at_once(options),
            )  # fmt: skip
            if isinstance(launcher, Slurm):
                if not watch.nothing_to_start:
                    launcher.check(len(runs) if search is None else 1)
                watch.when_started = lock.close  # the queue is SLURM's: any process may watch it
            watch.to_the_end()
        if sweep.rows:
            _report(options, sweep, folder, console)
        if search is not None and (best := search.best()) is not None:
            logger.info("best: %s", best)
    finally:
        close_logging()
    if stop.requested:
        return EXIT_INTERRUPTED
    return 0 if len(sweep.with_status("finished", "pruned")) == len(sweep.rows) else EXIT_SOME_FAILED


def _num_at_once(options: Options) -> int:
    """How many runs of a search go on at once."""
    return options.launch.jobs or (JOBS_ON_SLURM if options.launch.launcher == "slurm" else 1)


def _sign(lock: IO[str]) -> None:
    """Write into the lock of the sweep's folder who holds it."""
    lock.truncate(0)
    lock.write(f"{os.getpid()}\n")
    lock.flush()


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


def _dry_run(options: Options, runs: Sequence[PlannedRun]) -> str:
    """What would be started."""
    launcher = _launcher(options, runs)
    if isinstance(launcher, Slurm):
        return launcher.script(len(runs) if options.plan is None else 1)
    assert isinstance(launcher, Local)
    lines = []
    for number, planned in enumerate(runs):
        share = launcher.shares[number % len(launcher.shares)]
        env = [f"{name}={value}" for name, value in share.env().items()]
        lines.append(shlex.join([*env, *share.command(words_of(planned.folder))]))
    return "\n".join(lines) + "\n"


def _show_status(options: Options, runs: Sequence[PlannedRun], console: Console) -> int:
    """Show the table of a sweep as it is now; changes nothing."""
    if runs:
        sweep = Sweep([Row(run.combination.values, run.folder) for run in runs], options.metric)
        known = [row for row, run in zip(sweep.rows, runs, strict=True) if is_asked(run.folder, run.config)]
    else:
        written = json.loads((options.folder / "sweep.json").read_text(encoding="utf-8"))
        folders = [options.folder / Path(entry["folder"]).name for entry in written["runs"]]
        rows = [Row(entry["values"], path) for entry, path in zip(written["runs"], folders, strict=True)]
        sweep = Sweep(rows, options.metric)
        known = sweep.rows
        for row, entry in zip(rows, written["runs"], strict=True):
            row.pruned = entry["status"] == "pruned"
    jobs = going(row.folder for row in known)
    for row in known:
        row.job = jobs.get(row.folder)
        row.outcome = None if row.job is not None else read_outcome(row.folder) or lost(row.folder)
    _show(sweep, console)
    return 0


def _save(sweep: Sweep, folder: Path) -> None:
    for name in ("sweep.json", "sweep.csv") if sweep.rows else ():
        sweep.save(folder / name)


def _report(options: Options, sweep: Sweep, folder: Path, console: Console) -> None:
    """Write the files, then show the same figures."""
    plot = options.plot or folder / "sweep.png"
    _save(sweep, folder)
    if options.plan is None:
        save_plot(sweep, plot)
    else:
        smaller = sweep.metric.startswith("loss")
        save_search_plot(sweep, options.plan.space.axes, plot, smaller_is_better=smaller)
    if sweep.wanted_metric is not None and sweep.metrics and sweep.wanted_metric not in sweep.metrics:
        logger.warning("--metric: no run has %s; there are %s", sweep.wanted_metric, ", ".join(sweep.metrics))
    _show(sweep, console)
    logger.info("figures: %s and sweep.csv; picture: %s", folder.resolve() / "sweep.json", plot.resolve())
    if left := sweep.with_status("pending", "running", "unknown"):
        logger.info(
            "%s left to go on; the same command joins, linnaeus sweep --status %s looks, and %s cancels",
            counted(len(left), "run"), shlex.quote(str(folder)), cancel_command([row.folder for row in left]),
        )  # fmt: skip
    elif len(sweep.with_status("finished", "failed", "pruned")) < len(sweep.rows):
        logger.info("interrupted; the same command goes on")


def _show(sweep: Sweep, console: Console) -> None:
    """The table, and a line for each run that goes on or has not ended well."""
    console.print(results_table(sweep))
    for row in sweep.rows:
        text = ""
        if row.job is not None:
            text = ": ".join(part for part in (row.job.name, row.job.reason, last_line(row.folder)) if part)
        elif row.outcome is not None and row.outcome.reason is not None and not row.pruned:
            text = f"{row.outcome.reason} ({row.folder / OUTPUT})"
        if text:
            console.print(f"{row.status}: {row.title}: {text}", markup=False, soft_wrap=True)
