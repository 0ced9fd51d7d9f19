"""One comparison, from the folders of runs to its table and files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from linnaeus.commands.compare.folders import run_names
from linnaeus.commands.compare.options import Options
from linnaeus.commands.compare.order import sort_rows
from linnaeus.commands.compare.output import print_runs
from linnaeus.commands.compare.plot import save_plot
from linnaeus.commands.compare.results import compared
from linnaeus.commands.compare.runs import read_runs
from linnaeus.config.keys import suggest
from linnaeus.console import make_console
from linnaeus.errors import ConfigError


def run(options: Options, folders: Sequence[Path]) -> int:
    """Read the runs, write the files and show the table; returns the exit code 0.

    Raises:
        ConfigError: no run has the metric, or there is nothing to sort by.
    """
    runs = compared(read_runs(folders), run_names(folders), options.metric)
    wanted = options.metric
    if wanted is not None and wanted not in runs.metrics:
        known = ", ".join(runs.metrics) or "none yet: no run has been validated"
        raise ConfigError(
            f"--metric: no run has {wanted!r}{suggest(wanted, runs.metrics)}; there are {known}"
        )
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
