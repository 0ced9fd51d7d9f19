"""`linnaeus analyze`: argv -> options and configuration -> measurements -> files and tables."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from linnaeus.analysis.options import HELP, Options, read_command_line
from linnaeus.config.load import to_yaml
from linnaeus.errors import ConfigError, LinnaeusError
from linnaeus.files import write_text_atomically

EXIT_INTERRUPTED = 130
FAREWELL_S = 3.0
"""How long other ranks leave rank 0 to say what is wrong."""


def analyze(argv: Sequence[str]) -> int:
    """Run what the command line asks for.

    Args:
        argv: tokens after `analyze`.

    Returns:
        The exit code: 0 done, 2 configuration or option, 3 nothing fits, 130 interrupted, 1 anything else.
    """
    is_main = int(os.environ.get("RANK", "0")) == 0
    try:
        options, loaded = read_command_line(argv)
        if loaded.show_help or loaded.print_config:
            if is_main:
                print(HELP if loaded.show_help else to_yaml(loaded.config), end="")
            return 0
        _refuse_several_processes(argv)
        check_files(options)
    except ConfigError as error:
        if is_main:
            print(error, file=sys.stderr, flush=True)
        else:  # torchrun ends all ranks with the first one that leaves
            time.sleep(FAREWELL_S)
        return error.exit_code
    try:
        # Here and not above: torch takes seconds to import, and a misspelled option should not.
        from linnaeus.analysis.session import run_analysis

        return run_analysis(options, loaded.config)
    except LinnaeusError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _refuse_several_processes(argv: Sequence[str]) -> None:
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        raise ConfigError(
            "the analysis measures one device in one process; run it without torchrun: "
            f"python -m linnaeus.main analyze {shlex.join(argv)}".rstrip()
        )


def check_files(options: Options) -> None:
    """Make sure that the files can be written, before hours of measuring.

    Raises:
        ConfigError: names each file that cannot be written.
    """
    problems = [
        f"{name}: {path} cannot be written: {reason}; choose another file"
        for name, path in (("--output", options.output), ("--plot", options.plot))
        if path is not None and (reason := _why_not_writable(path)) is not None
    ]
    if problems:
        raise ConfigError(problems)


def _why_not_writable(path: Path) -> str | None:
    if path.is_dir():
        return "it is a folder"
    if path.exists() and not os.access(path, os.W_OK):
        return "it is write-protected"
    probe = path.with_name(f".{path.name}.writable")
    try:
        write_text_atomically(probe, "")
        probe.unlink()
    except OSError as error:
        return error.strerror
    return None
