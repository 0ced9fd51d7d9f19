"""From a command line with lists of values to one command line for each combination. Pure: nothing is run."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from linnaeus.config.overrides import CommandLine, Override, parse_command_line
from linnaeus.sweep.values import sweep_values

NOT_SWEPT = ("EXPERIMENT.NAME", "EXPERIMENT.OUTPUT_DIR")
"""Keys that say where the sweep's files are."""
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
    """The values of a run as they are typed on a command line."""
    return " ".join(f"{key}={value}" for key, value in values.items())


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
    axes: list[list[Override]] = []
    for override in effective(line):
        try:
            axes.append([replace(override, text=text) for text in _values(override)])
        except ValueError as error:
            grid.problems.append(f"{override.key}: {error}")
    swept = {axis[0].key for axis in axes if len(axis) > 1}
    tokens = [token for source in line.sources for token in source]
    for chosen in itertools.product(*axes):
        values = {override.key: override.text or "" for override in chosen if override.key in swept}
        grid.combinations.append(Combination(values, (*tokens, *map(token_of, chosen))))
    if not swept and not grid.problems:
        grid.problems.append(
            "there is nothing to sweep: give at least one key several values, such as DATA.BATCH_SIZE=32,64"
        )
    return grid


def effective(line: CommandLine) -> list[Override]:
    """Groups and keys in the order in which they are applied; a repeated key has its last place."""
    last: dict[str, Override] = {}
    for override in line.overrides:
        last.pop(override.key, None)
        last[override.key] = override
    return [*line.groups.values(), *last.values()]


def check_may_be_swept(key: str) -> None:
    """Raise `ValueError` for a key that takes one value."""
    if key in NOT_SWEPT:
        raise ValueError("says where the sweep's files are and takes one value")


def token_of(override: Override) -> str:
    """An override as it is typed."""
    text = "" if override.text is None else f"={override.text}"
    return f"{'~' if override.delete else ''}{override.key}{text}"


def _values(override: Override) -> list[str | None]:
    """The values of an override, one for each run; raises `ValueError` where they cannot be used."""
    if override.text is None or override.delete:
        return [override.text]
    if "interval(" in override.text:
        raise ValueError(f"{override.text!r} is for a search: add --search optuna --trials N")
    values = sweep_values(override.text)
    if len(values) > 1:
        check_may_be_swept(override.key)
    return [*values]
