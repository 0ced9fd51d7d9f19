"""Parses the command line. Pure: reads no file and converts no value.

Overrides are `KEY VALUE`, or Hydra's `KEY=VALUE` with its prefixes `+`, `++` and `~`; `--opts` before them is
accepted and changes nothing. A lower-case `group=name` selects a preset or a file of one's own.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from linnaeus.config.aliases import alias
from linnaeus.config.keys import KEYS, NODES, closest, is_open, suggest

FLAGS = ("--cfg", "--opts", "--print-config", "--origin", "--help", "-h", "--version")
SOURCES = {"--cfg": "a file", "--config-dir": "a folder", "--config-name": "the name of a file"}
"""The options that name what is read, and what each takes."""
OPTIONS = (*FLAGS, *(name for name in SOURCES if name not in FLAGS))
"""Every option of training, which the other commands take too."""
LONG_NAMES = {"-cd": "--config-dir", "-cn": "--config-name"}
"""The options with a short name, by it."""
_TOKEN = re.compile(r"(\+\+|\+|~)?([A-Za-z_][\w-]*(?:\.[\w-]+)*)(?:=(.*))?", re.DOTALL)
_GROUP = re.compile(r"(\+\+|\+|~)?([a-z][\w-]*(?:/[\w-]+)*(?:@\w+(?:\.\w+)*)?)(?:=(.*))?", re.DOTALL)
_NUMBER = re.compile(r"-[\d.]")


@dataclass(frozen=True)
class Override:
    """One key and the text of its value, as typed.

    Attributes:
        key: dotted name.
        text: the value; None for a `~KEY` without one.
        delete: undo what earlier sources set at the key, as `~KEY` asks for.
    """

    key: str
    text: str | None
    delete: bool = False


@dataclass
class CommandLine:
    """A parsed command line.

    Attributes:
        overrides: the overrides, in the order typed.
        presets: the file selected for each group, in the order typed; a group may end with `@PACKAGE`.
        left_out: the groups that `~group` leaves out, each with the name in `~group=name`; None without one.
        sources: `--cfg`, `--config-dir` and `--config-name` with their values, in the order typed.
        print_config: `--print-config` was given, or `--origin`, which goes with it.
        show_origins: `--origin` was given.
        stray: tokens that cannot be parsed: the name of a command in a wrong place, for one.
        problems: one sentence for each unusable token.
    """

    overrides: list[Override] = field(default_factory=list)
    presets: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str | None] = field(default_factory=dict)
    sources: list[tuple[str, str]] = field(default_factory=list)
    print_config: bool = False
    show_origins: bool = False
    stray: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def groups(self) -> dict[str, str]:
        """What is typed for each group: a name; `~`, or `~name`, where the group is left out."""
        return {**self.presets, **{group: f"~{name or ''}" for group, name in self.left_out.items()}}

    def named(self, option: str) -> list[str]:
        """The values of one of the options that name sources."""
        return [value for name, value in self.sources if name == option]

    def source_tokens(self) -> list[str]:
        """The tokens that name sources, and those that leave groups out."""
        left_out = [f"~{group}={name}" if name else f"~{group}" for group, name in self.left_out.items()]
        return [token for pair in self.sources for token in pair] + left_out


def parse_command_line(argv: Sequence[str]) -> CommandLine:
    """Parse the tokens after the program's name, left to right; problems are collected, not raised.

    >>> parse_command_line(["DATA.BATCH_SIZE", "8", "data=digits"]).overrides
    [Override(key='DATA.BATCH_SIZE', text='8', delete=False)]
    """
    line = CommandLine()
    tokens = deque(argv)
    while tokens:
        token = tokens.popleft()
        if token.startswith("-") and not _NUMBER.match(token):
            _flag(line, token, tokens)
        else:
            _override(line, token, tokens)
    return line


def _flag(line: CommandLine, token: str, tokens: deque[str]) -> None:
    """Read a flag; a value that follows it is taken from the other tokens."""
    name, has_value, value = token.partition("=")
    name = LONG_NAMES.get(name, name)
    if name in SOURCES:
        _source(line, name, value if has_value else None, tokens)
    elif name not in FLAGS:
        real = closest(name.lstrip("-")) if "." in name or name.lstrip("-").isupper() else None
        following = "-" if has_value or not tokens else tokens[0]
        meaning = f"keys have no dashes: {real}" if real else alias(name, value or following)
        hint = f"; {meaning}" if meaning else suggest(name, OPTIONS)
        line.problems.append(f"{name}: no such option{hint}")
        is_value = not re.match("-|.*=", following) and not _may_be_key(following)
        if meaning and is_value:
            tokens.popleft()
    elif has_value:
        line.problems.append(f"{name}: takes no value")
    elif name in ("--print-config", "--origin"):
        line.print_config = True
        line.show_origins |= name == "--origin"


def _source(line: CommandLine, name: str, value: str | None, tokens: deque[str]) -> None:
    if value is None and tokens and not _is_flag(tokens[0]):
        value = tokens.popleft()
    if value:
        line.sources.append((name, value))
    else:
        line.problems.append(f"{name}: needs {SOURCES[name]}")


def _override(line: CommandLine, token: str, tokens: deque[str]) -> None:
    """Read an override or a preset; a value that follows it is taken from the other tokens."""
    group = _GROUP.fullmatch(token)
    if group and (group[3] is not None or group[1] == "~"):
        _select(line, group[1], group[2], group[3])
        return
    match = _TOKEN.fullmatch(token)
    if not match:
        line.problems.append(_stray(line, token))
        return
    prefix, key, text = match.groups()
    if text is not None or prefix == "~":
        line.overrides.append(Override(key, text, delete=prefix == "~"))
    elif not _may_be_key(key):
        line.problems.append(_stray(line, token))
    elif not tokens or _is_flag(tokens[0]) or _begins_override(tokens[0]):
        line.problems.append(f"{key}: key without a value (command line)")
    else:
        line.overrides.append(Override(key, tokens.popleft()))


def _select(line: CommandLine, sign: str | None, group: str, text: str | None) -> None:
    """Note a choice in a group, or that the group is left out; `group=null` leaves it out as in Hydra."""
    name, chosen = (text or "").strip("'\""), line.presets.pop(group, None)  # the last one wins, at its place
    line.left_out.pop(group, None)
    if sign == "+" and chosen not in (None, name):
        both = ",".join(str(some).strip("[]") for some in (chosen, name))
        line.problems.append(f"+{group}: is given twice (command line); write +{group}=[{both}] for both")
    elif sign == "~" and name and chosen not in (None, name):
        line.problems.append(f"~{group}: is {chosen!r}, not {name!r}: nothing left out (command line)")
    elif sign == "~" or name == "null":
        line.left_out[group] = name if sign == "~" and name else None
    else:
        line.presets[group] = name


def _is_flag(token: str) -> bool:
    return token.partition("=")[0] in (*OPTIONS, *LONG_NAMES)


def _may_be_key(name: str) -> bool:
    """Whether a token without `=` is meant as a key: upper case, or a path with a node's name in any case."""
    top = name.partition(".")[0]
    return top.isupper() or ("." in name and (top.upper(),) in NODES)


def _begins_override(token: str) -> bool:
    """Whether a token that could be a value is more likely the next override."""
    match = _TOKEN.fullmatch(token)
    if not match:
        return False
    _, key, text = match.groups()
    path = tuple(key.split("."))
    return path in KEYS or (text is not None and is_open(path))


def _stray(line: CommandLine, token: str) -> str:
    line.stray.append(token)
    hint = f"; did you mean --cfg {token}?" if token.endswith((".yaml", ".yml")) else ""
    return f"{token!r}: neither KEY VALUE, KEY=VALUE, group=preset nor an option{hint}"
