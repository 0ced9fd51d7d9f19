"""Command lines: the options of every command, the words beside them, values of options. Without torch."""

from __future__ import annotations

import argparse
import math
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from linnaeus.config.aliases import alias
from linnaeus.config.keys import KEYS, available, closest, suggest
from linnaeus.config.overrides import OPTIONS, expanded, parse_command_line
from linnaeus.config.schema import Config
from linnaeus.runtime.errors import ConfigError
from linnaeus.runtime.files import CHECKPOINTS, suggest_run, temporary_name
from linnaeus.sweep.slurm import FLAGS, LaunchOptions, problems_with

AUTOBATCH = "DATA.AUTOBATCH"
COMPLETION = 'eval "$(register-python-argcomplete linnaeus)"'
"""What a shell's start-up file needs for completion with TAB."""
_NUMBER = re.compile(r"-([.\d]|(inf|nan)$)")


@dataclass(frozen=True)
class _Option:
    """What becomes of an option.

    Attributes:
        read: the value from its text, or from all its texts where `takes` is set; raises `ValueError` with
            what is wrong. None for an option without a value.
        keys: the configuration keys that get the value, in place of an attribute.
        takes: whether a word is one of its values; None where there is one value.
        launches: whether it is an attribute of `LaunchOptions`.
    """

    read: Callable[[Any], Any] | None = None
    keys: Sequence[str] = ()
    takes: Callable[[str], bool] | None = None
    launches: bool = False

    def apply(self, name: str, texts: list[str], options: object) -> list[str]:
        """Fill the attribute of an option; returns the words in its place. `ValueError` for a wrong value."""
        if self.read is not None and not all(texts or [""]):
            raise ValueError("needs a value; --help shows examples")
        value = True if self.read is None else self.read(texts if self.takes else texts[0])
        if not self.keys:
            setattr(options, name.removeprefix("--").replace("-", "_"), value)
        return [f"{key}={value}" for key in self.keys]


class CommandParser(argparse.ArgumentParser):
    """The options of a command, and its help.

    argparse writes the help. `words` reads the command line, because argparse stops at the first mistake and
    loses the order of options and keys.

    Args:
        details: the end of the help: what else to know, examples, exit codes.
        print_config: help of `--print-config`.
        takes_run: whether the first word is a trained run, whose configuration takes the place of `--cfg`;
            the attribute `checkpoint` is None by default, and `trust_code` False.
        takes_overrides: whether keys of the configuration may be set.
        words: what stands beside the options, for the usage; None derives it from the above.

    Attributes:
        gone: options of earlier versions, and what to do instead.
    """

    def __init__(
        self,
        command: str,
        *,
        description: str,
        details: str,
        print_config: str = "",
        takes_run: bool = False,
        takes_overrides: bool = True,
        words: str | None = None,
    ) -> None:
        if words is None:
            words = "RUN [options]" if takes_run else "[--cfg FILE] [options] [group=preset ...]"
            words += " [KEY VALUE | KEY=VALUE ...]"
        super().__init__(
            usage=f"linnaeus {command} {words}",
            description=description,
            epilog=details,
            formatter_class=partial(
                argparse.RawDescriptionHelpFormatter, max_help_position=24, width=110
            ),
            add_help=False,
            allow_abbrev=False,
        )
        self.command = command
        self.takes_run = takes_run
        self.takes_overrides = takes_overrides
        self.gone: dict[str, str] = {}
        self._options: dict[str, _Option] = {}
        self._launching = self.add_argument_group("where to run")
        self.switch("--help", "print this text and exit", short="-h")
        if takes_overrides:
            self.add_argument("--print-config", action="store_true", help=print_config)
            text = "with --print-config: where each value comes from"
            self.add_argument("--origin", action="store_true", help=text)
        if takes_overrides and not takes_run:
            text = "read a YAML file with the keys that differ from the defaults; a later file wins"
            self.add_argument("--cfg", metavar="FILE", help=text)
            text = "a folder of groups and files of your own"
            self.add_argument("--config-dir", "-cd", metavar="DIR", help=text)
            self.add_argument(
                "--config-name", "-cn", metavar="NAME", help="a file of it, as with --cfg"
            )
            text = "may come before the keys; changes nothing"
            self.add_argument("--opts", action="store_true", help=text)
        if takes_run:
            text = (
                "checkpoint: best (default), last, or a file; not where RUN is a checkpoint itself"
            )
            self.option("--checkpoint", "best|last|FILE", str, text)
            text = "run the code that the run's files name in `_target_`: for your own runs only"
            self.switch("--trust-code", text)
        self.option(
            "--launcher",
            "local|slurm",
            partial(read_choice, ("local", "slurm")),
            "where to run: this machine (default), or a job of SLURM",
            launches=True,
        )
        self.option(
            "--slurm",
            "KEY=VALUE ...",
            _read_sbatch,
            "options of sbatch, such as partition=gpu time=4:00:00",
            takes=_is_sbatch,
            launches=True,
        )
        self._add(
            _Option(launches=True),
            "--dry-run",
            text="print what would be started, and start nothing",
        )

    def _add(
        self,
        option: _Option,
        *names: str,
        text: str,
        metavar: str | None = None,
        choices: Iterable[str] = (),
    ) -> None:
        kind: dict[str, Any] = {"action": "store_true"}
        if option.read is not None:
            kind = {"metavar": metavar, "choices": tuple(choices)}
        group = self._launching if option.launches else self
        group.add_argument(*names, help=text.replace("%", "%%"), **kind)
        self._options |= dict.fromkeys(names, option)

    def option(
        self,
        name: str,
        metavar: str,
        read: Callable[[Any], Any],
        text: str,
        keys: Sequence[str] = (),
        takes: Callable[[str], bool] | None = None,
        launches: bool = False,
        choices: Iterable[str] = (),
    ) -> None:
        """Add an option with a value.

        Args:
            name: with its dashes; `--some-name` fills the attribute `some_name`.
            read: the value from its text; raises `ValueError` with what is wrong.
            keys: the configuration keys that the option sets; it fills no attribute then.
            takes: whether a word is one of several values; `read` then gets the list of all.
            launches: fills an attribute of `LaunchOptions`.
            choices: what completion offers, also behind a comma, where `metavar` is no `a|b`.
        """
        if keys:
            text += f" ({', and '.join([keys[0], *('_VAL' for _ in keys[1:])])})"
        option = _Option(read, keys, takes, launches=launches)
        self._add(option, name, text=text, metavar=metavar, choices=choices)

    def switch(self, name: str, text: str, short: str | None = None) -> None:
        """Add an option without a value."""
        self._add(_Option(), *filter(None, (short, name)), text=text)

    def words(self, argv: Sequence[str], options: object) -> tuple[list[str], list[str]]:
        """Take the options, and RUN where the command uses one, out of a command line.

        Args:
            argv: the tokens after the command. After `--` all are words.
            options: its attributes are filled; `launch` with `LaunchOptions`, and `run` with the path of RUN.

        Returns:
            The other words, with the configuration's own options among them and overrides in place of options
            that set keys; and one sentence for each problem.
        """
        words, problems, launch = list[str](), list[str](), LaunchOptions()
        gathered: dict[str, list[str]] = {}
        at, end = 0, argv.index("--") if "--" in argv else len(argv)
        while at < end:
            begin, (name, has_value, value) = at, argv[at].partition("=")
            option = self._options.get(name)
            at += 1
            if not _is_option(name):
                words.append(argv[begin])
            elif name in ("--install-completion", "--show-completion"):
                return [], [
                    f"{name}: completion is set up by {COMPLETION} in the shell's start-up file"
                ]
            elif self.takes_overrides and name in OPTIONS:
                words.append(argv[begin])  # with the word that follows, if it is the value
            elif option is None:
                following = argv[at] if at < end and not has_value else "-"
                problem, is_setting = self._unknown(argv[begin], following)
                problems.append(problem)
                path = tuple(following.split("."))
                at += is_setting and path not in KEYS and not re.match(r"-|.*=", following)
            elif option.read is None and has_value:
                problems.append(f"{name}: takes no value")
            else:
                texts = [value] if has_value else []
                most = 0 if option.read is None else 1 if option.takes is None else end
                for word in argv[at:end]:
                    if len(texts) >= most or word.startswith("--") or word in self._options:
                        break
                    if option.takes is not None and not option.takes(word):
                        break
                    texts.append(word)
                at += len(texts) - bool(has_value)
                if option.takes is not None:  # the option may stand twice
                    texts = gathered[name] = gathered.get(name, []) + texts
                try:
                    words += option.apply(name, texts, launch if option.launches else options)
                except ValueError as error:
                    problems.append(f"{name}: {error}")
            if option is None or not option.launches:
                launch.argv += argv[begin:at]
        words += argv[end + 1 :]
        launch.argv += argv[end:]
        if self.takes_run:
            problems += self._take_run(words, options)
        if launch.launcher == "slurm":
            problems += problems_with(launch.slurm)
        elif launch.slurm:
            problems.append("--slurm: is for --launcher slurm, which is not given")
        elif launch.dry_run and self.command != "sweep":
            problems.append("--dry-run: shows the script of a job: give --launcher slurm too")
        vars(options)["launch"] = launch
        return words, problems

    def _unknown(self, token: str, following: str) -> tuple[str, bool]:
        """What is wrong with an unknown option, and whether it is meant as a setting."""
        name, _, value = token.partition("=")
        if name in self.gone:
            return f"{name}: {self.gone[name]}", True
        known = [*self._options, *(OPTIONS if self.takes_overrides else ())]
        problem = f"{name}: no such option"
        close = [option for option in known if option.startswith(name) and len(name) > 3]
        close += get_close_matches(name, known, n=1, cutoff=0.86)
        if close:
            return f"{problem}; did you mean {close[0]}?", False
        if self.takes_overrides:
            key = name.lstrip("-")
            real = closest(key) if "." in key or key.isupper() else None
            meaning = f"keys have no dashes: {real}" if real else alias(name, value or following)
            hint = f"; {meaning}" if meaning else suggest(name, known) if len(key) > 1 else ""
            return problem + hint, bool(meaning)
        if Path(token).exists() or not token.startswith("--"):
            return f"{token}: no such option; give a file of this name as ./{token}", False
        return f"{token}: no such option{suggest(name, known)}", False

    def _take_run(self, words: list[str], options: object) -> list[str]:
        """Move the first word to `options.run`; returns the problem with it as a list of at most one."""
        if not words or (
            (words[0].startswith("-") or "=" in words[0]) and not Path(words[0]).exists()
        ):
            found = f", not {words[0]!r}" if words else ""
            return [
                f"RUN: name the folder of a run first{found}: linnaeus {self.command} runs/birds"
            ]
        path = Path(expanded(words.pop(0)))
        vars(options)["run"] = path
        if path.is_file() and vars(options)["checkpoint"] is not None:
            return [f"--checkpoint: RUN is a checkpoint itself, {path}; leave the option out"]
        names_file = path.is_dir() and vars(options)["checkpoint"] not in (None, "best", "last")
        if path.is_file() or names_file or (path / CHECKPOINTS).exists():
            return []
        return [f"RUN: {path} is not a run directory (no {CHECKPOINTS}/){suggest_run(path)}"]


def _is_option(token: str) -> bool:
    return token[:1] == "-" and token != "-" and not _NUMBER.match(token)


def _is_sbatch(word: str) -> bool:
    """Whether a word is an option of sbatch: a known one, or KEY=VALUE that chooses no preset."""
    name, has_value, _ = word.partition("=")
    is_own = has_value and re.fullmatch(r"[a-z][a-z0-9_-]*", name) and name not in available()
    return name in FLAGS or bool(is_own)


def _read_sbatch(words: Sequence[str]) -> dict[str, str | None]:
    parts = [word.partition("=") for word in words]
    return {name: value or None for name, _, value in parts}


Filled = TypeVar("Filled")


def read_request(
    parser: CommandParser,
    argv: Sequence[str],
    options: Filled,
    check: Callable[[Filled, list[str]], list[str]] = lambda *_: [],
) -> str | tuple[Filled, Config]:
    """Read the command line of a command with a configuration, and make sure that its files can be written.

    `options` are filled; `check` gives one sentence for each problem of options with each other and with the
    other words.

    Returns:
        The configuration as text where it is asked for, else the arguments of the command's `run`.

    Raises:
        ConfigError: lists everything that is wrong, with the options and in the configuration.
    """
    words, problems = parser.words(argv, options)
    from linnaeus.config.load import (
        load_config,
    )  # here: help and completion do not wait for OmegaConf

    problems += check(options, words)
    folders = [word for word in parse_command_line(words).stray if Path(word).is_dir()]
    for folder in folders:
        typed = f"linnaeus {parser.command.strip('[]')} data=imagefolder DATA.DATASET.ROOT="
        problems.append(
            f"{folder!r} is a directory; to use its images, run: {typed}{shlex.quote(folder)}"
        )
    try:
        loaded = load_config([word for word in words if word not in folders])
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    if problems:
        raise ConfigError(problems)
    if loaded.print_config:
        return loaded.text()
    check_files({f"--{name}": vars(options).get(name) for name in ("output", "plot")})
    return options, loaded.config


def check_files(files: Mapping[str, Path | None]) -> None:
    """Make sure that files, by the option that names them, can be written: before hours of work.

    Raises:
        ConfigError: names each file that cannot be written.
    """
    problems = []
    for name, path in files.items():
        reason = None
        try:
            if path is not None and path.is_dir():
                reason = "it is a folder"
            elif path is not None:
                temporary_name(path).touch()
                temporary_name(path).unlink()
        except OSError as error:
            reason = error.strerror
        if reason is not None:
            problems.append(f"{name}: {path} cannot be written: {reason}; choose another file")
    if problems:
        raise ConfigError(problems)


def read_path(endings: Sequence[str], text: str) -> Path:
    """A file whose ending says the format; `ValueError` for another ending."""
    path = Path(text)
    if path.suffix.lower() not in endings:
        ending = f"the ending {path.suffix}" if path.suffix else "no ending"
        raise ValueError(f"{text!r} has {ending}; the ending says the format: {', '.join(endings)}")
    return path


read_table = partial(read_path, (".json", ".jsonl", ".csv"))
read_plot = partial(read_path, (".png", ".svg"))


def read_count(text: str) -> int:
    """A whole number of at least 1; `ValueError` for anything else."""
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def read_choice(choices: Sequence[str], text: str) -> str:
    """One of some words; `ValueError` for another."""
    if text not in choices:
        raise ValueError(f"{text!r} is none of {', '.join(choices)}{suggest(text, choices)}")
    return text


def read_number(what: str, text: str, most: float = math.inf) -> float:
    """A positive number of at most `most`, which messages call `what`; `ValueError` for others."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= most or value == math.inf:
        bound = "" if most == math.inf else f" of at most {most:g}"
        raise ValueError(f"{text!r} is not a positive {what}{bound}")
    return value
