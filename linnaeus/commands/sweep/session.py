"""One sweep, from its runs to its files. Building order is reading order."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from rich.console import Console

from linnaeus.commands.entry import EXIT_INTERRUPTED
from linnaeus.commands.sweep.folder import OUTPUT, Outcome, prepare, read_result, save_outcome
from linnaeus.commands.sweep.options import Options, Planned
from linnaeus.commands.sweep.output import results_table, save
from linnaeus.commands.sweep.process import Stop, reason_of, run_in_child, sole
from linnaeus.commands.sweep.results import Row, Sweep
from linnaeus.log import close_logging, make_console, set_up_logging

EXIT_SOME_FAILED = 1
logger = logging.getLogger("linnaeus.sweep")


def run_sweep(options: Options, runs: Sequence[Planned]) -> int:
    """Run what has not been run, write the files and show the table.

    Returns:
        The exit code: 0 all ended well, 1 some failed, 130 interrupted.

    Raises:
        ConfigError: the folder cannot be written to, or another sweep works in it.
    """
    folder = runs[0].folder.parent
    console = make_console()
    sweep = Sweep([Row(run.combination.values, run.folder) for run in runs], options.metric)
    stop = Stop()
    set_up_logging(None, rank=0, console=console)
    try:
        with sole(folder) as lock, stop.listening():
            for number, (run, row) in enumerate(zip(runs, sweep.rows, strict=True), start=1):
                if stop.requested:
                    break
                _do(run, row, f"run {number} of {len(runs)}, {row.title}", sweep.wanted_metric, stop, lock)
                save(sweep, folder)
            _report(sweep, folder, options.plot or folder / "sweep.png", console)
    finally:
        close_logging()
    if stop.requested:
        return EXIT_INTERRUPTED
    return EXIT_SOME_FAILED if sweep.with_status("failed") else 0


def _do(run: Planned, row: Row, title: str, metric: str | None, stop: Stop, lock: IO[str]) -> None:
    """Bring one run to its end, or find that it has come there before."""
    folder = run.folder
    earlier = prepare(folder, run.config)
    if earlier is not None and earlier.finished:
        row.outcome = earlier
        logger.info("%s: has ended well before%s", title, _figure(row, metric))
        return
    logger.info("%s: %s; output in %s", title, "going on" if earlier else "started", folder / OUTPUT)
    began = time.monotonic()
    exit_code = run_in_child(folder, stop, lock)
    if stop.requested and exit_code != 0:
        exit_code = EXIT_INTERRUPTED  # whatever the stop made of it
    seconds = time.monotonic() - began + (earlier.seconds if earlier is not None else 0)
    row.outcome = _outcome(folder, exit_code, round(seconds, 3))
    row.stopped = stop.requested and not row.outcome.finished
    save_outcome(folder, row.outcome)
    if row.outcome.finished:
        logger.info("%s: done in %.1f s%s", title, row.outcome.seconds, _figure(row, metric))
    elif not row.stopped:
        logger.info("%s: failed (exit code %d): %s", title, exit_code, row.outcome.reason)


def _outcome(folder: Path, exit_code: int, seconds: float) -> Outcome:
    result = read_result(folder) if exit_code == 0 else None
    reason = reason_of(folder, exit_code)
    if exit_code == 0 and result is None:
        reason = "ended without result.json"
    return Outcome(exit_code, seconds, reason, result)


def _figure(row: Row, metric: str | None) -> str:
    name = Sweep([row], metric).metric
    value = row.metric(name)
    return "" if value is None else f", {name} {value:.4f}"


def _report(sweep: Sweep, folder: Path, plot: Path, console: Console) -> None:
    """Write the files, then show the same figures."""
    # Here and not above: matplotlib takes a second to import.
    from linnaeus.commands.sweep.plot import save_plot

    save(sweep, folder)
    save_plot(sweep, plot)
    if sweep.wanted_metric is not None and sweep.metrics and sweep.wanted_metric not in sweep.metrics:
        logger.warning("--metric: no run has %s; there are %s", sweep.wanted_metric, ", ".join(sweep.metrics))
    console.print(results_table(sweep))
    for row in sweep.with_status("failed"):
        reason = row.outcome.reason if row.outcome is not None else ""
        console.print(f"failed: {row.title}: {reason} ({row.folder / OUTPUT})", markup=False, soft_wrap=True)
    logger.info("figures: %s and sweep.csv; picture: %s", folder.resolve() / "sweep.json", plot.resolve())
    if len(sweep.with_status("finished", "failed")) < len(sweep.rows):
        logger.info("interrupted; the same command goes on")
