"""One comparison, from the folders of runs to its table and files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from linnaeus.cli.compare.differences import short_names
from linnaeus.cli.compare.folders import natural, run_names
from linnaeus.cli.compare.history import is_smaller_better
from linnaeus.cli.compare.options import Options
from linnaeus.cli.compare.output import print_runs
from linnaeus.cli.compare.plot import save_plot
from linnaeus.cli.compare.results import Comparison, Row, compared
from linnaeus.cli.compare.runs import read_runs
from linnaeus.config.keys import suggest
from linnaeus.console import make_console
from linnaeus.errors import ConfigError

METRIC = "metric"
"""Stands for the metric that is compared."""
_COLUMNS = (
    "run", "status", "epoch", "batch_size", "effective_batch", "learning_rate", "training_s", "images_per_s",
)  # fmt: skip


def run(options: Options, folders: Sequence[Path]) -> int:
    """Read the runs, write the files and show the table; returns the exit code 0.

    Raises:
        ConfigError: no run has the metric, or there is nothing to sort by.
    """
    runs = compared(read_runs(folders), run_names(folders), options.metric)
    if runs.unknown_metric is not None:
        raise ConfigError(f"--metric: {runs.unknown_metric}")
    if options.sort is not None:
        sort_rows(runs, options.sort)
    console = make_console()
    print_runs(runs, console)
    if options.output is not None:
        runs.save(options.output)
        console.print(f"figures: {options.output.resolve()}", markup=False, soft_wrap=True)
    if options.plot is not None:
        save_plot(runs, options.plot)
        console.print(f"picture: {options.plot.resolve()}", markup=False, soft_wrap=True)
    return 0


def sort_rows(runs: Comparison, key: str) -> None:
    """Sort the rows: by a metric from its best value to the worst, by anything else ascending.

    Rows without a value come last. A `-` before the key reverses the others.

    Raises:
        ConfigError: there is no such key; the message names those that there are.
    """
    name, is_reversed = key.removeprefix("-"), key.startswith("-")
    name = runs.metric if name == METRIC else name
    short = {short: full for full, short in short_names(runs.keys).items()}
    known = [*runs.metrics, *_COLUMNS, *runs.keys]
    if name not in known and name not in short:
        raise ConfigError(
            f"--sort: {name!r} is neither a metric, nor a column, nor a key in which the runs differ"
            f"{suggest(name, [*known, *short])}; there are {', '.join([METRIC, *known])}"
        )
    name = name if name in known else short[name]
    sign = -1 if name in runs.metrics and not is_smaller_better(name) else 1

    def value(row: Row) -> Any:
        if name in runs.metrics:
            best = row.history.best(name)
            return row.value(name) if best is None else best.value
        return row.scalars([]).get(name)

    with_value = [row for row in runs.rows if value(row) not in (None, "")]
    without = [row for row in runs.rows if value(row) in (None, "")]
    with_value.sort(key=lambda row: _sort_key(value(row), sign), reverse=is_reversed)
    runs.rows = [*with_value, *without]


def _sort_key(value: Any, sign: int) -> Any:
    """Numbers before texts; a text that is a number counts as one."""
    try:
        return 0, sign * float(value), ()
    except (TypeError, ValueError):
        return 1, 0.0, natural(value)
