"""From a command line with lists of values to one command line for each combination. Pure: nothing is run.

Lists follow Hydra's grammar (https://hydra.cc/docs/advanced/override_grammar/extended/): `a,b`,
`choice(a,b)`, `range(start,stop,step)`, `sort(...)`, `shuffle(...)` and `tag(...)`. A list in brackets and a
quoted text are one value.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override as HydraOverride
from hydra.core.override_parser.types import QuotedString, RangeSweep, Transformer
from hydra.errors import HydraException

from linnaeus.config.overrides import CommandLine, Override, parse_command_line

PLACE = ("EXPERIMENT.NAME", "EXPERIMENT.OUTPUT_DIR")
"""Keys that cannot be swept, because they say where the sweep's files are."""
MAX_LETTERS = 120
"""Bound on the length of a combination's name; file systems take 255 bytes."""
_UNSAFE = re.compile(r"[^A-Za-z0-9_.,=+\[\]-]+")


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
        """The combination as it is typed on a command line."""
        return " ".join(f"{key}={value}" for key, value in self.values.items())

    @property
    def name(self) -> str:
        """The name of its folder: readable, the same in every sweep, different for every combination."""
        wanted = ",".join(f"{key}={value}" for key, value in self.values.items())
        safe = _UNSAFE.sub("-", wanted)
        if safe == wanted and len(safe) <= MAX_LETTERS:
            return safe
        digest = hashlib.sha256(wanted.encode()).hexdigest()[:8]
        return f"{safe[: MAX_LETTERS - 9]}-{digest}"


@dataclass
class Grid:
    """All combinations, the first key changing most slowly.

    Attributes:
        line: the whole command line, with the lists as typed.
        combinations: in the order in which they are run.
        problems: one sentence for each token that cannot be used.
    """

    line: CommandLine
    combinations: list[Combination] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def read_grid(argv: Sequence[str]) -> Grid:
    """Expand the lists of a command line.

    Problems are collected, not raised. `load_config` finds those of tokens that are not lists.

    >>> grid = read_grid(["DATA.BATCH_SIZE=32,64", "TRAIN.EPOCHS", "2", "OPTIMIZER.LR=range(1,3)"])
    >>> [combination.title for combination in grid.combinations][:2]
    ['DATA.BATCH_SIZE=32 OPTIMIZER.LR=1', 'DATA.BATCH_SIZE=32 OPTIMIZER.LR=2']
    >>> grid.combinations[3].argv
    ('DATA.BATCH_SIZE=64', 'TRAIN.EPOCHS=2', 'OPTIMIZER.LR=2')
    """
    line = parse_command_line(argv)
    grid = Grid(line)
    last: dict[str, Override] = {}
    for override in line.overrides:
        last.pop(override.key, None)  # of a key that is set again, the last one counts at its own place
        last[override.key] = override
    presets = [Override(group, name) for group, name in line.presets.items()]
    axes: list[list[Override]] = []
    for override in [*presets, *last.values()]:
        texts = _values(override, grid.problems)
        if len(texts) > 1 and override.key in PLACE:
            grid.problems.append(f"{override.key}: says where the sweep's files are and takes one value")
        if texts:
            axes.append([replace(override, text=text) for text in texts])
    swept = {axis[0].key for axis in axes if len(axis) > 1}
    tokens = line.source_tokens()
    for chosen in itertools.product(*axes):
        values = {override.key: override.text or "" for override in chosen if override.key in swept}
        grid.combinations.append(Combination(values, (*tokens, *map(_token, chosen))))
    if not swept and not grid.problems:
        grid.problems.append(
            "there is nothing to sweep: give at least one key several values, such as DATA.BATCH_SIZE=32,64"
        )
    return grid


def _token(override: Override) -> str:
    text = "" if override.text is None else f"={override.text}"
    return f"{'~' if override.delete else ''}{override.key}{text}"


def _values(override: Override, problems: list[str]) -> list[str | None]:
    """The values of an override, one for each run; none where they cannot be read."""
    if override.text is None or override.delete:
        return [override.text]
    try:
        return list(sweep_values(override.text))
    except ValueError as error:
        problems.append(f"{override.key}: {error}")
        return []


def sweep_values(text: str) -> list[str]:
    """The values in a text, each as it is typed alone; equal ones count once.

    >>> sweep_values("none,linear"), sweep_values("range(1,2,0.4)")
    (['none', 'linear'], ['1', '1.4', '1.8'])
    >>> sweep_values("[2,6]"), sweep_values("'a,b'")
    (['[2,6]'], ["'a,b'"])

    Raises:
        ValueError: the text is a list whose values cannot be told.
    """
    try:
        override = OverridesParser.create().parse_override(f"value={text}")
    except (HydraException, RecursionError):
        if _has_bare_comma(text):
            raise ValueError(
                f"{text!r} cannot be read as a list of values; quotes make it one text: \"'{text}'\""
            ) from None
        return [text]
    if not override.is_sweep_override():
        return [text]
    return list(dict.fromkeys(_typed(value) for value in _elements(override, text)))


def _elements(override: HydraOverride, text: str) -> list[Any]:
    """The elements of a list; raises `ValueError` where there are none."""
    value = override.value()
    if isinstance(value, RangeSweep):
        found = _range(float(value.start or 0), float(value.stop or 0), float(value.step))
        if not found:
            raise ValueError(f"{text!r} has no values: no step leads from its start to its stop")
        return found
    try:
        return list(override.sweep_iterator(transformer=Transformer.identity))
    except HydraException:
        raise ValueError(
            f"{text!r} has no values of its own; give them one by one (a,b,c) or as range(start,stop,step)"
        ) from None


def _range(start: float, stop: float, step: float) -> list[float]:
    """Hydra adds the step up, so that 0.1 three times is more than 0.3; here each value is a multiple."""
    count = math.ceil((stop - start) / step - 1e-9) if step else 0
    return [start + number * step for number in range(count)]


def _typed(value: Any) -> str:
    """An element of a list as it is typed alone."""
    if isinstance(value, QuotedString):
        return str(value.with_quotes())
    if isinstance(value, float):
        return f"{value:.12g}"
    if isinstance(value, list | dict):
        return str(Transformer.encode(value))
    return "null" if value is None else str(value)


def _has_bare_comma(text: str) -> bool:
    """Whether there is a comma outside brackets and quotes."""
    inner = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\[[^\[\]]*\]|\{[^{}]*\}|\([^()]*\)"""
    while (shorter := re.sub(inner, "", text)) != text:
        text = shorter
    return "," in text
