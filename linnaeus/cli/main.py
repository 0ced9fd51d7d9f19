"""Run a command line and return its exit code.

The first word may be one of `COMMANDS`. Without a command, Linnaeus trains. A command is a module of
`linnaeus.cli`, or a folder with `options` and `session`. It has

* `PARSER`: its options.
* `read(argv)`: checks the words after the command without torch, so mistakes are reported at once. It returns
  a text to print, such as the configuration, or the arguments of `run`, options first.
* `run(*arguments)`: does the work and returns the exit code.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any

if find_spec("omegaconf") is None:
    raise SystemExit("linnaeus: training needs more than the search: pip install 'linnaeus[train]'")

from linnaeus import __version__
from linnaeus.config.keys import suggest
from linnaeus.runtime.errors import EXIT_INTERRUPTED, ConfigError, LinnaeusError
from linnaeus.runtime.signals import Interrupted, end_with_torchrun, leaving_at_once

COMMANDS = {
    "train": "train a model; the word is optional, but `linnaeus` alone prints this help",
    "check-data": "read all images once and name the damaged ones",
    "analyze": "measure memory, batch size and speed before a run",
    "sweep": "train once for each combination of values and compare the runs",
    "work": "train runs of a sweep, on this or another machine",
    "compare": "show runs side by side: different keys, metrics, learning curves",
    "evaluate": "evaluate a run on labeled data: accuracy per level and class, calibration",
    "predict": "predict the classes of images",
    "average": "average the last checkpoints of a run",
    "export": "write a run as a safetensors, ONNX or torch.export file",
}
"""The commands and their descriptions."""
WITH_TORCHRUN = ("train", "evaluate")
"""Commands that run on several ranks. Sweeps and workers start the ranks of their runs themselves."""
SUBMIT_WORKERS = ("sweep", "work")
"""Commands that submit jobs of their own with `--launcher slurm`."""
MULTIRUN = ("-m", "--multirun")
"""Hydra's names for a sweep."""
LEAVE_AFTER_S = 3.0
"""Seconds that other ranks wait before they exit, so that rank 0 can print the error."""


def cli(argv: Sequence[str] | None = None) -> int:
    """Run a command line, by default `sys.argv`.

    Returns:
        The exit code: 0 done, 2 configuration or option, 3 no batch size fits or out of memory, 130
        interrupted (in general 128 plus the signal's number), 1 any other error.
    """
    end_with_torchrun()
    # Pillow's warnings about odd files show a line of its source. Our errors name the file.
    warnings.filterwarnings("ignore", module=r"PIL\.")
    tokens = list(sys.argv[1:] if argv is None else argv)
    rank = os.environ.get("RANK") if "WORLD_SIZE" in os.environ else None  # torchrun sets both
    is_main = rank in (None, "0")
    try:
        command, rest = _split(tokens)
        if "--version" in tokens:
            request: Any = f"linnaeus {__version__}\n"
        elif {"-h", "--help"}.intersection(takewhile("--".__ne__, rest)):
            request = part_of(command, "PARSER").format_help()
        else:
            with leaving_at_once():  # OmegaConf turns KeyboardInterrupt into another error
                request = part_of(command, "read")(rest)
        if isinstance(request, str):
            if is_main:
                print(request, end="")
            return 0
        options = request[0]
        submits = options.launcher == "slurm" and command not in SUBMIT_WORKERS
        if rank is not None and (submits or command not in WITH_TORCHRUN):
            raise ConfigError(
                f"torchrun: {command} takes no ranks from it; run it alone: linnaeus {shlex.join(tokens)}"
            )
    except ConfigError as error:  # all ranks read the same command line
        if is_main:
            print(error, file=sys.stderr, flush=True)
        else:  # torchrun ends all ranks when the first one exits
            time.sleep(LEAVE_AFTER_S)
        return error.exit_code
    except KeyboardInterrupt:
        return _interrupted()
    try:
        if submits:
            from linnaeus.sweep.slurm import submit_command

            # A requeued job resumes the run of `train` in its run directory.
            folder = request[1].EXPERIMENT.folder if command == "train" else None
            submitted = submit_command(
                options.slurm,
                command,
                options.argv,
                command in WITH_TORCHRUN,
                folder,
                dry_run=options.dry_run,
            )
            print(submitted, end="")
            return 0
        with leaving_at_once():  # imports torch
            run = part_of(command, "run")
        exit_code: int = run(*request)
        return exit_code
    except LinnaeusError as error:
        print(error if rank is None else f"[rank {rank}] {error}", file=sys.stderr)
        return error.exit_code
    except Interrupted as interruption:
        print(interruption, file=sys.stderr)
        return interruption.exit_code
    except KeyboardInterrupt:
        return _interrupted()


def _interrupted() -> int:
    """Print that Ctrl-C ended the command and return the exit code."""
    print("interrupted by Ctrl-C", file=sys.stderr, flush=True)
    return EXIT_INTERRUPTED


def console(*command: str) -> int:
    """Entry point of `linnaeus` and of the scripts in `tools/`, which pass their command.

    Print help if there are no arguments, and add the current directory to `sys.path`.
    """
    if "_ARGCOMPLETE" in os.environ:  # the shell asks for completions
        word = [*os.environ.get("COMP_LINE", "").split(), "", ""][1]
        part_of(word if word in COMMANDS else "train", "PARSER").complete(COMMANDS)
    if not sys.flags.safe_path:  # PYTHONSAFEPATH
        with suppress(FileNotFoundError):  # the folder was deleted
            sys.path.insert(0, str(Path.cwd()))
    return cli([*command, *sys.argv[1:]] or ["--help"])


def part_of(command: str, name: str) -> Any:
    """Return `PARSER`, `read` or `run` of a command."""
    module = import_module(f"linnaeus.cli.{command.replace('-', '_')}")
    if not hasattr(module, name):
        module = import_module(f"{module.__name__}.{'session' if name == 'run' else 'options'}")
    return getattr(module, name)


def _split(tokens: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Return the command and its tokens.

    Raises:
        ConfigError: the first word is a misspelled command, or the command is not the first word.
    """
    command, rest = (
        (tokens[0], tokens[1:]) if tokens and tokens[0] in COMMANDS else ("train", tokens)
    )
    if command in ("train", "sweep") and any(token in MULTIRUN for token in rest):
        return "sweep", [token for token in rest if token not in MULTIRUN]
    if command != "train" or {"-h", "--help", "--version"}.intersection(tokens):
        return command, rest
    from linnaeus.config.aliases import alias
    from linnaeus.config.keys import available
    from linnaeus.config.overrides import parse_command_line

    late = [word for word in parse_command_line(rest).stray if word in COMMANDS]
    if late:
        raise ConfigError(
            f"{late[0]!r}: the command comes first: linnaeus {late[0]} ...; "
            f"linnaeus {late[0]} --help shows what may follow"
        )
    word = tokens[0] if tokens else ""
    is_name = re.fullmatch(r"[A-Za-z][A-Za-z_-]*", word) and not word.isupper()
    if is_name and word not in ("train", *available()):
        meaning = alias(word)
        raise ConfigError(
            f"{word!r}: {meaning}"
            if meaning
            else f"{word!r}: no such command{suggest(word.lower(), COMMANDS)}; commands are "
            f"{', '.join(COMMANDS)}; settings are KEY VALUE, KEY=VALUE and group=preset"
        )
    return command, rest
