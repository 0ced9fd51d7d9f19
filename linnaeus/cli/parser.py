"""Command lines: declarations of options, other words, option values. Does not import torch."""

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
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from linnaeus.config.aliases import alias
from linnaeus.config.keys import KEYS, available, closest, dotted, suggest
from linnaeus.config.overrides import OPTIONS, expanded, parse_command_line
from linnaeus.config.schema import Config
from linnaeus.runtime.errors import ConfigError
from linnaeus.runtime.files import CHECKPOINTS, CONFIG, suggest_run, temporary_name
from linnaeus.sweep.slurm import FLAGS, problems_with

if TYPE_CHECKING:
    from linnaeus.inference.trained import TrainedRun

_SOURCES = (
    (
        "--cfg",
        "FILE",
        "YAML file with the keys that differ from the defaults; later files win",
    ),
    ("--config-dir -cd", "DIR", "folder of your own groups and files"),
    ("--config-name -cn", "NAME", "a file in this folder, read like --cfg"),
)
_NUMBER = re.compile(r"-([.\d]|(inf|nan)$)")


def option(
    text: str,
    metavar: str | None = None,
    read: Callable[[Any], Any] = str,
    default: Any = None,
    **rest: Any,
) -> Any:
    """Declare a field of `Options` as a command-line option of the same name.

    Args:
        text: the help text.
        metavar: placeholder of the value in the help; None for a flag, whose value is a bool.
        read: parses the text; raises `ValueError` with the reason.
        default: a value, or a function that makes one.
        key: the configuration key to set instead of the attribute.
        takes: returns whether a word is one of several values; `read` then gets the list of all.
        launches: whether the option selects where the command runs; SLURM jobs do not get it.
        short: a second name.
        choices: values that completion offers.
        needs: an option that must be given too.
        not_with: options that must not be given too, each with the reason.
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
    """Whether a word is an option of sbatch: a known flag, or KEY=VALUE that selects no preset."""
    name, has_value, _ = word.partition("=")
    is_own = has_value and re.fullmatch(r"[a-z][a-z0-9_-]*", name) and name not in available()
    return name in FLAGS or bool(is_own)


def read_choice(choices: Collection[str], text: str) -> str:
    """Return the text if it is one of the choices, else raise `ValueError`."""
    if text not in choices:
        raise ValueError(f"{text!r} is not one of {', '.join(choices)}{suggest(text, choices)}")
    return text


def choice(text: str, choices: Sequence[str], default: str | None = None, **rest: Any) -> Any:
    """Declare an option whose value is one of the choices."""
    read = partial(read_choice, choices)
    return option(text, "|".join(choices), read, default, choices=choices, **rest)


@dataclass
class Options:
    """Options of a command: fields made with `option`. `argv` holds the words without `launches` options."""

    argv: list[str] = field(default_factory=list)
    launcher: str = choice(
        "where to run: on this machine (default), or as a SLURM job",
        ("local", "slurm"),
        "local",
        launches=True,
    )
    slurm: dict[str, str | None] = option(
        "options of sbatch, such as partition=gpu time=4:00:00",
        "KEY=VALUE ...",
        _read_sbatch,
        dict,
        takes=_is_sbatch,
        launches=True,
    )
    dry_run: bool = option("print the commands or the job script, and start nothing", launches=True)


@dataclass
class RunOptions(Options):
    """Options of a command that takes a trained run as its first word."""

    run: Path = Path()
    trust_code: bool = option(
        "run the code named by `_target_` in the run's files; only for your own runs"
    )


@dataclass
class CheckpointOptions(RunOptions):
    """Options of a command that loads a checkpoint of a trained run."""

    checkpoint: str | None = option(
        "checkpoint: best (default), last, or a file; leave it out if RUN is a checkpoint",
        "best|last|FILE",
        choices=("best", "last"),
    )

    def load(self, run: Path, device: str) -> TrainedRun:
        """Load a run. See `load_run` for arguments and errors."""
        from linnaeus.inference.trained import load_run

        checkpoint = self.checkpoint or "best"
        return load_run(run, checkpoint=checkpoint, device=device, trust_code=self.trust_code)


Given = TypeVar("Given", bound=Options)


class CommandParser(argparse.ArgumentParser, Generic[Given]):
    """Options and help of a command.

    argparse writes the help. `words` parses the command line, because argparse stops at the first mistake and
    loses the order of options and keys.

    Args:
        options: the class with the options. A subclass of `RunOptions` takes a run as its first word.
        details: the end of the help: details, examples, exit codes.
        print_config: help of `--print-config`. If empty, the command takes no configuration keys.
        words: the arguments in the usage line; None derives them from the other arguments.
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
        self.command, self.options, self.takes_overrides = command, options, bool(print_config)
        self._options: dict[str, Field[Any]] = {}
        launching = self.add_argument_group("where to run")
        self.add_argument("-h", "--help", action="store_true", help="print this text and exit")
        if print_config:
            self.add_argument("--print-config", action="store_true", help=print_config)
        if print_config and not takes_run:
            for name, metavar, text in _SOURCES:
                self.add_argument(*name.split(), metavar=metavar, help=text)
            text = "optional word before the keys, without effect"
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
        """Parse the options, and RUN if the command takes one.

        Args:
            argv: the tokens after the command. All tokens after `--` are words.

        Returns:
            The options, the other words, and a sentence for each problem. The words include the options of
            the configuration. Options that set keys become overrides.
        """
        options = self.options()
        words, problems = list[str](), list[str]()
        given: dict[str, list[str]] = {}
        at, end = 0, argv.index("--") if "--" in argv else len(argv)
        while at < end:
            begin, (name, has_value, value) = at, argv[at].partition("=")
            known = self._options.get(name)
            about: Mapping[str, Any] = known.metadata if known else {}
            at += 1
            if not _is_option(name) or (self.takes_overrides and name in OPTIONS):
                words.append(argv[begin])  # an option's value follows as the next word
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
                limit = 0 if about["metavar"] is None else 1 if takes is None else end
                for word in argv[at:end]:
                    if len(texts) >= limit or word.startswith("--") or word in self._options:
                        break
                    if takes is not None and not takes(word):
                        break
                    texts.append(word)
                at += len(texts) - bool(has_value)
                earlier = given.get(name, [])
                given[name] = texts = earlier + texts if takes is not None else texts
                try:
                    words += self._apply(known, texts, options)
                except ValueError as error:
                    problems.append(f"{name}: {error}")
            if not about.get("launches"):
                options.argv += argv[begin:at]
        words += argv[end + 1 :]
        options.argv += argv[end:]
        for name in given:
            about = self._options[name].metadata
            if (needs := about.get("needs")) and needs not in given:
                problems.append(f"{name}: needs {needs}")
            for other, reason in about.get("not_with", {}).items():
                if other in given:
                    problems.append(
                        f"{name}: cannot be used with {other}, which {reason}; leave it out"
                    )
        if isinstance(options, RunOptions):
            problems += self._take_run(words, options)
        if options.launcher == "slurm":
            problems += problems_with(options.slurm)
        elif options.slurm:
            problems.append("--slurm: needs --launcher slurm")
        elif options.dry_run and self.command not in ("sweep", "[train]"):
            problems.append("--dry-run: prints a job script; add --launcher slurm")
        return options, words, problems

    @staticmethod
    def _apply(known: Field[Any], texts: list[str], target: object) -> list[str]:
        """Set the attribute of an option, or return overrides instead.

        Raises:
            ValueError: the value is wrong.
        """
        about = known.metadata
        if about["metavar"] is None:
            setattr(target, known.name, True)
            return []
        if not all(texts or [""]):
            raise ValueError("needs a value; see --help for examples")
        value = about["read"](texts if about.get("takes") else texts[0])
        if key := about.get("key"):
            return [f"{key}={value}"]
        setattr(target, known.name, value)
        return []

    def _unknown(self, token: str, following: str) -> tuple[str, bool]:
        """Return the problem with an unknown option, and whether the user meant a configuration key."""
        name, _, value = token.partition("=")
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
            return f"{token}: no such option; write a file of this name as ./{token}", False
        return f"{token}: no such option{suggest(name, known)}", False

    def _take_run(self, words: list[str], options: RunOptions) -> list[str]:
        """Move the first word to `options.run`. Return a list with the problem, or an empty list."""
        if not words or (
            (words[0].startswith("-") or "=" in words[0]) and not Path(words[0]).exists()
        ):
            found = f", not {words[0]!r}" if words else ""
            return [
                f"RUN: the first word must be a run directory{found}: linnaeus {self.command} runs/birds"
            ]
        path = options.run = Path(expanded(words.pop(0)))
        checkpoint = vars(options).get("checkpoint")
        if path.is_file() and checkpoint is not None:
            return [f"--checkpoint: RUN is already a checkpoint, {path}; leave the option out"]
        names_file = path.is_dir() and checkpoint not in (None, "best", "last")
        if path.is_file() or names_file or (path / CHECKPOINTS).exists():
            return []
        return [f"RUN: {path} is not a run directory (no {CHECKPOINTS}/){suggest_run(path)}"]

    def complete(self, commands: Iterable[str]) -> None:
        """Print the completions for the shell and end the process.

        They are commands, options and their choices, keys and their choices, presets, and files.
        """
        import argcomplete

        line, point = os.environ["COMP_LINE"], int(os.environ["COMP_POINT"])
        quote, word, _, words, _ = argcomplete.split_line(line, point)
        # argparse takes a single positional word, so pass only the last word and its option.
        before = words[-1] if len(words) > 1 and _is_option(words[-1]) else ""
        os.environ["COMP_LINE"] = f"linnaeus {before} {quote}{word}"
        os.environ["COMP_POINT"] = str(len(os.environ["COMP_LINE"].encode()))
        names = {*commands} if len(words) == 1 else set()
        if self.takes_overrides and "=" not in word:
            names |= {f"{name}=" for name in (*map(dotted, KEYS), *available())}
        elif self.takes_overrides:
            values = {dotted(path): key.choices or () for path, key in KEYS.items()} | available()
            names |= {f"{name}={value}" for name, found in values.items() for value in found}
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
    """Read the command line of a command with a configuration, and check that its files can be written.

    `references` is passed to `load_config`. The device of a SLURM job need not exist on this machine.

    Returns:
        With `--print-config` the configuration as text, else the arguments of the command's `run`.

    Raises:
        ConfigError: lists all mistakes in the options and the configuration.
    """
    options, words, problems = parser.words(argv)
    from linnaeus.config.dump import to_yaml  # keeps OmegaConf out of help and completion
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
            is_here=options.launcher != "slurm",
        )
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    if problems:
        raise ConfigError(problems)
    if loaded.print_config:
        return to_yaml(loaded.config)
    return options, loaded.config


def _suggested_command(parser: CommandParser[Given], word: str) -> str | None:
    """Suggest a command for a word that is a run's name, a checkpoint or an image folder; else None."""
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
    """Return a sentence for each file that cannot be written. Files are given by option name."""
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
    """Return the path if it has one of the endings, else raise `ValueError`."""
    path = Path(text)
    if path.suffix.lower() not in endings:
        ending = f"the ending {path.suffix}" if path.suffix else "no ending"
        raise ValueError(
            f"{text!r} has {ending}; the ending selects the format: {', '.join(endings)}"
        )
    return path


read_table = partial(read_path, (".json", ".jsonl", ".csv"))
read_plot = partial(read_path, (".png", ".svg"))


def read_columns(ending: str, text: str) -> Path:
    """Return the path if it has this ending or `.parquet`, else raise `ValueError`. Parquet needs pyarrow."""
    path = read_path((ending, ".parquet"), text)
    if path.suffix.lower() == ".parquet" and find_spec("pyarrow") is None:
        raise ValueError(f"a .parquet file needs pyarrow: pip install pyarrow, or write {ending}")
    return path


def read_count(text: str) -> int:
    """Parse a whole number of at least 1, or raise `ValueError`."""
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def read_number(what: str, text: str, most: float = math.inf) -> float:
    """Parse a positive number of at most `most`, or raise `ValueError`. Messages call the number `what`."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= most or value == math.inf:
        bound = "" if most == math.inf else f" of at most {most:g}"
        raise ValueError(f"{text!r} is not a positive {what}{bound}")
    return value
