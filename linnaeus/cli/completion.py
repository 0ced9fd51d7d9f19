"""What may stand at the cursor of a command line.

argcomplete talks to the shell, and asks here for whole words. A TAB waits for it, without torch and Hydra.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from linnaeus.cli.main import COMMANDS, part_of
from linnaeus.cli.parser import CommandParser
from linnaeus.config.keys import KEYS, PLUGGABLE_PATHS, TARGET, available, dotted, strip_optional
from linnaeus.config.overrides import parse_command_line

NAMES = {dotted(path): key.doc for path, key in KEYS.items()} | {
    f"{dotted(path)}.{TARGET}": "a class of your own" for path in PLUGGABLE_PATHS
}
"""The keys, each with its text."""


def complete() -> int:
    """Answer the shell and end the process; returns an exit code only where argcomplete is not installed."""
    try:
        import argcomplete
    except ImportError:
        return 1
    line, point = os.environ["COMP_LINE"], int(os.environ["COMP_POINT"])
    quote, word, _, words, _ = argcomplete.split_line(line, point)
    # argcomplete sees the last word alone: it would stop at the first option behind a word.
    os.environ["COMP_LINE"] = f"linnaeus {quote}{word}"
    os.environ["COMP_POINT"] = str(len(os.environ["COMP_LINE"]))
    parser = argparse.ArgumentParser(prefix_chars="\0", add_help=False)
    action = parser.add_argument("word", nargs="?")
    action.completer = lambda prefix, **_: candidates(words[1:], prefix)  # type: ignore[attr-defined]
    argcomplete.autocomplete(parser)
    return 0


def candidates(words: Sequence[str], word: str) -> dict[str, str]:
    """The words that begin with `word`, each with a short text; `words` stand before it, after `linnaeus`.

    >>> list(candidates([], "DATA.AUTOBATCH.STR")), list(candidates(["TRAIN.AMP"], "b"))
    (['DATA.AUTOBATCH.STRATEGY='], ['bf16'])
    """
    begin, found = _candidates(words, word)
    matching = {
        f"{begin}{name}": text for name, text in found.items() if f"{begin}{name}".startswith(word)
    }
    if matching:
        return matching
    from argcomplete.completers import FilesCompleter

    begin = word[: word.find("=") + 1]
    return {f"{begin}{name}": "" for name in FilesCompleter()(word.removeprefix(begin))}


def _candidates(words: Sequence[str], word: str) -> tuple[str, dict[str, str]]:
    """What stands before the candidates in the word, and the candidates; none where a file may stand.

    Of several values with commas between them, the last one is completed.
    """
    command = words[0] if words and words[0] in COMMANDS else "train"
    parser: CommandParser = part_of(command, "PARSER")
    # argparse has no public list of options.
    options = {name: action for action in parser._actions for name in action.option_strings}
    name, has_value, _ = word.partition("=")
    begin = (
        word[: max(word.rfind(","), len(name)) + 1] if has_value else word[: word.rfind(",") + 1]
    )
    option = options.get(name if has_value else words[-1] if words else "")
    if option is not None and option.nargs != 0:
        choices = option.choices or [
            part for part in str(option.metavar).split("|") if part.islower()
        ]
        return begin, dict.fromkeys(choices, "")
    if word.startswith("-"):
        return "", {name: action.help or "" for name, action in options.items()}
    if not parser.takes_overrides or (parser.takes_run and len(words) == 1):
        return "", {}
    groups = _groups(words)
    if has_value:
        bare = name.lstrip("+~").partition("@")[0]
        return begin, _values(bare) or groups.get(bare, {})
    if words and words[-1] in NAMES:
        return "", _values(words[-1])
    sign = word[: len(word) - len(word.lstrip("+~"))]
    end = "" if "~" in sign else "="
    found = {} if words else dict(COMMANDS)
    found |= {f"{sign}{group}{end}": "preset" for group in groups}
    return "", found | {f"{sign}{name}{end}": text for name, text in NAMES.items()}


def _values(name: str) -> dict[str, str]:
    """The choices of a key; none for text and numbers."""
    key = KEYS.get(tuple(name.split(".")))
    if key is None:
        return {}
    hint, is_optional = strip_optional(key.hint)
    choices = key.choices or (("True", "False") if hint is bool else ())
    return dict.fromkeys([*choices, *(["null"] if is_optional and choices else [])], "")


def _groups(words: Sequence[str]) -> dict[str, dict[str, str]]:
    """Presets by group: those of the package, and of the folders that the words before name."""
    sources = parse_command_line(words).sources
    folders = [Path(name) for option, name in sources if option == "--config-dir"]
    return {group: dict.fromkeys(names, "") for group, names in available(*folders).items()}
