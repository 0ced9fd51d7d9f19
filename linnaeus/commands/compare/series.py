"""Which runs form a line of a picture, and what they are drawn against."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from linnaeus.commands.compare.differences import SEED, short_names
from linnaeus.commands.compare.results import Row
from linnaeus.words import counted

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
    sized = by_size(rows)
    values = {key: {row.values[key] for row in rows if row.metrics} for row in rows[:1] for key in row.values}
    several = {key: found for key, found in values.items() if len(found) > 1 and key != SEED}
    if not several or any(_numbers(several[key]) for key in sized.keys & several.keys()):
        return sized
    return _by_key(max(several, key=lambda key: len(several[key])), rows)


def by_size(rows: Sequence[Row]) -> Axis:
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


@dataclass(frozen=True)
class Series:
    """Runs that form one line: they differ only in their place on an axis and in the seed.

    Attributes:
        label: the values of the other keys; empty when there are none.
        rows: by ascending place.
        axis: what they are drawn against.
    """

    label: str
    rows: list[Row]
    axis: Axis

    def means(self, name: str) -> list[tuple[float, float]]:
        """(place, mean over the runs there) of a metric, or of `training_s`."""
        by_place: dict[float, list[float]] = {}
        for row in self.rows:
            place, value = self.axis.place(row), row.value(name)
            if place is not None and value is not None:
                by_place.setdefault(place, []).append(value)
        return [(place, sum(values) / len(values)) for place, values in by_place.items()]


def series_of(rows: Sequence[Row], axis: Axis) -> list[Series]:
    """Group the runs that have metrics and a place into lines, in the order of the rows."""
    drawn = [row for row in rows if row.metrics and axis.place(row) is not None]
    hidden = axis.keys | {SEED}
    ascending = sorted(drawn, key=lambda row: axis.place(row) or 0.0)
    labels = dict.fromkeys(label_of(row, hidden) for row in drawn)
    return [
        Series(label, [row for row in ascending if label_of(row, hidden) == label], axis) for label in labels
    ]


def label_of(row: Row, hidden: frozenset[str]) -> str:
    """The values of the keys that are not hidden, for people."""
    names = short_names(list(row.values))
    return ", ".join(f"{names[key]}={value}" for key, value in row.values.items() if key not in hidden)


def _changes_size(key: str, known: Sequence[Row]) -> bool:
    """Whether runs that differ only in this key have different effective batch sizes."""
    sizes: dict[tuple[tuple[str, str], ...], set[int]] = {}
    for row in known:
        others = tuple(item for item in row.values.items() if item[0] != key)
        sizes.setdefault(others, set()).add(row.planned("effective_batch"))
    return any(len(found) > 1 for found in sizes.values())


@dataclass(frozen=True)
class Curve:
    """A metric over the epochs, of one run or of several that differ in the seed alone.

    Attributes:
        label: what tells it from the others.
        means: (epochs, mean over the runs that have been validated then).
        band: (epochs, lowest, highest), for epochs of several runs.
        counts: how many runs each mean is of.
    """

    label: str
    means: list[tuple[int, float]]
    band: list[tuple[int, float, float]]
    counts: list[int]


def curves_of(rows: Sequence[Row], metric: str) -> list[Curve]:
    """One curve for each set of runs that differ in the seed alone, in the order of the rows."""
    groups: dict[object, list[Row]] = {}
    for row in rows:
        if row.history.finite(metric):
            others = tuple(item for item in row.values.items() if item[0] != SEED)
            # Nothing is known of the differences of a run whose configuration cannot be read.
            groups.setdefault(others if any(row.values.values()) else row.folder, []).append(row)
    return [_curve(group, metric) for group in groups.values()]


def _curve(group: Sequence[Row], metric: str) -> Curve:
    by_epoch: dict[int, list[float]] = {}
    for row in group:
        for epoch, value in row.history.finite(metric):
            by_epoch.setdefault(epoch, []).append(value)
    found = sorted(by_epoch.items())
    label = label_of(group[0], frozenset({SEED})) or (
        group[0].title if len(group) == 1 else counted(len(group), "run")
    )
    return Curve(
        label
        if len(group) == 1 or not group[0].values
        else f"{label} ({counted(len(group), 'seed')})".lstrip(),
        [(epoch, sum(values) / len(values)) for epoch, values in found],
        [(epoch, min(values), max(values)) for epoch, values in found if len(values) > 1],
        [len(values) for _, values in found],
    )
