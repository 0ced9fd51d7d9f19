"""`linnaeus plan`: argv -> options and configuration -> timings -> files and table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from linnaeus.commands.entry import check_files, refuse_several_processes, run_command
from linnaeus.commands.plan.options import HELP, Options, read_options
from linnaeus.config.load import to_yaml
from linnaeus.config.schema import Config


def plan(argv: Sequence[str]) -> int:
    """Run what the command line asks for.

    Args:
        argv: tokens after `plan`.

    Returns:
        The exit code: 0 done, 2 configuration or option, 3 nothing fits, 130 interrupted, 1 anything else.
    """
    return run_command(partial(_prepare, argv))


def _prepare(argv: Sequence[str]) -> str | Callable[[], int]:
    options, loaded = read_options(argv)
    if loaded.show_help or loaded.print_config:
        return HELP if loaded.show_help else to_yaml(loaded.config)
    refuse_several_processes("plan", "sizes are timed on one device in one process (see --world-size)", argv)
    check_files({"--output": options.output, "--plot": options.plot})
    return partial(_measure, options, loaded.config)


def _measure(options: Options, config: Config) -> int:
    # Here and not above: torch takes seconds to import, and a misspelled option should not.
    from linnaeus.commands.plan.session import run_plan

    return run_plan(options, config)
