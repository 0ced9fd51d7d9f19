"""From the words of a command line to an exit code.

The first word may be one of `COMMANDS`; without such a word Linnaeus trains. A command is a module of
`linnaeus.cli`, or a folder with `options` and `session`, that has

* `PARSER`: its options.
* `read(argv)`: checks the words after the command, without torch, so that mistakes are reported at once. It
  returns a text to print, such as the configuration, or the arguments of `run`, the options first.
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
from pathlib import Path
from typing import Any

if find_spec("omegaconf") is None:
    raise SystemExit("linnaeus: training needs more than the search: pip install 'linnaeus[train]'")

from linnaeus import __version__
from linnaeus.config.keys import suggest
from linnaeus.runtime.errors import EXIT_INTERRUPTED, ConfigError, LinnaeusError
from linnaeus.runtime.signals import Interrupted, end_with_torchrun, leaving_at_once

COMMANDS = {
    "train": "train; the word may be left out, but `linnaeus` alone prints this text",
    "check-data": "reads all images once, and names the damaged ones",
    "analyze": "memory, batch size and speed before a run",
    "sweep": "a run for each combination of values, compared",
    "work": "takes runs of a sweep, here or on another machine",
    "compare": "runs side by side: what differs, metrics and learning curves",
    "evaluate": "a trained run on labelled data: accuracy per level and class, calibration",
    "predict": "classes of images, by a trained run",
    "average": "the last checkpoints of a run, averaged to one",
    "export": "a trained run as a safetensors, ONNX or torch.export file",
}
"""The commands, each with what it does."""
NOT_WITH_TORCHRUN = (
    "check-data",
    "analyze",
    "sweep",
    "work",
    "compare",
    "predict",
    "average",
    "export",
)
"""Commands of one process; sweeps and workers start those of their runs."""
MULTIRUN = ("-m", "--multirun")
"""Hydra's names for a sweep."""
GONE = {"plan": "is gone; give `linnaeus analyze --variants bf16,compile`"}
"""Commands of earlier versions, and what to do instead."""
LEAVE_AFTER_S = 3.0
"""How long other ranks wait before they leave, so that rank 0 can say what is wrong."""


def cli(argv: Sequence[str] | None = None) -> int:
    """Run what the command line asks for, by default that of the process.

    Returns:
        The exit code: 0 done, 2 configuration or option, 3 no batch size fits, or training ran out of
        memory, 130 interrupted (128 and the number of another signal), 1 anything else.
    """
    end_with_torchrun()
    # Pillow warns of odd files with a line of its source; errors name the file.
    warnings.filterwarnings("ignore", module=r"PIL\.")
    tokens = list(sys.argv[1:] if argv is None else argv)
    rank = os.environ.get("RANK") if "WORLD_SIZE" in os.environ else None  # torchrun sets both
    is_main = rank in (None, "0")
    try:
        command, rest = _split(tokens)
        options = {*rest[: rest.index("--")]} if "--" in rest else {*rest}
        if "--version" in tokens:
            request: Any = f"linnaeus {__version__}\n"
        elif {"-h", "--help"} & options:
            request = part_of(command, "PARSER").format_help()
        else:
            with leaving_at_once():  # OmegaConf makes another error of the exception
                request = part_of(command, "read")(rest)
        if isinstance(request, str):
            if is_main:
                print(request, end="")
            return 0
        launch = request[0].launch
        submits = launch.launcher == "slurm" and command not in (
            "sweep",
            "work",
        )  # which submit workers
        if rank is not None and (submits or command in NOT_WITH_TORCHRUN):
            raise ConfigError(
                f"torchrun: {command} takes no ranks from it; run it alone: linnaeus {shlex.join(tokens)}"
            )
    except ConfigError as error:  # every rank has read the same command line
        if is_main:
            print(error, file=sys.stderr, flush=True)
        else:  # torchrun ends all ranks with the first one that leaves
            time.sleep(LEAVE_AFTER_S)
        return error.exit_code
    except KeyboardInterrupt:
        return _interrupted()
    try:
        if submits:
            from linnaeus.sweep.slurm import submit_command

            folder = None  # a run of `train` resumes in its folder when the job is queued again
            if command == "train":
                folder = request[1].EXPERIMENT.folder
            print(
                submit_command(
                    launch, command, launch.argv, command not in NOT_WITH_TORCHRUN, folder
                ),
                end="",
            )
            return 0
        with leaving_at_once():  # torch may be imported
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
    """Say that Ctrl-C has ended the command; returns the exit code."""
    print("interrupted by Ctrl-C", file=sys.stderr, flush=True)
    return EXIT_INTERRUPTED


def console(*command: str) -> int:
    """Entry point of `linnaeus` and of `tools/`, which pass their command.

    Prints help without arguments and adds the current directory to `sys.path`.
    """
    if "_ARGCOMPLETE" in os.environ:  # the shell asks what may stand at the cursor
        word = [*os.environ.get("COMP_LINE", "").split(), "", ""][1]
        part_of(word if word in COMMANDS else "train", "PARSER").complete(COMMANDS)
    if not sys.flags.safe_path:  # PYTHONSAFEPATH
        with suppress(FileNotFoundError):  # the folder was deleted
            sys.path.insert(0, str(Path.cwd()))
    return cli([*command, *sys.argv[1:]] or ["--help"])


def part_of(command: str, name: str) -> Any:
    """`PARSER`, `read` or `run` of a command."""
    module = import_module(f"linnaeus.cli.{command.replace('-', '_')}")
    if not hasattr(module, name):
        module = import_module(f"{module.__name__}.{'session' if name == 'run' else 'options'}")
    return getattr(module, name)


def _split(tokens: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The command and its own tokens.

    Raises:
        ConfigError: the first word is like a command's, and a mistake; or the command comes later.
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
    if word in GONE:
        raise ConfigError(f"{word!r}: {GONE[word]}")
    if is_name and word not in ("train", *available()):
        meaning = alias(word)
        raise ConfigError(
            f"{word!r}: {meaning}"
            if meaning
            else f"{word!r}: no such command{suggest(word.lower(), COMMANDS)}; commands are "
            f"{', '.join(COMMANDS)}; settings are KEY VALUE, KEY=VALUE and group=preset"
        )
    return command, rest
