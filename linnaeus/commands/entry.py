"""From the words of a command to its exit code; mistakes are answered before torch is imported."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from linnaeus.errors import ConfigError, LinnaeusError
from linnaeus.files import write_text_atomically

EXIT_INTERRUPTED = 130
FAREWELL_S = 3.0
"""How long other ranks leave rank 0 to say what is wrong."""


def run_command(prepare: Callable[[], str | Callable[[], int]]) -> int:
    """Prepare a command, then do its work.

    Args:
        prepare: checks everything that can be checked before the work; gives a text to print, such as help,
            or the work, whose result is the exit code.

    Returns:
        The exit code: 0 done, 2 configuration or option, 3 nothing fits, 130 interrupted, 1 anything else.
    """
    is_main = int(os.environ.get("RANK", "0")) == 0
    try:
        prepared = prepare()
        if isinstance(prepared, str):
            if is_main:
                print(prepared, end="")
            return 0
    except ConfigError as error:
        if is_main:
            print(error, file=sys.stderr, flush=True)
        else:  # torchrun ends all ranks with the first one that leaves
            time.sleep(FAREWELL_S)
        return error.exit_code
    try:
        return prepared()
    except LinnaeusError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def refuse_several_processes(command: str, reason: str, argv: Sequence[str]) -> None:
    """Make sure that this is no rank of torchrun.

    Args:
        command: the word after `linnaeus`.
        reason: why there can be one process only.
        argv: the tokens after the command.

    Raises:
        ConfigError: says how to run it instead.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        raise ConfigError(
            f"{reason}; run it without torchrun: "
            f"python -m linnaeus.main {command} {shlex.join(argv)}".rstrip()
        )


def check_files(files: Mapping[str, Path | None]) -> None:
    """Make sure that files can be written, before hours of work.

    Args:
        files: by the option that names them.

    Raises:
        ConfigError: names each file that cannot be written.
    """
    problems = [
        f"{name}: {path} cannot be written: {reason}; choose another file"
        for name, path in files.items()
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
