"""One sweep, from its runs to its files."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from rich.console import Console

from linnaeus.commands.compare.output import results_table
from linnaeus.commands.compare.plot import save_plot
from linnaeus.commands.sweep.folder import OUTPUT, Outcome, prepare, read_result, save_outcome
from linnaeus.commands.sweep.options import Options, PlannedRun
from linnaeus.commands.sweep.process import Stop, last_line, locked, reason_of, run_in_child
from linnaeus.commands.sweep.results import Row, Sweep
from linnaeus.console import StatusLine, make_console
from linnaeus.errors import EXIT_INTERRUPTED
from linnaeus.log import close_logging, set_up_logging

EXIT_SOME_FAILED = 1
logger = logging.getLogger("linnaeus.sweep")


def run(options: Options, runs: Sequence[PlannedRun]) -> int:
    """Run the runs that have not finished, write the files and show the table.

    Returns:
        The exit code: 0 all ended well, 1 some failed, 130 interrupted.

    Raises:
        ConfigError: the folder cannot be written to, or another sweep uses it.
        AutoBatchError: for some runs nothing is predicted to fit.
    """
    folder = runs[0].folder.parent
    console = make_console()
    sweep = Sweep([Row(run.combination.values, run.folder) for run in runs], options.metric)
    stop = Stop()
    set_up_logging(None, rank=0, console=console)
    try:
        if options.predict_gpu:
            # Here and not above: a sweep that predicts nothing does without torch.
            from linnaeus.commands.sweep.predict import check_predictions

            check_predictions(runs, options.predict_gpu, console)
        with locked(folder) as lock, stop.listening():
            for number, (planned, row) in enumerate(zip(runs, sweep.rows, strict=True), start=1):
                if stop.requested:
                    break
                title = f"run {number} of {len(runs)}, {row.title}"
                _train(planned, row, title, sweep.wanted_metric, stop, lock, console)
                _save(sweep, folder)
            _report(sweep, folder, options.plot or folder / "sweep.png", console)
    finally:
        close_logging()
    if stop.requested:
        return EXIT_INTERRUPTED
    return EXIT_SOME_FAILED if sweep.with_status("failed") else 0


def _train(
    planned: PlannedRun, row: Row, title: str, metric: str | None, stop: Stop, lock: IO[str], console: Console
) -> None:
    """Train one run to its end, unless an earlier sweep has done so."""
    folder = planned.folder
    earlier = prepare(folder, planned.config)
    if earlier is not None and earlier.finished:
        row.outcome = earlier
        logger.info("%s: has ended well before%s", title, _figure(row, metric))
        return
    logger.info("%s: %s; output in %s", title, "going on" if earlier else "started", folder / OUTPUT)
    began = time.monotonic()
    with StatusLine(console) as line:
        line.update(lambda: f"{title}: {last_line(folder)}")
        exit_code = run_in_child(folder, stop, lock)
    if stop.requested and exit_code != 0:
        exit_code = EXIT_INTERRUPTED  # a run that was stopped may also end by the signal
    seconds = time.monotonic() - began + (earlier.seconds if earlier is not None else 0)
    result = read_result(folder) if exit_code == 0 else None
    reason = reason_of(folder, exit_code)
    if exit_code == 0 and result is None:
        reason = "ended without result.json"
    row.outcome = Outcome(exit_code, round(seconds, 3), reason, result)
    row.stopped = stop.requested and not row.outcome.finished
    save_outcome(folder, row.outcome)
    if row.outcome.finished:
        logger.info("%s: done in %.1f s%s", title, row.outcome.seconds, _figure(row, metric))
    elif not row.stopped:
        logger.info("%s: failed (exit code %d): %s", title, exit_code, row.outcome.reason)


def _figure(row: Row, metric: str | None) -> str:
    name = Sweep([row], metric).metric
    value = row.value(name)
    return "" if value is None else f", {name} {value:.4f}"


def _save(sweep: Sweep, folder: Path) -> None:
    for name in ("sweep.json", "sweep.csv"):
        sweep.save(folder / name)


def _report(sweep: Sweep, folder: Path, plot: Path, console: Console) -> None:
    """Write the files, then show the same figures."""
    _save(sweep, folder)
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
