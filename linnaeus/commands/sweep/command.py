"""`linnaeus sweep`: argv -> options and configurations -> runs -> files, table and picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from linnaeus.commands.entry import check_files, refuse_several_processes, run_command
from linnaeus.commands.sweep.options import HELP, CommandLine, read_command_line
from linnaeus.config.load import to_yaml


def sweep(argv: Sequence[str]) -> int:
    """Run what the command line asks for.

    Args:
        argv: tokens after `sweep`.

    Returns:
        The exit code: 0 all runs ended well, 1 some failed or anything else, 2 configuration or option, 130
        interrupted.
    """
    return run_command(partial(_prepare, argv))


def _prepare(argv: Sequence[str]) -> str | Callable[[], int]:
    line = read_command_line(argv)
    if line.show_help:
        return HELP
    if line.print_config:
        return "---\n".join(f"# {run.combination.title}\n{to_yaml(run.config)}" for run in line.runs)
    refuse_several_processes("sweep", "a sweep starts a process for each run by itself", argv)
    check_files({"--plot": line.options.plot})
    return partial(_run, line)


def _run(line: CommandLine) -> int:
    # Here and not above: the console's library takes a moment to import.
    from linnaeus.commands.sweep.session import run_sweep

    return run_sweep(line.options, line.runs)
