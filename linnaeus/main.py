"""The command line: `python -m linnaeus.main`, `python -m linnaeus.train` and `linnaeus`.

It trains, unless its first word is one of `COMMANDS`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from linnaeus.commands.analyze.command import analyze
from linnaeus.commands.entry import EXIT_INTERRUPTED
from linnaeus.commands.plan.command import plan
from linnaeus.commands.sweep.command import sweep
from linnaeus.config.help import help_text
from linnaeus.config.load import load_config, to_yaml
from linnaeus.errors import ConfigError, LinnaeusError

COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {"analyze": analyze, "sweep": sweep, "plan": plan}
"""What the first word may be. Each takes the tokens after it and gives the exit code."""


def cli(argv: Sequence[str] | None = None) -> int:
    """Run what the command line asks for.

    Args:
        argv: tokens after the program's name; the process's own by default.

    Returns:
        The exit code: 0 done, 2 configuration, 3 AutoBatch, 130 interrupted, 1 anything else.
    """
    tokens = list(sys.argv[1:] if argv is None else argv)
    if tokens and tokens[0] in COMMANDS:
        return COMMANDS[tokens[0]](tokens[1:])
    rank = int(os.environ.get("RANK", "0"))
    try:
        loaded = load_config(tokens)
        if loaded.show_help or loaded.print_config:
            if rank == 0:
                print(help_text() if loaded.show_help else to_yaml(loaded.config), end="")
            return 0
    except ConfigError as error:
        if rank == 0:  # every rank has read the same command line
            print(error, file=sys.stderr)
        return error.exit_code
    # Here and not above: torch takes seconds to import, and a misspelled key should not.
    from linnaeus.run import run

    try:
        return EXIT_INTERRUPTED if run(loaded.config).interrupted else 0
    except LinnaeusError as error:
        print(f"[rank {rank}] {error}" if "RANK" in os.environ else error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    raise SystemExit(cli())
