"""Options of a command, `--name VALUE` or `--name=VALUE`, between the overrides. Pure: no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from linnaeus.config.keys import suggest
from linnaeus.config.load import LoadedConfig, load_config
from linnaeus.config.overrides import FLAGS
from linnaeus.errors import ConfigError

TABLE_ENDINGS = (".json", ".jsonl", ".csv")
PLOT_ENDINGS = (".png", ".svg", ".html")


@dataclass(frozen=True)
class Grammar:
    """The options that a command takes. `--some-name` fills the attribute `some_name`.

    Attributes:
        readers: from the text of an option to its value; raises `ValueError` with what is wrong.
        switches: options without a value.
        keys: the keys that an option stands for; it fills no attribute then.
    """

    readers: Mapping[str, Callable[[str], Any]]
    switches: Sequence[str] = ()
    keys: Mapping[str, Sequence[str]] = field(default_factory=dict)


def read_command_line(argv: Sequence[str], options: object, grammar: Grammar) -> LoadedConfig:
    """Read a command line: the options into their object, the rest into a configuration.

    Raises:
        ConfigError: lists everything that is wrong, with the options and in the configuration.
    """
    rest, problems = take_options(argv, options, grammar)
    try:
        loaded = load_config(rest)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    if problems and not loaded.show_help:
        raise ConfigError(problems)
    return loaded


def take_options(argv: Sequence[str], options: object, grammar: Grammar) -> tuple[list[str], list[str]]:
    """Take the options out of a command line; those that set a key become overrides in their place.

    Args:
        argv: the tokens after the command.
        options: its attributes are filled.
        grammar: which options there are.

    Returns:
        The tokens for `load_config`, and one sentence for each problem.
    """
    rest, problems = list[str](), list[str]()
    tokens = list(argv)
    while tokens:
        name, has_value, value = tokens[0].partition("=")
        if name in grammar.switches and has_value:
            problems.append(f"{name}: takes no value")
        elif name in grammar.switches:
            setattr(options, _attribute(name), True)
        elif name in grammar.readers:
            if not has_value and len(tokens) > 1 and not tokens[1].startswith("--"):
                value = tokens.pop(1)
            try:
                rest += _take(options, grammar, name, value)
            except ValueError as error:
                problems.append(f"{name}: {error}")
        elif name.startswith("--") and name not in FLAGS and "." not in name:
            problems.append(
                f"{name}: no such option{suggest(name, [*grammar.readers, *grammar.switches, *FLAGS])}"
            )
        else:
            rest.append(tokens[0])
        tokens.pop(0)
    return rest, problems


def _take(options: object, grammar: Grammar, name: str, text: str) -> list[str]:
    """Read an option's value into the options, or into overrides of the keys that it stands for."""
    if not text:
        raise ValueError("needs a value; --help shows examples")
    value = grammar.readers[name](text)
    if name not in grammar.keys:
        setattr(options, _attribute(name), value)
    return [f"{key}={value}" for key in grammar.keys.get(name, ())]


def _attribute(name: str) -> str:
    return name.removeprefix("--").replace("-", "_")


def read_path(endings: Sequence[str]) -> Callable[[str], Path]:
    """A reader of files whose ending says the format."""

    def read(text: str) -> Path:
        path = Path(text)
        if path.suffix.lower() not in endings:
            ending = f"the ending {path.suffix}" if path.suffix else "no ending"
            raise ValueError(f"{text!r} has {ending}; the ending says the format: {', '.join(endings)}")
        return path

    return read


def read_count(text: str) -> int:
    """A whole number of at least 1.

    Raises:
        ValueError: it is something else.
    """
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def read_positive(what: str) -> Callable[[str], float]:
    """A reader of positive numbers, with what they are in messages, such as `number of GiB`."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            raise ValueError(f"{text!r} is not a positive {what}")
        return value

    return read


def read_share(text: str) -> float:
    """A share of the device's memory, in (0, 1].

    Raises:
        ValueError: it is something else.
    """
    try:
        fraction = float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number; give shares of the memory such as 0.6,0.8") from None
    if not 0 < fraction <= 1:
        raise ValueError(f"{text} is outside (0, 1]; give shares of the device's memory such as 0.6,0.8")
    return fraction
