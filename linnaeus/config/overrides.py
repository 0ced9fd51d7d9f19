"""Parses the command line of the configuration. Pure: reads no file and converts no value.

Overrides are `KEY VALUE`, or Hydra's `KEY=VALUE` with its prefixes `+`, `++` and `~`. A lower-case
`group=name` selects a preset or a file of one's own.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from linnaeus.config.keys import KEYS, NODES, is_open

SOURCES = {name: name for name in ("--cfg", "--config-dir", "--config-name")}
SOURCES |= {"-cd": "--config-dir", "-cn": "--config-name"}
"""The options that name what is read, with their long names."""
OPTIONS = ("--print-config", "--origin", *SOURCES, "--opts")
"""Every option of the configuration; a command has others beside them."""
expanded = os.path.expanduser  # that of Path fails for an unknown user
_KEY = re.compile(r"(\+\+|\+|~)?([A-Za-z_][\w-]*(?:\.[\w-]+)*)(?:=(.*))?", re.DOTALL)
_GROUP = re.compile(
    r"(\+\+|\+|~)?([a-z][\w-]*(?:/[\w-]+)*(?:@\w+(?:\.\w+)*)?)(?:=(.*))?", re.DOTALL
)


@dataclass(frozen=True)
class Override:
    """One key or group, and the text of its value, as typed.

    Attributes:
        key: dotted name of a key; name of a group, which may end with `@PACKAGE`.
        text: the value; None for a `~KEY` without one.
        delete: undo what earlier sources set at the key, or leave out the group, as `~` asks for.
    """

    key: str
    text: str | None
    delete: bool = False


@dataclass
class CommandLine:
    """A parsed command line; all lists are in the order typed.

    Attributes:
        groups: what is chosen in each group.
        sources: `--cfg`, `--config-dir` and `--config-name` with their values.
        print_config: `--print-config` was given, or `--origin`, which goes with it.
        stray: tokens that cannot be parsed: the name of a command in a wrong place, for one.
        problems: one sentence for each unusable token.
    """

    overrides: list[Override] = field(default_factory=list)
    groups: dict[str, Override] = field(default_factory=dict)
    sources: list[tuple[str, str]] = field(default_factory=list)
    print_config: bool = False
    show_origins: bool = False
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
            line.show_origins |= token == "--origin"
        elif (match := _GROUP.fullmatch(token)) and (match[3] is not None or match[1] == "~"):
            _choose(line, match[1], match[2], match[3])
        elif (match := _KEY.fullmatch(token)) and (match[3] is not None or match[1] == "~"):
            line.overrides.append(Override(match[2], match[3], delete=match[1] == "~"))
        elif not match or not _is_key(match[2]):
            line.stray.append(token)
            hint = f"; did you mean --cfg {token}?" if token.endswith((".yaml", ".yml")) else ""
            line.problems.append(
                f"{token!r}: neither KEY VALUE, KEY=VALUE, group=preset nor an option{hint}"
            )
        elif not tokens or _begins_next(tokens[0]):
            line.problems.append(f"{match[2]}: key without a value (command line)")
        else:
            line.overrides.append(Override(match[2], tokens.popleft()))
    return line


def _choose(line: CommandLine, sign: str | None, group: str, text: str | None) -> None:
    """Note a choice in a group, the last of several; `group=null` leaves the group out, as in Hydra."""
    name = (text or "").strip("'\"")
    line.groups.pop(group, None)
    is_left_out = sign == "~" or name == "null"
    line.groups[group] = Override(
        group, None if is_left_out and name in ("", "null") else name, is_left_out
    )


def _is_key(name: str) -> bool:
    """Whether a word is meant as a key: upper case, or a path with a node's name in any case."""
    top = name.partition(".")[0]
    return top.isupper() or ("." in name and (top.upper(),) in NODES)


def _begins_next(token: str) -> bool:
    """Whether a token after a key is not its value: it is an option, or more likely the next override."""
    match = _KEY.fullmatch(token)
    path = tuple(match[2].split(".")) if match else ()
    return token.partition("=")[0] in OPTIONS or path in KEYS or ("=" in token and is_open(path))
