"""`linnaeus compare`: runs side by side. Imports no pandas before the command line is known to be right."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from linnaeus.cli.parser import (
    CommandParser,
    Options,
    option,
    read_plot,
    read_table,
    unwritable,
)
from linnaeus.config.overrides import expanded
from linnaeus.runtime.errors import ConfigError
from linnaeus.runtime.files import CHECKPOINTS, LOGS, METRICS, RESULT, suggest_path
from linnaeus.runtime.run_folder import CLAIMS, RUN
from linnaeus.runtime.words import several

DESCRIPTION = """\
Shows trained runs side by side: differing keys, metrics and learning curves.

RUN is a run directory, a folder with runs such as a sweep's, or a pattern such as 'runs/lr*'.
"""
DETAILS = """\
Unfinished, interrupted and failed runs are shown with their metrics so far.

examples:
  linnaeus compare runs
  linnaeus compare runs/one runs/other --plot curves.png
  linnaeus compare 'runs/lr*' --metric loss --sort metric --output runs.csv

exit codes: 0 done, 1 a file cannot be written, 2 a folder or an option, 130 interrupted
"""
RUN_MARKERS = {METRICS, RESULT, RUN, CLAIMS, CHECKPOINTS}
"""A run has at least one of these. A folder with a user's `config.yaml` has none."""
_NOT_ENTERED = re.compile(rf"\.|{LOGS}$|{CHECKPOINTS}$|wandb$|__pycache__$")
"""Folders that hold no runs."""


@dataclass
class CompareOptions(Options):
    """Runs to compare, and the file of their metrics; `aside` are omitted runs."""

    metric: str | None = option(
        "validation metric to compare; default: top-1 of the finest level, or the loss",
        "NAME",
    )
    sort: str | None = option(
        "order of the rows: metric (best first), another metric, a configuration key, or a column such as "
        "effective_batch or training_s; -KEY reverses it; default: the order of the folders",
        "KEY",
    )
    output: Path | None = option("write the metrics as .json, .jsonl or .csv", "FILE", read_table)
    plot: Path | None = option("plot the learning curves as .png or .svg", "FILE", read_plot)
    aside: list[Path] = field(default_factory=list)


def read(argv: Sequence[str]) -> tuple[CompareOptions, list[Path]]:
    """Read the tokens after `compare`. Return the options and the run directories.

    Raises:
        ConfigError: lists all options and names that cannot be used.
    """
    options, names, problems = PARSER.words(argv)
    if not names and not problems:
        problems.append("RUN: is missing; name run directories, such as runs, or 'runs/lr*'")
    folders = find_runs(names, problems, options.aside)
    problems += unwritable({"--output": options.output, "--plot": options.plot})
    if problems:
        raise ConfigError(problems)
    return options, folders


def run(options: CompareOptions, folders: Sequence[Path]) -> int:
    """Read the runs, write the files and show the table. Return exit code 0.

    Raises:
        ConfigError: no run has the metric, or there is nothing to sort by.
    """
    from linnaeus.cli.plots import draw_runs
    from linnaeus.cli.runs import compared, read_run
    from linnaeus.runtime.console import make_console

    runs = compared([read_run(folder) for folder in folders], run_names(folders), options.metric)
    if runs.unknown_metric is not None:
        raise ConfigError(f"--metric: {runs.unknown_metric}")
    if options.sort is not None:
        runs.sort(options.sort)
    if options.aside:
        names = several([str(folder) for folder in options.aside])
        runs.notes.append(
            f"not shown, because later runs of the same name moved them aside: {names}; "
            "name their directories to compare them"
        )
    console = make_console()
    runs.show(console)
    if options.output is not None:
        runs.save(options.output)
        console.print(f"metrics: {options.output.resolve()}", soft_wrap=True)
    if options.plot is not None:
        draw_runs(runs, options.plot)
        console.print(f"picture: {options.plot.resolve()}", soft_wrap=True)
    return 0


def find_runs(names: Sequence[str], problems: list[str], aside: list[Path]) -> list[Path]:
    """The folders of runs, each once, in the order in which they were named; those inside one folder by name.

    Args:
        names: folders and patterns.
        problems: gets a sentence for each name that gives no run.
        aside: gets the runs that are left out: later runs of their names have moved them aside.
    """
    found: dict[Path, Path] = {}
    for name in names:
        path = Path(expanded(name))
        # Not `Path.glob`, which has no absolute patterns.
        folders = [path] if path.exists() else sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207
        runs = [run for folder in folders for run in _runs_in(Path(folder), aside)]
        for run in runs:
            found.setdefault(run.resolve(), run)
        if not folders:
            problems.append(f"RUN: {name}: no such folder{suggest_path(path)}")
        elif not runs:
            reason = f"no run in it (a folder with {METRICS}, {RESULT} or {CHECKPOINTS})"
            if aside:
                reason = f"only runs that were moved aside; name their folders, such as {aside[-1]}"
            problems.append(f"RUN: {name}: {reason}")
    return list(found.values())


def _runs_in(folder: Path, aside: list[Path]) -> Iterator[Path]:
    """Yield the folder itself if it is a run directory, else the runs below it, by name."""
    for name, inner, files in os.walk(folder):
        path = Path(name)
        if not RUN_MARKERS.isdisjoint([*inner, *files]):
            if path == folder:
                yield path
                return
            if _is_aside(path):
                aside.append(path)
            else:
                yield path
        inner[:] = sorted(each for each in inner if not _NOT_ENTERED.match(each))


def _is_aside(folder: Path) -> bool:
    """Return whether a run was moved aside: it is `NAME.1`, and by its configuration it was `NAME`."""
    name, _, number = folder.name.rpartition(".")
    if not (name and number.isdecimal()):
        return False
    from linnaeus.cli.runs import read_run

    return (read_run(folder).config or {}).get("EXPERIMENT.NAME") == name


def run_names(folders: Sequence[Path]) -> list[str]:
    """Return names that tell runs apart: their paths below the folder that all have in common."""
    paths = [folder.resolve() for folder in folders]
    common = os.path.commonpath([path.parent for path in paths])
    return [str(path.relative_to(common)) for path in paths]


PARSER = CommandParser(
    "compare", CompareOptions, words="RUN... [options]", description=DESCRIPTION, details=DETAILS
)
