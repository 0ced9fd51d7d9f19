"""Reads a command's options from a command line that also has overrides. Imports no torch."""

from __future__ import annotations

import argparse
import math
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from linnaeus.config.keys import suggest
from linnaeus.config.overrides import OPTIONS
from linnaeus.config.schema import Config
from linnaeus.errors import ConfigError
from linnaeus.files import temporary_name
from linnaeus.launchers.options import HELP as LAUNCH_HELP

AUTOBATCH = "DATA.AUTOBATCH"


class CommandParser(argparse.ArgumentParser):
    """The options of a command, and its help.

    Args:
        command: the word after `linnaeus`.
        description: what the command does.
        details: the end of the help: what else to know, examples, exit codes.
        tool: a script of the repository that does the same.
        print_config: help of `--print-config`.
        takes_run: whether the first word is a trained run, whose configuration takes the place of `--cfg`.
        takes_overrides: whether keys of the configuration may be set; else there is no configuration to print
            or to choose either.
        words: what stands beside the options, for the usage; None is what there is of the above.
    """

    def __init__(
        self, command: str, *, description: str, details: str, print_config: str = "",
        tool: str | None = None, takes_run: bool = False, takes_overrides: bool = True,
        words: str | None = None,
    ) -> None:  # fmt: skip
        if words is None:
            words = "[--cfg FILE] [options] [group=preset ...]" if not takes_run else "RUN [options]"
            words += " [KEY VALUE | KEY=VALUE ...]"
        usage = [
            f"linnaeus {command} {words}",
            f"python -m linnaeus.main {command} ...",
            *([] if tool is None else [f"python {tool} ..."]),
        ]
        super().__init__(
            usage="\n       ".join(usage),
            description=description,
            epilog=details,
            formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=24, width=110),
            argument_default=argparse.SUPPRESS,
            add_help=False,
            allow_abbrev=False,
            exit_on_error=False,
        )
        self.takes_run = takes_run
        self.takes_overrides = takes_overrides
        self._keys: dict[str, Sequence[str]] = {}
        # These are in the help only: `load_config`, or the command, reads them.
        self.add_argument("-h", "--help", action="store_true", help="print this text and exit")
        if not takes_overrides:
            return
        self.add_argument("--print-config", action="store_true", help=print_config)
        if takes_run:
            return
        self.add_argument("--cfg", metavar="FILE", help="read a YAML file, as for training")
        self.add_argument("--config-dir", metavar="DIR", help="a folder of groups and files, as for training")
        self.add_argument("--config-name", metavar="NAME", help="a file of that folder")
        for name, (metavar, text) in LAUNCH_HELP.items():  # `linnaeus.launchers.options` reads these
            if metavar is None:
                self.add_argument(name, action="store_true", help=text)
            else:
                self.add_argument(name, metavar=metavar, help=text)

    def option(
        self, name: str, metavar: str, read: Callable[[str], Any], text: str, keys: Sequence[str] = ()
    ) -> None:
        """Add an option with a value.

        Args:
            name: with its dashes; `--some-name` fills the attribute `some_name`.
            metavar: names the value in the help.
            read: the value from its text; raises `ValueError` with what is wrong.
            text: explains the option in the help.
            keys: the configuration keys that the option sets; it fills no attribute then.
        """

        def convert(text: str) -> Any:
            if not text:
                raise argparse.ArgumentTypeError("needs a value; --help shows examples")
            try:
                return read(text)
            except ValueError as error:  # argparse shows the text of this class of errors only
                raise argparse.ArgumentTypeError(str(error)) from None

        if keys:
            text += f" ({', and '.join([keys[0], *('_VAL' for _ in keys[1:])])})"
        action = self.add_argument(name, metavar=metavar, type=convert, help=text.replace("%", "%%"))
        self._keys[action.dest] = keys

    def switch(self, name: str, text: str) -> None:
        """Add an option without a value."""
        self.add_argument(name, action="store_true", help=text.replace("%", "%%"))

    def names(self) -> list[str]:
        """All options, with their dashes."""
        return [name for action in self._actions for name in action.option_strings]

    def take(self, argv: Sequence[str], options: object) -> tuple[list[str], list[str]]:
        """Take the options out of a command line.

        argparse stops at the first problem and knows no `KEY VALUE`, so it is handed one option at a time.

        Args:
            argv: the tokens after the command.
            options: its attributes are filled.

        Returns:
            The tokens for `load_config`, where options that set keys are overrides in their place, and one
            sentence for each problem.
        """
        rest, problems = list[str](), list[str]()
        tokens = deque(argv)
        while tokens:
            token = tokens.popleft()
            name, has_value, _ = token.partition("=")
            if not name.startswith("--") or name in OPTIONS or "." in name:
                rest.append(token)
                continue
            takes_value = name.removeprefix("--").replace("-", "_") in self._keys
            if takes_value and not has_value and tokens and not _is_option(tokens[0]):
                token = f"{name}={tokens.popleft()}"  # so that argparse takes `-x` for a value
            found = argparse.Namespace()
            try:
                _, unknown = self.parse_known_args([token], found)
            except argparse.ArgumentError as error:
                problems.append(f"{name}: {_in_our_words(error.message)}")
                continue
            if unknown:
                problems.append(f"{name}: no such option{suggest(name, [*self.names(), *OPTIONS])}")
            for attribute, value in vars(found).items():
                if keys := self._keys.get(attribute):
                    rest += [f"{key}={value}" for key in keys]
                else:
                    setattr(options, attribute, value)
        return rest, problems


def _is_option(token: str) -> bool:
    return token.startswith("--") or token in OPTIONS


def _in_our_words(message: str) -> str:
    if message == "expected one argument":
        return "needs a value; --help shows examples"
    return "takes no value" if message.startswith("ignored explicit argument") else message


@dataclass
class MeasuringOptions:
    """Options of every command that measures batch sizes.

    Attributes:
        output: file for programs; its ending says the format.
        plot: picture; None draws none.
    """

    output: Path
    plot: Path | None = None


Options = TypeVar("Options", bound=MeasuringOptions)


def add_measuring_options(parser: CommandParser, *, output: Path, suffixes: Sequence[str]) -> None:
    """Add the options of every command that measures batch sizes.

    Args:
        parser: takes them.
        output: default of `--output`.
        suffixes: endings of the bounding keys: "" for training, and "_VAL" where validation counts too.
    """

    def keys(name: str) -> list[str]:
        return [f"{AUTOBATCH}.{name}{suffix}" for suffix in suffixes]

    parser.option("--output", "FILE", read_table, f".json, .jsonl or .csv by its ending; default {output}")
    parser.option("--plot", "FILE", read_plot, "also draw a picture: .png, .svg or .html by its ending")
    parser.option("--min-bs", "N", read_count, "smallest size tried", keys("MIN_BATCH_SIZE"))
    parser.option("--max-bs", "N", read_count, "largest size tried", keys("MAX_BATCH_SIZE"))
    parser.option(
        "--memory-limit-gb", "X", partial(read_positive, "number of GiB"),
        "each process may hold TARGET_MEMORY_FRACTION of this at most", [f"{AUTOBATCH}.MEMORY_LIMIT_GB"],
    )  # fmt: skip


def read_request(
    parser: CommandParser,
    argv: Sequence[str],
    options: Options,
    check: Callable[[Options], list[str]] = lambda _: [],
) -> str | tuple[Options, Config]:
    """Read the command line of a command that measures, and make sure that its files can be written.

    Args:
        parser: knows the command's options.
        argv: the tokens after the command.
        options: filled.
        check: one sentence for each problem of options with each other.

    Returns:
        The help or the configuration where these are asked for, else the arguments of the session.

    Raises:
        ConfigError: lists everything that is wrong, with the options and in the configuration.
    """
    # Here and not above: the shell's completion reads the options, and does not wait for OmegaConf and YAML.
    from linnaeus.config.load import load_config

    rest, problems = parser.take(argv, options)
    problems += check(options)
    try:
        loaded = load_config(rest)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    if problems and not loaded.show_help:
        raise ConfigError(problems)
    if loaded.show_help or loaded.print_config:
        return parser.format_help() if loaded.show_help else loaded.text()
    check_files({"--output": options.output, "--plot": options.plot})
    return options, loaded.config


def check_files(files: Mapping[str, Path | None]) -> None:
    """Make sure that files, by the option that names them, can be written: before hours of work.

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
    try:
        if path.is_dir():
            return "it is a folder"
        if path.exists() and not os.access(path, os.W_OK):
            return "it is write-protected"
        temporary = temporary_name(path)
        temporary.touch()
        temporary.unlink()
    except OSError as error:
        return error.strerror
    return None


def read_path(endings: Sequence[str], text: str) -> Path:
    """A file whose ending says the format; `ValueError` for another ending."""
    path = Path(text)
    if path.suffix.lower() not in endings:
        ending = f"the ending {path.suffix}" if path.suffix else "no ending"
        raise ValueError(f"{text!r} has {ending}; the ending says the format: {', '.join(endings)}")
    return path


read_table = partial(read_path, (".json", ".jsonl", ".csv"))
read_plot = partial(read_path, (".png", ".svg", ".html"))


def read_count(text: str) -> int:
    """A whole number of at least 1; `ValueError` for anything else."""
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def read_positive(what: str, text: str) -> float:
    """A positive number, which messages call `what`, such as "number of GiB"; `ValueError` for others."""
    value = _number(text)
    if not 0 < value < math.inf:
        raise ValueError(f"{text!r} is not a positive {what}")
    return value


def read_fraction(text: str) -> float:
    """A fraction of the device's memory, in (0, 1]; `ValueError` for anything else."""
    fraction = _number(text)
    if not 0 < fraction <= 1:
        problem = f"{text!r} is not a number" if math.isnan(fraction) else f"{text} is outside (0, 1]"
        raise ValueError(f"{problem}; give fractions of the device's memory in (0, 1], such as 0.6,0.8")
    return fraction


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
