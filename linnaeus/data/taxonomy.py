"""The levels of the taxonomy, their classes and how these nest. Pure: no torch, no files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from linnaeus.runtime.errors import DataError

UNKNOWN = -1
"""An unknown label, or an unknown parent. The loss ignores it."""

Lineage = tuple[str | None, ...]
"""The class names of one sample, coarse to fine; None where the label is unknown. Several labels of a sample
are one text, with separators."""


@dataclass(frozen=True)
class Level:
    """One level of the taxonomy, such as `family`.

    Attributes:
        name: name of the level.
        classes: display names of the classes; the position of a class is its label.
    """

    name: str
    classes: tuple[str, ...]


@dataclass(frozen=True)
class Taxonomy:
    """All levels, coarse to fine, and the parent of each class.

    Attributes:
        levels: the levels.
        parents: for each level after the first, the label of each class's parent in the level above, or
            `UNKNOWN` where no training sample shows it. Left out, every parent is unknown.
        separator: stands between the names where a sample has several labels; None is one label each.

    Raises:
        DataError: no level, two levels of one name, several with a separator, or parents that do not fit.

    >>> taxonomy = Taxonomy((Level("family", ("cats", "dogs")), Level("species", ("lion", "lynx", "wolf"))),
    ...                     parents=((0, 0, 1),))
    >>> taxonomy.num_classes
    {'family': 2, 'species': 3}
    """

    levels: tuple[Level, ...]
    parents: tuple[tuple[int, ...], ...] = ()
    separator: str | None = None

    def __post_init__(self) -> None:
        names = [level.name for level in self.levels]
        if self.separator and len(names) > 1:
            raise DataError(
                f"several labels for a sample need one level (DATA.DATASET.LEVELS), not {names}"
            )
        if not names or len(set(names)) != len(names):
            raise DataError(
                f"a taxonomy needs at least one level and different names for all, not {names}"
            )
        if not self.parents:
            unknown = tuple((UNKNOWN,) * len(level.classes) for level in self.levels[1:])
            object.__setattr__(self, "parents", unknown)
        if len(self.parents) != len(self.levels) - 1:
            raise DataError(
                f"{len(names)} levels need {len(names) - 1} rows of parents, not {len(self.parents)}"
            )
        for above, level, row in zip(self.levels, self.levels[1:], self.parents, strict=False):
            if len(row) != len(level.classes) or not all(
                UNKNOWN <= p < len(above.classes) for p in row
            ):
                raise DataError(
                    f"the parents of level {level.name!r} do not match its classes and level {above.name!r}"
                )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the levels, coarse to fine."""
        return tuple(level.name for level in self.levels)

    @property
    def is_multilabel(self) -> bool:
        """Whether a sample has several labels. Targets are then [N, C]: 1, 0, or `UNKNOWN` for each class."""
        return bool(self.separator)

    def split(self, cell: str) -> list[str]:
        """Return the names in a cell with several labels, sorted.

        >>> Taxonomy((Level("tag", ("cat", "dog")),), separator=";").split("dog; cat;;dog")
        ['cat', 'dog']
        """
        return sorted({name.strip() for name in cell.split(self.separator)} - {""})

    @property
    def num_classes(self) -> dict[str, int]:
        """Number of classes of each level, coarse to fine."""
        return {level.name: len(level.classes) for level in self.levels}

    def ancestors(self, low: int, high: int) -> tuple[int, ...]:
        """For each class of level `low`, the label of its ancestor in level `high`, or `UNKNOWN`.

        With `high == low` that is the class itself.
        """
        found = [UNKNOWN if low < high else label for label in range(len(self.levels[low].classes))]
        for depth in range(low, high, -1):
            row = (*self.parents[depth - 1], UNKNOWN)  # index -1 is the last one
            found = [row[label] for label in found]
        return tuple(found)


class UnknownClassError(LookupError):
    """A class without a training sample; its only argument is the path to the class."""


@dataclass(frozen=True)
class LabelIndex:
    """A taxonomy, and the labels of the class names that it was made from.

    Parent and name identify a class: `Animalia/unknown` and `Plantae/unknown` are two classes.

    Attributes:
        taxonomy: the levels that `encode` gives labels for.
        lookup: for each level, a mapping from (label of the parent, name) to label.
    """

    taxonomy: Taxonomy
    lookup: tuple[Mapping[tuple[int, str], int], ...]

    @cached_property
    def _unique(self) -> list[dict[str, int]]:
        return [_unique_names(table) for table in self.lookup]

    @classmethod
    def of(cls, taxonomy: Taxonomy) -> LabelIndex:
        """Return the index of a taxonomy whose classes go by their display names."""
        parents = [(UNKNOWN,) * len(taxonomy.levels[0].classes), *taxonomy.parents]
        lookup = tuple(
            {key: label for label, key in enumerate(zip(row, level.classes, strict=True))}
            for row, level in zip(parents, taxonomy.levels, strict=True)
        )
        return cls(taxonomy, lookup)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for a file; `from_dict` reads them.

        `lookup` is left out where classes go by their display names.
        """
        levels: list[dict[str, Any]] = [
            {"name": level.name, "classes": list(level.classes)} for level in self.taxonomy.levels
        ]
        for level, row in zip(levels[1:], self.taxonomy.parents, strict=True):
            level["parents"] = list(row)
        if self.taxonomy.separator:
            levels[0]["separator"] = self.taxonomy.separator
        if self == LabelIndex.of(self.taxonomy):
            return {"levels": levels}
        lookup = [[list(key) for key in table] for table in self.lookup]
        return {"levels": levels, "lookup": lookup}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> LabelIndex:
        """Return the index that `as_dict` wrote."""
        levels = content["levels"]
        taxonomy = Taxonomy(
            tuple(Level(level["name"], tuple(level["classes"])) for level in levels),
            tuple(tuple(level["parents"]) for level in levels[1:]),
            levels[0].get("separator"),
        )
        if "lookup" not in content:
            return cls.of(taxonomy)
        lookup = tuple(
            {(parent, name): label for label, (parent, name) in enumerate(table)}
            for table in content["lookup"]
        )
        return cls(taxonomy, lookup)

    def encode(self, lineage: Lineage) -> tuple[int, ...]:
        """Return labels of a lineage, one per level, where a sample has one label.

        Raises:
            UnknownClassError: a name that no training sample has under that parent.
        """
        labels: list[int] = []
        for depth, name in enumerate(lineage):
            parent = labels[-1] if labels else UNKNOWN
            label = _find(self.lookup[depth], self._unique[depth], parent, name)
            if label is None:
                raise UnknownClassError("/".join(part or "?" for part in lineage[: depth + 1]))
            labels.append(label)
        return tuple(labels)


def index_labels(
    level_names: Sequence[str], lineages: Iterable[Lineage], separator: str | None = None
) -> LabelIndex:
    """Number the classes of the training samples, sorted by parent and name, and find the parent of each.

    Raises:
        DataError: a name whose parent is unknown and which occurs under several known parents.

    >>> index = index_labels(["genus", "species"], [("Felis", "catus"), ("Canis", "lupus"), (None, "lupus")])
    >>> index.encode((None, "lupus")), index.taxonomy.parents
    ((-1, 0), ((0, 1),))
    """
    if separator:
        sets = Taxonomy(tuple(Level(name, ()) for name in level_names), separator=separator)
        lineages = {(name,) for (cell,) in lineages for name in sets.split(cell or "")}
    unique = sorted(set(lineages), key=lambda lineage: [name or "" for name in lineage])
    parents = [UNKNOWN] * len(unique)
    lookup: list[dict[tuple[int, str], int]] = []
    for depth, level in enumerate(level_names):
        pairs = [(p, lineage[depth]) for p, lineage in zip(parents, unique, strict=True)]
        table = _number(level, [(p, name) for p, name in pairs if name is not None])
        lookup.append(table)
        unique_names = _unique_names(table)
        parents = [_find(table, unique_names, p, n) for p, n in pairs]  # type: ignore[misc]
    keys = [list(table) for table in lookup]
    taxonomy = Taxonomy(
        tuple(Level(name, _display_names(keys, depth)) for depth, name in enumerate(level_names)),
        tuple(tuple(parent for parent, _ in table) for table in lookup[1:]),
        separator,
    )
    return LabelIndex(taxonomy, tuple(lookup))


def require_classes(taxonomy: Taxonomy, source: str, remedy: str) -> None:
    """Refuse a level with fewer than two classes by a `DataError` with the source and the remedy."""
    for level in taxonomy.levels:
        if len(level.classes) < 2:
            count = f"one class, {level.classes[0]!r}" if level.classes else "no class at all"
            raise DataError(
                f"{source}: level {level.name!r} has {count}, so there is nothing to learn; {remedy}"
            )


def _number(level: str, pairs: list[tuple[int, str]]) -> dict[tuple[int, str], int]:
    """Number the classes of one level; a name with an unknown parent counts as the class of that name."""
    keys = {(parent, name) for parent, name in pairs if parent != UNKNOWN}
    known = Counter(name for _, name in keys)
    for parent, name in pairs:
        if parent != UNKNOWN or known[name] == 1:
            continue
        if known[name] > 1:
            raise DataError(
                f"level {level!r}: {name!r} stands without its parent but occurs under "
                f"{known[name]} parents; fill in the level above it"
            )
        keys.add((UNKNOWN, name))
    return {key: label for label, key in enumerate(sorted(keys))}


def _unique_names(table: Mapping[tuple[int, str], int]) -> dict[str, int]:
    """Return the label of each name that one class alone has, or one class alone without a known parent."""
    counts = Counter(name for _, name in table)
    return {n: label for (p, n), label in table.items() if counts[n] == 1 or p == UNKNOWN}


def _find(
    table: Mapping[tuple[int, str], int],
    unique_names: Mapping[str, int],
    parent: int,
    name: str | None,
) -> int | None:
    """Label of a name under a parent. Where either parent is unknown, the only class of that name matches."""
    if name is None:
        return UNKNOWN
    if parent == UNKNOWN:
        return unique_names.get(name)
    return table.get((parent, name), table.get((UNKNOWN, name)))


def _display_names(keys: Sequence[Sequence[tuple[int, str]]], depth: int) -> tuple[str, ...]:
    """Return each class's name where it is unique within the level, else its path from the coarsest level."""
    counts = Counter(name for _, name in keys[depth])
    return tuple(
        n if counts[n] == 1 else "/".join(_path(keys, depth, label))
        for label, (_, n) in enumerate(keys[depth])
    )


def _path(keys: Sequence[Sequence[tuple[int, str]]], depth: int, label: int) -> list[str]:
    parent, name = keys[depth][label]
    return [*(_path(keys, depth - 1, parent) if depth and parent != UNKNOWN else []), name]
