"""What may stand at the cursor of a command line. A TAB waits for it: it imports neither torch nor Hydra."""

from __future__ import annotations

import argparse
import pkgutil
from collections.abc import Sequence
from importlib import import_module
from itertools import pairwise
from pathlib import Path

from linnaeus import cli
from linnaeus.cli.completion import SHELLS
from linnaeus.cli.options import CommandParser
from linnaeus.config.keys import KEYS, NODES, PLUGGABLE_PATHS, TARGET, Key, dotted, strip_optional
from linnaeus.config.overrides import LONG_NAMES, OPTIONS, SOURCES
from linnaeus.config.presets import FOLDER, expanded, files_of
from linnaeus.launchers.options import HELP as LAUNCH_HELP
from linnaeus.launchers.options import LAUNCHERS

Candidates = dict[str, str]
"""Whole words, each with a short text for shells that show one. Words ending in `=` or `.` go on."""

FILES: Candidates = {":files": ""}
"""The shell completes names of files by itself."""

TRAIN = "train"
_FLAGS = (*OPTIONS, *LAUNCH_HELP, "--multirun", "--install-completion", "--show-completion")
_FILE_FLAGS = ("--cfg", "--config-dir")
_FILE_METAVARS = ("FILE", "DIR", "FOLDER", "DIR/PREFIX")
_PREFIXES = ("++", "+", "~")
_NAMES: dict[str, Key | None] = {dotted(path): key for path, key in KEYS.items()} | {
    f"{dotted(path)}.{TARGET}": None for path in sorted(PLUGGABLE_PATHS)
}


def complete(words: Sequence[str]) -> Candidates:
    """The candidates for the last word.

    Args:
        words: those after `linnaeus`, up to the cursor; the last one may be empty.

    >>> list(complete(["DATA.AUTOBATCH.STR"])), list(complete(["DATA.AUTOBATCH.STRATEGY=b"]))
    (['DATA.AUTOBATCH.STRATEGY='], ['DATA.AUTOBATCH.STRATEGY=binary', 'DATA.AUTOBATCH.STRATEGY=binsearch'])
    """
    *before, word = (_long(word) for word in words)
    names = command_names()
    command = before[0] if before and before[0] in names else TRAIN
    if before and (found := _after_option(command, before[-1], word, before)) is not None:
        return found
    if _takes_run(command) and len(before) == 1 and not word.startswith("-"):
        return FILES
    if before and before[-1] in _NAMES:
        values = _values(_NAMES[before[-1]])
        return values if values is FILES else _starting(values, word)
    if word.startswith("-"):
        return _option(command, word, before)
    if not _takes_overrides(command):
        return FILES
    if "=" in word:
        return _assignment(
            word, before, is_sweep=command == "sweep" or bool({"-m", "--multirun"} & {*before})
        )
    found = _starting(names, word) if not before else {}
    sign = next((sign for sign in _PREFIXES if word.startswith(sign)), "")
    ending = "" if sign == "~" else "="
    found |= _starting({f"{sign}{group}{ending}": "preset" for group in _groups(before)}, word)
    return found | _keys(word) or FILES


def _long(word: str) -> str:
    """The word, with the long name of an option in place of its short one."""
    name, equals, value = word.partition("=")
    return f"{LONG_NAMES.get(name, name)}{equals}{value}"


def command_names() -> dict[str, str]:
    """The packages of `linnaeus.cli` that are commands, each with its docstring."""
    packages = [module.name for module in pkgutil.iter_modules(cli.__path__) if module.ispkg]
    found = {name: import_module(f"{cli.__name__}.{name}") for name in packages}
    own = __name__.split(".")[-2]
    return {name: (module.__doc__ or "").strip() for name, module in found.items() if name != own}


def _starting(candidates: Candidates, word: str) -> Candidates:
    return {name: text for name, text in candidates.items() if name.startswith(word)}


# Options.


def _takes_run(command: str) -> bool:
    """Whether the first word after the command is the folder of a run, and keys may follow it."""
    parser = _parser(command)
    return parser is not None and parser.takes_run


def _takes_overrides(command: str) -> bool:
    """Whether keys and presets may follow a command; others take names of files."""
    parser = _parser(command)
    return parser is None or parser.takes_overrides


def _parser(command: str) -> CommandParser | None:
    """The parser of a command; None for training, which has no options of its own."""
    if command == TRAIN:
        return None
    parser: CommandParser = import_module(f"{cli.__name__}.{command}.options").PARSER
    return parser


def _actions(command: str) -> Sequence[argparse.Action]:
    """The options of a command beside those that all have."""
    parser = _parser(command)
    return [] if parser is None else parser._actions


def _options(command: str) -> Candidates:
    own = {name: action.help or "" for action in _actions(command) for name in action.option_strings}
    if not _takes_overrides(command):
        return own
    flags = _FLAGS if command == TRAIN else OPTIONS
    return {name: "" for name in flags if not (_takes_run(command) and name in SOURCES)} | own


def _option(command: str, word: str, before: Sequence[str]) -> Candidates:
    name, has_value, value = word.partition("=")
    if has_value:
        found = _after_option(command, name, value, before) or {}
        return FILES if found is FILES else {f"{name}={value}": text for value, text in found.items()}
    return _starting(_options(command), word)


def _after_option(command: str, option: str, word: str, before: Sequence[str]) -> Candidates | None:
    """The values of an option; None where it takes none."""
    if not option.startswith("--"):
        return None
    if option in _FILE_FLAGS:
        return FILES
    if option == "--config-name":
        return _starting(_names_of_files(before), word)
    if option in ("--install-completion", "--show-completion"):
        return _starting(dict.fromkeys(SHELLS, ""), word)
    if option == "--launcher":
        return _starting(dict.fromkeys(LAUNCHERS, ""), word)
    for action in _actions(command):
        if option in action.option_strings and action.nargs != 0:
            return FILES if action.metavar in _FILE_METAVARS else _choices(action, word)
    return None


def _choices(action: argparse.Action, word: str) -> Candidates:
    """The values that the option's metavar lists, such as `best|last|FILE`; where none fits, a file may."""
    parts = str(action.metavar).split("|")
    found = _starting(dict.fromkeys([part for part in parts if not part.isupper()], ""), word)
    return found or (FILES if set(parts) & set(_FILE_METAVARS) else {})


# Keys, presets and their values.


def _keys(word: str) -> Candidates:
    """The keys that begin so, up to the next dot; where only one group does, the keys in it."""
    sign = next((sign for sign in _PREFIXES if word.startswith(sign)), "")
    bare = word.removeprefix(sign)
    while True:
        found = _next_parts(bare)
        if len(found) != 1 or not (only := next(iter(found))).endswith("."):
            break
        bare = only
    ending = "=" if sign != "~" else ""
    return {sign + (name if name.endswith(".") else name + ending): text for name, text in found.items()}


def _next_parts(word: str) -> Candidates:
    found: Candidates = {}
    for name, key in _NAMES.items():
        if name.startswith(word):
            end = name.find(".", len(word)) + 1
            node = tuple(name[: end - 1].split("."))
            found[name[:end] or name] = (
                NODES.get(node, "") if end else (key.doc if key else "a class of yours")
            )
    return found


def _assignment(word: str, before: Sequence[str], *, is_sweep: bool) -> Candidates:
    """Values of a key or presets of a group; in a sweep, those after the last comma."""
    name, _, value = word.partition("=")
    sign = next((sign for sign in _PREFIXES if name.startswith(sign)), "")
    done, comma, value = value.rpartition(",") if is_sweep else ("", "", value)
    bare = name.removeprefix(sign)
    known = _values(_NAMES[bare]) if bare in _NAMES else _groups(before).get(bare.partition("@")[0], {})
    if known is FILES:
        return FILES
    return {f"{name}={done}{comma}{item}": text for item, text in known.items() if item.startswith(value)}


def _values(key: Key | None) -> Candidates:
    """The choices of a key. Text without choices may name a file; numbers have none."""
    if key is None:
        return {}
    hint, is_optional = strip_optional(key.hint)
    null = {"null": ""} if is_optional else {}
    if key.choices:
        return dict.fromkeys(key.choices, "") | null
    if hint is bool:
        return {"True": "", "False": ""} | null
    return FILES if hint is str else null


def _groups(before: Sequence[str]) -> dict[str, Candidates]:
    """Presets by group: those of the package, and of the folders that the words before name."""
    found: dict[str, Candidates] = {}
    for folder in [FOLDER, *_folders(before)]:
        for group, files in files_of(folder).items():
            found.setdefault(group, {}).update({file.stem: _first_comment(file) for file in files})
    return found


def _folders(before: Sequence[str]) -> list[Path]:
    """The folders of `--config-dir` in the words before."""
    named = [value for option, value in pairwise(before) if option == "--config-dir"]
    named += [word.removeprefix("--config-dir=") for word in before if word.startswith("--config-dir=")]
    return [expanded(folder) for folder in named]


def _names_of_files(before: Sequence[str]) -> Candidates:
    """The files at the top of the folders of `--config-dir`."""
    files = [file for folder in _folders(before) for file in files_of(folder, is_top=True).get(".", [])]
    return {file.stem: _first_comment(file) for file in files}


def _first_comment(file: Path) -> str:
    """What a preset says about itself, in the comment under the line with its package."""
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()[:2]
    except OSError:  # it may be chosen all the same, and the error then says why it cannot be read
        return ""
    return next((line[1:].strip() for line in lines if line[:1] == "#" and "@package" not in line), "")
