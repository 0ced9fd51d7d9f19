"""The command line: `python -m linnaeus.main`, `python -m linnaeus.train` and `linnaeus`.

Its first word may be one of `COMMANDS`; without such a word it trains. Each command is a package of
`linnaeus.cli`:

* `options.read(argv)` checks the words after the command. It returns a text to print, such as the help, or
  the arguments of `session.run`. It does not import torch, so that mistakes are reported at once.
* `session.run(*arguments)` does the work and returns the exit code.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

if find_spec("omegaconf") is None:
    raise SystemExit("linnaeus: training needs more than the search: pip install 'linnaeus[train]'")

from linnaeus import __version__
from linnaeus.config.keys import suggest
from linnaeus.config.schema import Config
from linnaeus.errors import EXIT_INTERRUPTED, ConfigError, LinnaeusError
from linnaeus.launchers.options import LaunchOptions, split_launch_options
from linnaeus.signals import Interrupted

COMMANDS = {
    "train": "",
    "analyze": "the analysis measures one device in one process",
    "plan": "sizes are timed on one device in one process (see --world-size)",
    "sweep": "a sweep starts a process for each run by itself",
    "compare": "a comparison reads files in one process",
    "evaluate": "",
    "predict": "prediction runs on one device in one process",
    "export": "an export is written by one process",
}
"""The commands, each with the reason why torchrun cannot run it; empty where it can."""
MULTIRUN = ("-m", "--multirun")
"""Hydra's names for a sweep."""
COMPLETION = ("--complete", "--show-completion", "--install-completion")
"""First words for the shell's completion."""
LEAVE_AFTER_S = 3.0
"""How long other ranks wait before they leave, so that rank 0 can say what is wrong."""


def cli(argv: Sequence[str] | None = None) -> int:
    """Run what the command line asks for.

    Args:
        argv: tokens after the program's name; the process's own by default.

    Returns:
        The exit code: 0 done, 2 configuration or option, 3 no batch size fits, or training ran out of
        memory, 130 interrupted (128 and the number of another signal), 1 anything else.
    """
    tokens = list(sys.argv[1:] if argv is None else argv)
    command, rest = _split(tokens)
    launch = LaunchOptions()
    rank = os.environ.get("RANK") if "WORLD_SIZE" in os.environ else None  # torchrun sets both
    is_main = rank in (None, "0")
    try:
        if command not in ("sweep", "completion"):  # a sweep has these options for its runs
            launch, rest = _take_launch_options(rest)
        request = _read(command, rest)
        if isinstance(request, str):
            if is_main:
                print(request, end="")
            return 0
        reason = COMMANDS.get(command, "")
        if launch.launcher == "slurm":
            reason = "a job of SLURM starts torchrun by itself"
        if reason and rank is not None:
            remedy = f"run it without torchrun: python -m linnaeus.main {shlex.join(tokens)}"
            raise ConfigError(f"{reason}; {remedy}")
    except ConfigError as error:  # every rank has read the same command line
        if is_main:
            print(error, file=sys.stderr, flush=True)
        else:  # torchrun ends all ranks with the first one that leaves
            time.sleep(LEAVE_AFTER_S)
        return error.exit_code
    try:
        if launch.launcher == "slurm":
            print(_submit(launch, command, rest, request), end="")
            return 0
        exit_code: int = import_module(f"linnaeus.cli.{command}.session").run(*request)
        return exit_code
    except LinnaeusError as error:
        print(error if rank is None else f"[rank {rank}] {error}", file=sys.stderr)
        return error.exit_code
    except Interrupted as interruption:
        print(interruption, file=sys.stderr)
        return interruption.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def console() -> int:
    """The script `linnaeus`: what `cli` does, but without any argument it prints the help."""
    return cli(sys.argv[1:] or ["--help"])


def _split(tokens: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The package in `linnaeus.cli`, and its own tokens."""
    if tokens and tokens[0].partition("=")[0] in COMPLETION:
        return "completion", tokens
    command, rest = (tokens[0], tokens[1:]) if tokens and tokens[0] in COMMANDS else ("train", tokens)
    if command in ("train", "sweep") and any(token in MULTIRUN for token in rest):
        return "sweep", [token for token in rest if token not in MULTIRUN]
    return command, rest


def _read(command: str, tokens: Sequence[str]) -> str | tuple[object, ...]:
    if "--version" in tokens and command != "completion":
        return f"linnaeus {__version__}\n"
    if command == "train" and not {"-h", "--help"}.intersection(tokens):
        _check_first_word(tokens)
    request: str | tuple[object, ...] = import_module(f"linnaeus.cli.{command}.options").read(tokens)
    return request


def _take_launch_options(tokens: Sequence[str]) -> tuple[LaunchOptions, Sequence[str]]:
    """The options that say where a single command runs, and the other words.

    Raises:
        ConfigError: an option that cannot be used.
    """
    launch, rest, problems = split_launch_options(tokens)
    if launch.jobs is not None:
        problems.append("--jobs: is for linnaeus sweep, which has several runs")
    if launch.dry_run and launch.launcher == "local":
        problems.append("--dry-run: shows the script of a job: give --launcher slurm too")
    if problems:
        raise ConfigError(problems)
    return launch, rest


def _submit(launch: LaunchOptions, command: str, words: Sequence[str], request: tuple[object, ...]) -> str:
    """Submit the command as a job; a run of `train` goes on where it was when its job is queued again."""
    from linnaeus.launchers.slurm import submit_command

    folder = None
    if command == "train":
        [config] = request
        assert isinstance(config, Config)
        folder = Path(config.EXPERIMENT.OUTPUT_DIR) / config.EXPERIMENT.NAME
    return submit_command(launch, command, words, not COMMANDS[command], folder)


def _check_first_word(tokens: Sequence[str]) -> None:
    """A first word that is like a command's must not be taken for a mistake among the keys.

    Raises:
        ConfigError: it is neither a command nor the name of a preset group; or a command comes later.
    """
    from linnaeus.config.overrides import parse_command_line

    late = [word for word in parse_command_line(tokens).stray if word in COMMANDS]
    if late and late[0] != tokens[0]:
        others = [token for token in tokens if token != late[0]]
        raise ConfigError(f"{late[0]!r}: the command comes first: linnaeus {late[0]} {shlex.join(others)}")
    word = tokens[0] if tokens else ""
    if not re.fullmatch(r"[A-Za-z][A-Za-z_-]*", word) or word.isupper():
        return
    from linnaeus.config.presets import available

    if word not in available():
        hint = suggest(word.lower(), COMMANDS)
        raise ConfigError(
            f"{word!r}: no such command{hint}; commands are {', '.join(COMMANDS)}; "
            "settings are KEY VALUE, KEY=VALUE and group=preset"
        )


if __name__ == "__main__":
    raise SystemExit(cli())
