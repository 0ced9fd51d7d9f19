"""Parses the command line of the configuration. Pure: reads no file.

Overrides are `KEY VALUE`, or Hydra's `KEY=VALUE` with its prefixes `+`, `++` and `~`. A lower-case
`group=name` selects a preset or your own file. Hydra's grammar reads the values.
"""

from __future__ import annotations

import copy
import functools
import os
import re
import typing
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from linnaeus.config.keys import KEYS, NODES, Path, is_open, strip_optional

SOURCES = {name: name for name in ("--cfg", "--config-dir", "--config-name")}
SOURCES |= {"-cd": "--config-dir", "-cn": "--config-name"}
"""Options that name files to read, with their long names."""
OPTIONS = ("--print-config", *SOURCES, "--opts")
"""Every option of the configuration; a command has others beside them."""
expanded = os.path.expanduser  # Path.expanduser raises for an unknown user
_KEY = re.compile(r"(\+\+|\+|~)?([A-Za-z_][\w-]*(?:\.[\w-]+)*)(?:=(.*))?", re.DOTALL)
_GROUP = re.compile(
    r"(\+\+|\+|~)?([a-z][\w-]*(?:/[\w-]+)*(?:@\w+(?:\.\w+)*)?)(?:=(.*))?", re.DOTALL
)


@dataclass(frozen=True)
class Override:
    """One key or group, and the text of its value, as typed.

    Attributes:
        key: dotted name of a key; name of a group, which may end with `@PACKAGE`.
        text: the value; None for a `~KEY`.
        delete: undo settings of earlier sources at the key, or leave out the group (`~`).
    """

    key: str
    text: str | None
    delete: bool = False

    @property
    def path(self) -> Path:
        """The key's components."""
        return tuple(self.key.split("."))

    def value(self) -> Any:
        """Return the value by Hydra's grammar; of a key that takes text, a scalar is the text as typed.

        Raises:
            ValueError: the text has several values, or is broken.
        """
        from omegaconf import OmegaConf  # here, because help and completion do not wait for it
        from omegaconf.errors import GrammarParseError

        hint = strip_optional(KEYS[self.path].hint)[0] if self.path in KEYS else None
        text = self.text or ""
        try:
            value = read_value(text)
        except SeveralValuesError as error:
            if typing.get_origin(hint) is list and "(" not in text:
                return read_value(f"[{text}]")
            raise ValueError(
                f"{error}; to run with each of them: linnaeus sweep {self.key}={text}"
            ) from None
        try:
            OmegaConf.create({"value": value})  # parses interpolations
        except GrammarParseError:
            raise ValueError(
                rf"{text!r:.80} is not a valid interpolation; text with ${{ is written \${{"
            ) from None
        is_scalar = isinstance(value, bool | int | float) and "(" not in text
        return text.strip() if hint is str and is_scalar else value


class SeveralValuesError(ValueError):
    """The values of a sweep, where one is wanted."""


def read_value(text: str) -> Any:
    """Return the value of a text by Hydra's grammar; most text outside the grammar is taken as typed.

    >>> read_value("[1, a]"), read_value("~/birds (2021)")
    ([1, 'a'], '~/birds (2021)')

    Raises:
        ValueError: the text has several values; or it begins like a list, a mapping, a quoted text or a
            function, and is none.
    """
    from hydra.errors import HydraException  # here, because Hydra takes long to import

    try:
        override = parsed(text)
    except (HydraException, RecursionError):
        if not re.match(r"\s*([\[{'\"]|\w+\()", text):
            return text
        raise ValueError(
            f"{text!r:.80} cannot be read by Hydra's grammar; quotes make it text"
        ) from None
    if override.is_sweep_override():
        raise SeveralValuesError(f"{text!r:.80} has several values; quotes make them one text")
    return copy.deepcopy(override.value())


@functools.lru_cache(maxsize=1000)
def parsed(text: str) -> Any:
    """Parse a value once: the runs of a sweep have most of theirs in common."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create().parse_override(f"value={text}")


def leaves(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every value of nested mappings with its key; an empty mapping and a list are values."""
    if isinstance(tree, Mapping) and tree:
        for name, child in tree.items():
            yield from leaves(child, (*path, name))
    else:
        yield path, tree


def typed_keys(overrides: Sequence[Override]) -> dict[Path, Any]:
    """Return the keys that overrides set or delete, with their values.

    Values that cannot be read are left out, and `{}`, which changes nothing below a key.
    """
    found: dict[Path, Any] = {}
    for override in overrides:
        with suppress(ValueError):
            value = None if override.text is None else override.value()
            found |= {path: each for path, each in leaves(value, override.path) if each != {}}
    return found


@dataclass
class CommandLine:
    """A parsed command line; all lists are in the order typed.

    Attributes:
        groups: the choice in each group.
        sources: `--cfg`, `--config-dir` and `--config-name` with their values.
        print_config: `--print-config` was given.
        stray: tokens that cannot be parsed: the name of a command in a wrong place, for one.
        problems: one sentence for each unusable token.
    """

    overrides: list[Override] = field(default_factory=list)
    groups: dict[str, Override] = field(default_factory=dict)
    sources: list[tuple[str, str]] = field(default_factory=list)
    print_config: bool = False
    stray: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def parse_command_line(argv: Sequence[str]) -> CommandLine:
    """Parse the tokens after the program's name, left to right; problems are collected, not raised.

    >>> parse_command_line(["DATA.BATCH_SIZE", "8", "data=digits"]).overrides
    [Override(key='DATA.BATCH_SIZE', text='8', delete=False)]
    """
    line = CommandLine()
    tokens = deque(argv)
    while tokens:
        token = tokens.popleft()
        name, _, value = token.partition("=")
        if name in SOURCES:
            if "=" not in token and tokens and not tokens[0].startswith("-"):
                value = tokens.popleft()
            if value and "\0" not in value:
                line.sources.append((SOURCES[name], expanded(value)))
            else:
                line.problems.append(f"{name}: needs a value")
        elif token in OPTIONS:
            line.print_config |= token != "--opts"
        elif token.startswith("~") and "=" in token:
            line.problems.append(f"{token}: takes no value: {token.partition('=')[0]}")
        elif (match := _GROUP.fullmatch(token)) and (match[3] is not None or match[1] == "~"):
            line.groups.pop(match[2], None)
            text = (match[3] or "").strip("'\"")
            is_choice = text not in ("", "null")
            line.groups[match[2]] = Override(match[2], text if is_choice else None, not is_choice)
        elif (match := _KEY.fullmatch(token)) and (match[3] is not None or match[1] == "~"):
            line.overrides.append(Override(match[2], match[3], delete=match[1] == "~"))
        elif match and tokens and re.match(r"=(?!=)", tokens[0]):
            value = tokens.popleft()[1:] or (tokens.popleft() if tokens else "VALUE")
            line.problems.append(f"{match[2]}: no blanks around `=`; write {match[2]}={value}")
        elif not match or not _is_key(match[2]):
            line.stray.append(token)
            hint = f"; did you mean --cfg {token}?" if token.endswith((".yaml", ".yml")) else ""
            if line.overrides and line.overrides[-1].text == "":
                hint = f"; write {line.overrides[-1].key}={token} without a blank"
            line.problems.append(
                f"{token!r}: neither KEY VALUE, KEY=VALUE, group=preset nor an option{hint}"
            )
        elif not tokens or _begins_next(tokens[0]):
            line.problems.append(f"{match[2]}: key without a value (command line)")
        else:
            line.overrides.append(Override(match[2], tokens.popleft()))
    return line


def _is_key(name: str) -> bool:
    """Return whether a word is meant as a key: upper case, or a path with a node's name in any case."""
    top = name.partition(".")[0]
    return top.isupper() or ("." in name and (top.upper(),) in NODES)


def _begins_next(token: str) -> bool:
    """Whether a token after a key is not its value: it is an option, or more likely the next override."""
    match = _KEY.fullmatch(token)
    path = tuple(match[2].split(".")) if match else ()
    return token.partition("=")[0] in OPTIONS or path in KEYS or ("=" in token and is_open(path))
