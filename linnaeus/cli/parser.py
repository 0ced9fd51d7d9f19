"""Command lines: one declaration per option, the words beside options, values of options. Without torch."""

from __future__ import annotations

import argparse
import math
import os
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from linnaeus.config.aliases import alias
from linnaeus.config.keys import KEYS, available, closest, dotted, suggest
from linnaeus.config.overrides import OPTIONS, expanded, parse_command_line
from linnaeus.config.schema import Config
from linnaeus.runtime.errors import ConfigError
from linnaeus.runtime.files import CHECKPOINTS, CONFIG, suggest_run, temporary_name
from linnaeus.sweep.slurm import FLAGS, LaunchOptions, problems_with

_NUMBER = re.compile(r"-([.\d]|(inf|nan)$)")


def option(
    text: str,
    metavar: str | None = None,
    read: Callable[[Any], Any] = str,
    default: Any = None,
    **rest: Any,
) -> Any:
    """A field of `Options` that is an option of the same name.

    Args:
        text: its help.
        metavar: what its value looks like; None for an option without a value, which is then a bool.
        read: the value from its text; raises `ValueError` with what is wrong.
        default: a value, or a function that makes one.
        key: the configuration key that the option sets; it fills no attribute then.
        takes: whether a word is one of several values; `read` then gets the list of all.
        launches: fills an attribute of `LaunchOptions`.
        short: another name.
        choices: what completion offers, where `metavar` is no `a|b`.
        needs: the option without which it means nothing.
        not_with: options with which it means nothing, each with the reason.
    """
    if metavar is None:
        default = False
    kind = {"default_factory": default} if callable(default) else {"default": default}
    metadata = {"text": text, "metavar": metavar, "read": read, **rest}
    return field(**kind, metadata=metadata)


def _read_sbatch(words: Sequence[str]) -> dict[str, str | None]:
    parts = [word.partition("=") for word in words]
    return {name: value or None for name, _, value in parts}


def _is_sbatch(word: str) -> bool:
    """Whether a word is an option of sbatch: a known one, or KEY=VALUE that chooses no preset."""
    name, has_value, _ = word.partition("=")
    is_own = has_value and re.fullmatch(r"[a-z][a-z0-9_-]*", name) and name not in available()
    return name in FLAGS or bool(is_own)


def read_choice(choices: Collection[str], text: str) -> str:
    """One of some words; `ValueError` for another."""
    if text not in choices:
        raise ValueError(f"{text!r} is none of {', '.join(choices)}{suggest(text, choices)}")
    return text


def choice(text: str, choices: Sequence[str], default: str | None = None, **rest: Any) -> Any:
    """An option whose value is one of some words."""
    return option(text, "|".join(choices), partial(read_choice, choices), default, **rest)


@dataclass
class Options:
    """Options of a command: fields made with `option`, and where the command runs."""

    launch: LaunchOptions = field(default_factory=LaunchOptions)
    launcher: None = choice(
        "where to run: this machine (default), or a job of SLURM", ("local", "slurm"), launches=True
    )
    slurm: None = option(
        "options of sbatch, such as partition=gpu time=4:00:00",
        "KEY=VALUE ...",
        _read_sbatch,
        takes=_is_sbatch,
        launches=True,
    )
    dry_run: bool = option("print what would be started, and start nothing", launches=True)


@dataclass
class RunOptions(Options):
    """Options of a command whose first word is a trained run."""

    run: Path = Path()
    checkpoint: str | None = option(
        "checkpoint: best (default), last, or a file; not where RUN is a checkpoint itself",
        "best|last|FILE",
    )
    trust_code: bool = option(
        "run the code that the run's files name in `_target_`: for your own runs only"
    )


Given = TypeVar("Given", bound=Options)


class CommandParser(argparse.ArgumentParser, Generic[Given]):
    """The options of a command, and its help.

    argparse writes the help. `words` reads the command line, because argparse stops at the first mistake and
    loses the order of options and keys.

    Args:
        options: the class with the options; of `RunOptions`, the first word is a run.
        details: the end of the help: what else to know, examples, exit codes.
        print_config: help of `--print-config`; without it, keys of the configuration cannot be set.
        words: what stands beside the options, for the usage; None derives it from the above.
        gone: options of earlier versions, and what to do instead.
    """

    def __init__(
        self,
        command: str,
        options: type[Given],
        *,
        description: str,
        details: str,
        print_config: str = "",
        words: str | None = None,
        gone: Mapping[str, str] | None = None,
    ) -> None:
        takes_run = issubclass(options, RunOptions)
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
        self.command, self.options, self.gone = command, options, gone or {}
        self.takes_overrides = bool(print_config)
        if print_config:
            self.gone = {**self.gone, "--origin": "is gone; --print-config prints the values"}
        self._options: dict[str, Field[Any]] = {}
        launching = self.add_argument_group("where to run")
        self.add_argument("-h", "--help", action="store_true", help="print this text and exit")
        if print_config:
            self.add_argument("--print-config", action="store_true", help=print_config)
        if print_config and not takes_run:
            text = "read a YAML file with the keys that differ from the defaults; a later file wins"
            self.add_argument("--cfg", metavar="FILE", help=text)
            text = "a folder of groups and files of your own"
            self.add_argument("--config-dir", "-cd", metavar="DIR", help=text)
            text = "a file of it, as with --cfg"
            self.add_argument("--config-name", "-cn", metavar="NAME", help=text)
            text = "may come before the keys; changes nothing"
            self.add_argument("--opts", action="store_true", help=text)
        inherited = {each.name for each in fields(Options)}
        own = sorted(fields(options), key=lambda each: each.name in inherited)
        for each in own:
            if not (about := each.metadata):
                continue
            names = [*filter(None, [about.get("short")]), f"--{each.name.replace('_', '-')}"]
            text = about["text"]
            if key := about.get("key"):
                text += f" ({key})"
            value: dict[str, Any] = {"action": "store_true"}
            if about["metavar"] is not None:
                value = {"metavar": about["metavar"], "choices": about.get("choices")}
            group = launching if about.get("launches") else self
            group.add_argument(*names, help=text.replace("%", "%%"), **value)
            self._options |= dict.fromkeys(names, each)

    def words(self, argv: Sequence[str]) -> tuple[Given, list[str], list[str]]:
        """Take the options, and RUN where the command uses one, out of a command line.

        Args:
            argv: the tokens after the command. After `--` all are words.

        Returns:
            The options; the other words, with the configuration's own options among them and overrides in
            place of options that set keys; and one sentence for each problem.
        """
        options = self.options()
        words, problems, launch = list[str](), list[str](), options.launch
        given: dict[str, list[str]] = {}
        at, end = 0, argv.index("--") if "--" in argv else len(argv)
        while at < end:
            begin, (name, has_value, value) = at, argv[at].partition("=")
            known = self._options.get(name)
            about: Mapping[str, Any] = known.metadata if known else {}
            at += 1
            if not _is_option(name):
                words.append(argv[begin])
            elif self.takes_overrides and name in OPTIONS:
                words.append(argv[begin])  # with the word that follows, if it is the value
            elif known is None:
                following = argv[at] if at < end and not has_value else "-"
                problem, is_setting = self._unknown(argv[begin], following)
                problems.append(problem)
                path = tuple(following.split("."))
                at += is_setting and path not in KEYS and not re.match(r"-|.*=", following)
            elif about["metavar"] is None and has_value:
                problems.append(f"{name}: takes no value")
            else:
                takes: Callable[[str], bool] | None = about.get("takes")
                texts = [value] if has_value else []
                most = 0 if about["metavar"] is None else 1 if takes is None else end
                for word in argv[at:end]:
                    if len(texts) >= most or word.startswith("--") or word in self._options:
                        break
                    if takes is not None and not takes(word):
                        break
                    texts.append(word)
                at += len(texts) - bool(has_value)
                earlier = given.get(name, [])
                given[name] = texts = earlier + texts if takes is not None else texts
                try:
                    words += self._apply(known, texts, launch if about.get("launches") else options)
                except ValueError as error:
                    problems.append(f"{name}: {error}")
            if not about.get("launches"):
                launch.argv += argv[begin:at]
        words += argv[end + 1 :]
        launch.argv += argv[end:]
        for name in given:
            about = self._options[name].metadata
            if (needs := about.get("needs")) and needs not in given:
                problems.append(f"{name}: needs {needs}")
            for other, reason in about.get("not_with", {}).items():
                if other in given:
                    problems.append(f"{name}: not with {other}, which {reason}; leave it out")
        if isinstance(options, RunOptions):
            problems += self._take_run(words, options)
        if launch.launcher == "slurm":
            problems += problems_with(launch.slurm)
        elif launch.slurm:
            problems.append("--slurm: is for --launcher slurm, which is not given")
        elif launch.dry_run and self.command not in ("sweep", "[train]"):
            problems.append("--dry-run: prints a job script; add --launcher slurm")
        return options, words, problems

    @staticmethod
    def _apply(known: Field[Any], texts: list[str], target: object) -> list[str]:
        """Fill the attribute of an option; returns the words in its place. `ValueError` for a wrong value."""
        about = known.metadata
        if about["metavar"] is None:
            setattr(target, known.name, True)
            return []
        if not all(texts or [""]):
            raise ValueError("needs a value; --help shows examples")
        value = about["read"](texts if about.get("takes") else texts[0])
        if key := about.get("key"):
            return [f"{key}={value}"]
        setattr(target, known.name, value)
        return []

    def _unknown(self, token: str, following: str) -> tuple[str, bool]:
        """What is wrong with an unknown option, and whether it is meant as a setting."""
        name, _, value = token.partition("=")
        if name in self.gone:
            return f"{name}: {self.gone[name]}", True
        known = ["--help", *self._options, *(OPTIONS if self.takes_overrides else ())]
        if value and name == "--help":
            return f"{name}: takes no value", False
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

    def _take_run(self, words: list[str], options: RunOptions) -> list[str]:
        """Move the first word to `options.run`; returns the problem with it as a list of at most one."""
        if not words or (
            (words[0].startswith("-") or "=" in words[0]) and not Path(words[0]).exists()
        ):
            found = f", not {words[0]!r}" if words else ""
            return [
                f"RUN: name the folder of a run first{found}: linnaeus {self.command} runs/birds"
            ]
        path = options.run = Path(expanded(words.pop(0)))
        if path.is_file() and options.checkpoint is not None:
            return [f"--checkpoint: RUN is a checkpoint itself, {path}; leave the option out"]
        names_file = path.is_dir() and options.checkpoint not in (None, "best", "last")
        if path.is_file() or names_file or (path / CHECKPOINTS).exists():
            return []
        return [f"RUN: {path} is not a run directory (no {CHECKPOINTS}/){suggest_run(path)}"]

    def complete(self, commands: Iterable[str]) -> None:
        """Answer the shell, which asks what may stand at the cursor, and end the process.

        Commands, options, their choices, keys, presets, choices of keys and files are offered.
        """
        import argcomplete

        line, point = os.environ["COMP_LINE"], int(os.environ["COMP_POINT"])
        quote, word, _, words, _ = argcomplete.split_line(line, point)
        # argparse loses the words behind the first: it sees the last one, with its option.
        before = words[-1] if len(words) > 1 and _is_option(words[-1]) else ""
        os.environ["COMP_LINE"] = f"linnaeus {before} {quote}{word}"
        os.environ["COMP_POINT"] = str(len(os.environ["COMP_LINE"].encode()))
        names = {*commands} if len(words) == 1 else set()
        if self.takes_overrides and "=" not in word:
            names |= {f"{name}=" for name in (*map(dotted, KEYS), *available())}
        elif self.takes_overrides:
            values = {dotted(path): key.choices or () for path, key in KEYS.items()} | available()
            names |= {f"{name}={value}" for name, found in values.items() for value in found}
        for action in self._actions:  # argparse has no public list of options
            action.choices = (
                action.choices
                or [part for part in str(action.metavar).split("|") if part.islower()]
                or None
            )
        files = argcomplete.FilesCompleter()
        argument: Any = self.add_argument("word", nargs="?")
        argument.completer = lambda prefix, **_: [
            *(name for name in names if name.startswith(prefix)),
            *files(prefix.rpartition("=")[2]),
        ]
        argcomplete.autocomplete(self, always_complete_options=False)


def _is_option(token: str) -> bool:
    return token[:1] == "-" and token != "-" and not _NUMBER.match(token)


def read_request(
    parser: CommandParser[Given],
    argv: Sequence[str],
    *,
    references: bool = False,
) -> str | tuple[Given, Config]:
    """Read the command line of a command with a configuration, and make sure that its files can be written.

    `references` is as for `load_config`; the device of a job of SLURM need not be here.

    Returns:
        The configuration as text where it is asked for, else the arguments of the command's `run`.

    Raises:
        ConfigError: lists everything that is wrong, with the options and in the configuration.
    """
    options, words, problems = parser.words(argv)
    from linnaeus.config.dump import to_yaml  # help and completion do not wait for OmegaConf
    from linnaeus.config.load import load_config

    files = ("output", "plot", "preview")
    problems += unwritable({f"--{name}": vars(options).get(name) for name in files})
    paths = {
        word: hint
        for word in parse_command_line(words).stray
        if (hint := _suggested_command(parser, word))
    }
    problems += paths.values()
    try:
        loaded = load_config(
            [word for word in words if word not in paths],
            references=references,
            is_here=options.launch.launcher != "slurm",
        )
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    if problems:
        raise ConfigError(problems)
    if loaded.print_config:
        return to_yaml(loaded.config)
    return options, loaded.config


def _suggested_command(parser: CommandParser[Given], word: str) -> str | None:
    """The command to type in place of a run's name, a checkpoint or a folder of images; None for others."""
    command, path = f"linnaeus {parser.command.strip('[]')}", Path(word)
    runs = (
        run for run in (path, path.parent.parent, Path("runs", word)) if (run / CONFIG).is_file()
    )
    if (run := next(runs, None)) is not None:
        words, purpose = ["--cfg", str(run / CONFIG)], "to use its configuration"
        if parser.command == "[train]":
            folder, purpose = run.absolute(), "to resume it"
            words += [f"EXPERIMENT.OUTPUT_DIR={folder.parent}", f"EXPERIMENT.NAME={folder.name}"]
            words += ["TRAIN.AUTO_RESUME=True"]
        return f"{word!r} is a run; {purpose}, run: {command} {shlex.join(words)}"
    if not path.is_dir():
        return None
    typed = f"{command} data=imagefolder DATA.DATASET.ROOT={shlex.quote(word)}"
    return f"{word!r} is a directory; to use its images, run: {typed}"


def unwritable(files: Mapping[str, Path | None]) -> list[str]:
    """Return a sentence for each file, by the option that names it, that cannot be written."""
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
    return problems


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
