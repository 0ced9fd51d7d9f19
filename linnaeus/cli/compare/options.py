"""The command line of `linnaeus compare`. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from linnaeus.cli.parser import CommandParser, check_files, read_plot, read_table
from linnaeus.errors import ConfigError

DESCRIPTION = """\
Puts trained runs side by side: what differs in their configurations, their metrics and learning curves.

RUN is the folder of a run, a folder with runs below it such as a sweep's, or a pattern such as 'runs/lr*'.
"""
DETAILS = """\
Runs that are going on, were interrupted or have failed are shown with what they have measured so far.

examples:
  linnaeus compare runs
  linnaeus compare runs/one runs/other --plot curves.html
  linnaeus compare 'runs/lr*' --metric loss --sort metric --output runs.csv

exit codes: 0 done, 1 a file cannot be written, 2 a folder or an option, 130 interrupted
"""


@dataclass
class Options:
    """What is compared, and where the figures go.

    Attributes:
        metric: name of a validation metric; None for the one that decides which checkpoint is best.
        sort: what the rows are sorted by; None keeps the order of the folders.
        output: file for programs; its ending says the format.
        plot: picture.
    """

    metric: str | None = None
    sort: str | None = None
    output: Path | None = None
    plot: Path | None = None


def read(argv: Sequence[str]) -> str | tuple[Options, list[Path]]:
    """Read the tokens after `compare`: the help, or the options and the folders of the runs.

    Raises:
        ConfigError: lists every option and every name that cannot be used.
    """
    options = Options()
    taken = PARSER.words(argv, options)
    if taken is None:
        return PARSER.format_help()
    names, problems = taken
    if not names and not problems:
        problems.append("there is nothing to compare: name the folders of runs, such as runs, or 'runs/lr*'")
    # Here and not above: the shell's completion reads the options, and does not wait for OmegaConf and YAML.
    from linnaeus.cli.compare.folders import find_runs

    folders: list[Path] = []
    try:
        folders = find_runs(names)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    check_files({"--output": options.output, "--plot": options.plot})
    return options, folders


PARSER = CommandParser(
    "compare", words="RUN... [options]", description=DESCRIPTION, details=DETAILS, takes_overrides=False
)
PARSER.option(
    "--metric", "NAME", str,
    "validation metric that is compared; default: top-1 of the finest taxonomic rank, or the loss",
)  # fmt: skip
PARSER.option(
    "--sort", "KEY", str,
    "order of the rows: metric (best first), another metric, a configuration key, or a column such as "
    "effective_batch or training_s; -KEY reverses it; default: the order of the folders",
)  # fmt: skip
PARSER.option("--output", "FILE", read_table, "also write the figures: .json, .jsonl or .csv by its ending")
PARSER.option("--plot", "FILE", read_plot, "also draw a picture: .png, .svg or .html by its ending")
