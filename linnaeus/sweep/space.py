"""From a command line with lists and intervals to the command line of each run. Pure: nothing is run."""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hydra.core.override_parser.types import IntervalSweep
from hydra.errors import HydraException

from linnaeus.config.keys import KEYS, strip_optional
from linnaeus.config.overrides import CommandLine, Override, parse_command_line, parsed
from linnaeus.sweep.values import sweep_values

NOT_SWEPT = ("EXPERIMENT.NAME", "EXPERIMENT.OUTPUT_DIR")
"""Keys that say where the sweep's files are."""
MAX_LETTERS = 120
"""Bound on the length of a combination's name; file systems take 255 bytes."""
_UNSAFE = re.compile(r"[^A-Za-z0-9_.,=+\[\]-]+")
LOG_RATIO = 100.0
"""An interval whose ends differ by this factor is searched by its logarithm."""
DIGITS = 6
"""Significant digits of a value in an interval, as typed and named."""


@dataclass(frozen=True)
class Combination:
    """One point of the grid.

    Attributes:
        values: the text of each swept key's or preset group's value.
        argv: tokens for `load_config`.
    """

    values: dict[str, str]
    argv: tuple[str, ...]

    @property
    def title(self) -> str:
        """The combination as typed on a command line."""
        return title_of(self.values)

    @property
    def name(self) -> str:
        """The name of its folder: readable, the same in every sweep, different for every combination."""
        wanted = ",".join(f"{key}={value}" for key, value in self.values.items())
        safe = _UNSAFE.sub("-", wanted)
        if safe == wanted and len(safe) <= MAX_LETTERS:
            return safe
        digest = hashlib.sha256(wanted.encode()).hexdigest()[:8]
        return f"{safe[: MAX_LETTERS - 9]}-{digest}"


def title_of(values: Mapping[str, str]) -> str:
    """Return the values of a run as they are typed on a command line."""
    return " ".join(f"{key}={value}" for key, value in values.items())


@dataclass(frozen=True)
class Axis:
    """The values of one key.

    Attributes:
        key: dotted name of a key, or a group of presets.
        low, high: ends of an interval, both included.
        is_log: whether the logarithm is searched.
        is_whole: whether the values are whole numbers.
        choices: the values where they are no interval, as typed.
    """

    key: str
    low: float = 0.0
    high: float = 0.0
    is_log: bool = False
    is_whole: bool = False
    choices: tuple[str, ...] = ()

    def ends(self) -> tuple[str, ...]:
        """Return the choices, or the ends of the interval, as typed."""
        return self.choices or (self.text(self.low), self.text(self.high))

    def text(self, value: Any) -> str:
        """Return a value as typed."""
        if self.choices or self.is_whole:
            return str(value if self.choices else int(value))
        return f"{value:.{DIGITS}g}"


@dataclass
class Space:
    """The combinations of a sweep, or the points that a search may try.

    Attributes:
        line: the whole command line, with intervals and lists as typed.
        axes: the keys and groups with several values, in the order typed, presets first.
        problems: one sentence for each token that cannot be used.
    """

    line: CommandLine
    axes: list[Axis] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    _overrides: list[Override] = field(default_factory=list)

    def combination(self, texts: Mapping[str, str]) -> Combination:
        """Return the point with these values, by key."""
        chosen = (replace(each, text=texts.get(each.key, each.text)) for each in self._overrides)
        sources = (token for source in self.line.sources for token in source)
        return Combination(dict(texts), (*sources, *map(token_of, chosen)))

    def grid(self) -> Iterator[Combination]:
        """All points where each axis is a list, the first key changing most slowly."""
        for texts in itertools.product(*(axis.choices for axis in self.axes)):
            keys = (axis.key for axis in self.axes)
            yield self.combination(dict(zip(keys, texts, strict=True)))

    def corners(self) -> Iterator[Combination]:
        """Yield points that cover each end and each choice, so that each invalid value is in one of them."""
        count = max((len(axis.ends()) for axis in self.axes), default=0)
        for number in range(count):
            yield self.combination(
                {axis.key: axis.ends()[number % len(axis.ends())] for axis in self.axes}
            )


def read_space(argv: Sequence[str], *, is_search: bool = False) -> Space:
    """Read the lists of a command line, and the intervals of a search; problems are collected, not raised.

    `load_config` finds mistakes of other tokens.

    >>> space = read_space(["DATA.BATCH_SIZE=32,64", "TRAIN.EPOCHS", "2", "OPTIMIZER.LR=range(1,3)"])
    >>> points = list(space.grid())
    >>> points[0].title, points[1].title
    ('DATA.BATCH_SIZE=32 OPTIMIZER.LR=1', 'DATA.BATCH_SIZE=32 OPTIMIZER.LR=2')
    >>> points[3].argv
    ('DATA.BATCH_SIZE=64', 'TRAIN.EPOCHS=2', 'OPTIMIZER.LR=2')
    >>> argv = ["OPTIMIZER.LR=interval(1e-4,1e-1)", "DATA.BATCH_SIZE=interval(8,64)"]
    >>> space = read_space(argv, is_search=True)
    >>> [(axis.is_log, axis.is_whole) for axis in space.axes]
    [(True, False), (False, True)]
    >>> [corner.title for corner in space.corners()]
    ['OPTIMIZER.LR=0.0001 DATA.BATCH_SIZE=8', 'OPTIMIZER.LR=0.1 DATA.BATCH_SIZE=64']
    """
    line = parse_command_line(argv)
    space = Space(line)
    for override in effective(line):
        try:
            axis = _axis(override, is_search=is_search)
        except ValueError as error:
            space.problems.append(f"{override.key}: {error}")
            continue
        if axis is not None and len(axis.choices) == 1:
            override = replace(override, text=axis.choices[0])
        elif axis is not None:
            space.axes.append(axis)
        space._overrides.append(override)
    if not space.axes and not space.problems:
        example = (
            "an interval, such as OPTIMIZER.LR='interval(1e-4,1e-1)', or several values"
            if is_search
            else "several values, such as DATA.BATCH_SIZE=32,64"
        )
        space.problems.append(f"there is nothing to sweep: give at least one key {example}")
    return space


def effective(line: CommandLine) -> list[Override]:
    """Groups and keys in the order in which they are applied; a repeated key has its last place."""
    last: dict[str, Override] = {}
    for override in line.overrides:
        last.pop(override.key, None)
        last[override.key] = override
    return [*line.groups.values(), *last.values()]


def token_of(override: Override) -> str:
    """Return an override as typed."""
    text = "" if override.text is None else f"={override.text}"
    return f"{'~' if override.delete else ''}{override.key}{text}"


def _axis(override: Override, *, is_search: bool) -> Axis | None:
    """Return the values of a key; None for one without a value; `ValueError` where they cannot be read."""
    key, text = override.key, override.text
    if override.delete or text is None:
        return None
    if "interval(" in text and not is_search:
        raise ValueError(f"{text!r} is for a search: add --search optuna --trials N")
    choices = () if "interval(" in text else tuple(sweep_values(text))
    if key in NOT_SWEPT and len(choices) != 1:
        raise ValueError("says where the sweep's files are and takes one value")
    return Axis(key, choices=choices) if choices else _interval(key, text)


def _interval(key: str, text: str) -> Axis:
    try:
        value = parsed(text).value()
    except (HydraException, RecursionError):
        value = None
    if not isinstance(value, IntervalSweep):
        raise ValueError(f"{text!r} is no interval; write interval(low,high) with two numbers")
    low, high = float(value.start or 0), float(value.end or 0)
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"{text!r}: the first end of an interval is to be below the second")
    if _type_of(key) in (str, bool):
        raise ValueError(
            f"{text!r}: an interval has numbers, and this key takes none; list its values"
        )
    is_log = "log" in value.tags or (
        "linear" not in value.tags and low > 0 and high / low >= LOG_RATIO
    )
    if is_log and low <= 0:
        raise ValueError(f"{text!r}: tag(log, ...) needs ends above 0")
    is_whole = isinstance(value.start, int) or _type_of(key) is int
    if is_whole:
        low, high = math.ceil(low), math.floor(high)
        if low > high:
            raise ValueError(f"{text!r}: there is no whole number in it")
    return Axis(key, low, high, is_log=is_log, is_whole=is_whole)


def _type_of(key: str) -> Any:
    """Return the type of a key's values; None for one that the schema does not know."""
    known = KEYS.get(tuple(key.split(".")))
    return None if known is None else strip_optional(known.hint)[0]
