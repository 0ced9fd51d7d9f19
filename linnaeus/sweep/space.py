"""The space that a search looks through: which values each swept key may have. Pure: nothing is run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep
from hydra.errors import HydraException

from linnaeus.config.keys import KEYS, strip_optional
from linnaeus.config.overrides import CommandLine, Override, parse_command_line
from linnaeus.sweep.grid import Combination, check_may_be_swept, effective, token_of
from linnaeus.sweep.values import sweep_values

LOG_RATIO = 100.0
"""An interval whose ends differ by this factor is searched by its logarithm."""
DIGITS = 6
"""Significant digits of a value in an interval, as it is typed and named."""


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
        """The choices, or the ends of the interval, as typed."""
        return self.choices or (self.text(self.low), self.text(self.high))

    def text(self, value: Any) -> str:
        """A value as it is typed."""
        if self.choices or self.is_whole:
            return str(value if self.choices else int(value))
        return f"{value:.{DIGITS}g}"


@dataclass
class Space:
    """What a search may try.

    Attributes:
        line: the whole command line, with intervals and lists as typed.
        axes: in the order typed, presets first.
        problems: one sentence for each token that cannot be used.
    """

    line: CommandLine
    axes: list[Axis] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    _overrides: list[Override] = field(default_factory=list)

    def combination(self, texts: Mapping[str, str]) -> Combination:
        """The point with these values, by key."""
        chosen = (replace(each, text=texts.get(each.key, each.text)) for each in self._overrides)
        sources = (token for source in self.line.sources for token in source)
        return Combination(dict(texts), (*sources, *map(token_of, chosen)))

    def corners(self) -> Iterator[Combination]:
        """Points with each end and each choice: what is wrong with a key alone shows in one of them."""
        count = max(len(axis.ends()) for axis in self.axes)
        for number in range(count):
            yield self.combination(
                {axis.key: axis.ends()[number % len(axis.ends())] for axis in self.axes}
            )


def read_space(argv: Sequence[str]) -> Space:
    """Read the intervals and lists of a command line; problems are collected, not raised.

    >>> space = read_space(["OPTIMIZER.LR=interval(1e-4,1e-1)", "DATA.BATCH_SIZE=interval(8,64)", "A=2"])
    >>> [(axis.is_log, axis.is_whole) for axis in space.axes]
    [(True, False), (False, True)]
    >>> [corner.title for corner in space.corners()]
    ['OPTIMIZER.LR=0.0001 DATA.BATCH_SIZE=8', 'OPTIMIZER.LR=0.1 DATA.BATCH_SIZE=64']
    """
    line = parse_command_line(argv)
    space = Space(line, _overrides=effective(line))
    for override in space._overrides:
        try:
            axis = (
                None
                if override.delete or override.text is None
                else _axis(override.key, override.text)
            )
            if axis is not None:
                check_may_be_swept(axis.key)
                space.axes.append(axis)
        except ValueError as error:
            space.problems.append(f"{override.key}: {error}")
    if not space.axes and not space.problems:
        space.problems.append(
            "there is nothing to search: give a key an interval, such as OPTIMIZER.LR='interval(1e-4,1e-1)', "
            "or several values"
        )
    return space


def _axis(key: str, text: str) -> Axis | None:
    """The values in a text; None for one value; `ValueError` where they cannot be read."""
    try:
        value = OverridesParser.create().parse_override(f"value={text}").value()
    except (HydraException, RecursionError):
        if "interval" in text:
            raise ValueError(
                f"{text!r} is no interval; write interval(low,high) with two numbers"
            ) from None
        value = None
    if isinstance(value, IntervalSweep):
        return _interval(key, text, value)
    values = sweep_values(text)
    return Axis(key, choices=tuple(values)) if len(values) > 1 else None


def _interval(key: str, text: str, value: IntervalSweep) -> Axis:
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
    """The type of a key's values; None for one that the schema does not know."""
    known = KEYS.get(tuple(key.split(".")))
    return None if known is None else strip_optional(known.hint)[0]
