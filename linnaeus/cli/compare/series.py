"""Which runs form a line of a picture, and what they are drawn against."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from linnaeus.cli.compare.differences import SEED, short_names
from linnaeus.cli.compare.results import Row

LABEL_LETTERS = 48
"""Of the label of a line."""
LOG_FACTOR = 8
"""Numbers that spread over more than this factor have a logarithmic axis."""


@dataclass(frozen=True)
class Axis:
    """What results are drawn against.

    Attributes:
        label: for people.
        place: where a run stands; None for one that has no place.
        keys: those that the place depends on; they do not tell lines apart.
        categories: the texts at 0, 1, ...; empty where places are numbers.
        is_log: whether the scale is logarithmic.
        is_size: whether places are effective batch sizes.
    """

    label: str
    place: Callable[[Row], float | None]
    keys: frozenset[str]
    categories: tuple[str, ...] = ()
    is_log: bool = False
    is_size: bool = False


def axis_of(rows: Sequence[Row]) -> Axis:
    """The axis that shows most of what differs between runs that have metrics.

    It is the effective batch size where a number among the keys changes that, or where nothing but the seed
    differs; else the key with the most values.
    """
    sized = _by_size(rows)
    values = {key: {row.values[key] for row in rows if row.metrics} for row in rows[:1] for key in row.values}
    several = {key: found for key, found in values.items() if len(found) > 1 and key != SEED}
    if not several or any(_numbers(several[key]) for key in sized.keys & several.keys()):
        return sized
    return _by_key(max(several, key=lambda key: len(several[key])), rows)


def _by_size(rows: Sequence[Row]) -> Axis:
    """The axis of effective batch sizes."""
    known = [row for row in rows if row.planned("effective_batch") is not None]
    keys = {key for row in known[:1] for key in row.values if _changes_size(key, known)}
    return Axis(
        "effective batch size", lambda row: row.planned("effective_batch"), frozenset(keys), is_size=True
    )


def _by_key(key: str, rows: Sequence[Row]) -> Axis:
    label = short_names(list(rows[0].values))[key]
    texts = list(dict.fromkeys(row.values[key] for row in rows if row.metrics))
    numbers = _numbers(texts)
    if numbers is None:
        categories = {text: number for number, text in enumerate(texts)}
        return Axis(label, lambda row: categories.get(row.values[key]), frozenset({key}), tuple(texts))
    is_log = min(numbers.values()) > 0 and max(numbers.values()) > LOG_FACTOR * min(numbers.values())
    return Axis(label, lambda row: numbers.get(row.values[key]), frozenset({key}), is_log=is_log)


def _numbers(texts: Sequence[str] | set[str]) -> Mapping[str, float] | None:
    """The texts as numbers; None where one is no finite number."""
    try:
        numbers = {text: float(text) for text in texts}
    except ValueError:
        return None
    return numbers if all(map(math.isfinite, numbers.values())) else None


class Mean(NamedTuple):
    """The values of several runs at one place."""

    place: float
    value: float
    lowest: float
    highest: float
    number: int


@dataclass(frozen=True)
class Group:
    """Runs that form one line.

    Attributes:
        label: the values of the keys that tell it from others, or the name of its first run where that would
            be long; empty when there are none.
        rows: in their order.
    """

    label: str
    rows: list[Row]

    def means(self, points: Callable[[Row], Iterable[tuple[float, float]]]) -> list[Mean]:
        """The mean of the runs at each place, by ascending place; `points` gives those of one run."""
        by_place: dict[float, list[float]] = {}
        for row in self.rows:
            for place, value in points(row):
                by_place.setdefault(place, []).append(value)
        return [
            Mean(place, sum(values) / len(values), min(values), max(values), len(values))
            for place, values in sorted(by_place.items())
        ]


def groups_by(rows: Iterable[Row], hidden: frozenset[str]) -> list[Group]:
    """Runs that differ in hidden keys alone are a group, in the order of the rows."""
    groups: dict[object, list[Row]] = {}
    for row in rows:
        others = tuple(item for item in row.values.items() if item[0] not in hidden)
        # Nothing is known of the differences of a run whose configuration cannot be read.
        groups.setdefault(others if any(row.values.values()) else row.folder, []).append(row)
    return [Group(_label(group, hidden), group) for group in groups.values()]


def point_of(row: Row, axis: Axis, name: str) -> list[tuple[float, float]]:
    """Where a run is drawn for a metric, or for `training_s`; empty where it is not."""
    place, value = axis.place(row), row.value(name)
    return [] if place is None or value is None else [(place, value)]


def _label(group: Sequence[Row], hidden: frozenset[str]) -> str:
    row = group[0]
    names = short_names(list(row.values))
    label = ", ".join(f"{names[key]}={value}" for key, value in row.values.items() if key not in hidden)
    if len(label) <= LABEL_LETTERS:
        return label
    name = row.name or label
    name = name if len(name) <= LABEL_LETTERS else f"…{name[1 - LABEL_LETTERS :]}"
    return name if len(group) == 1 else f"{name} and {len(group) - 1} more"


def _changes_size(key: str, known: Sequence[Row]) -> bool:
    """Whether runs that differ only in this key have different effective batch sizes."""
    sizes: dict[tuple[tuple[str, str], ...], set[int]] = {}
    for row in known:
        others = tuple(item for item in row.values.items() if item[0] != key)
        sizes.setdefault(others, set()).add(row.planned("effective_batch"))
    return any(len(found) > 1 for found in sizes.values())
