"""The classes of every rank and how the ranks nest. Pure: no torch, no files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from linnaeus.errors import DataError

UNKNOWN = -1
"""The label, or the parent, that nobody knows. The loss ignores it."""

Lineage = tuple[str | None, ...]
"""The class names of one sample, coarse to fine; None where the label is unknown."""


@dataclass(frozen=True)
class Rank:
    """One level of the taxonomy.

    Attributes:
        name: name of the rank, such as `family`.
        classes: display name of each class, in the order of its label.
    """

    name: str
    classes: tuple[str, ...]


@dataclass(frozen=True)
class Taxonomy:
    """All ranks, coarse to fine, and the parent of each class.

    Attributes:
        ranks: the ranks, coarse to fine.
        parents: for each rank after the first, the label in the rank above that each of its classes belongs
            to; `UNKNOWN` where training never showed it. Left out, every parent is unknown.

    Raises:
        DataError: no rank, two ranks of one name, or parents that do not fit the ranks.

    >>> taxonomy = Taxonomy((Rank("family", ("cats", "dogs")), Rank("species", ("lion", "lynx", "wolf"))),
    ...                     parents=((0, 0, 1),))
    >>> taxonomy.num_classes
    {'family': 2, 'species': 3}
    """

    ranks: tuple[Rank, ...]
    parents: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        names = [rank.name for rank in self.ranks]
        if not names or len(set(names)) != len(names):
            raise DataError(f"a taxonomy needs at least one rank and different names for all, not {names}")
        if not self.parents:
            unknown = tuple((UNKNOWN,) * len(rank.classes) for rank in self.ranks[1:])
            object.__setattr__(self, "parents", unknown)
        if len(self.parents) != len(self.ranks) - 1:
            raise DataError(
                f"{len(self.ranks)} ranks need {len(self.ranks) - 1} rows of parents, not {len(self.parents)}"
            )
        for above, rank, row in zip(self.ranks, self.ranks[1:], self.parents, strict=False):
            if len(row) != len(rank.classes) or not all(UNKNOWN <= p < len(above.classes) for p in row):
                raise DataError(
                    f"the parents of rank {rank.name!r} do not fit its classes and those of {above.name!r}"
                )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the ranks, coarse to fine."""
        return tuple(rank.name for rank in self.ranks)

    @property
    def num_classes(self) -> dict[str, int]:
        """Number of classes of each rank, coarse to fine."""
        return {rank.name: len(rank.classes) for rank in self.ranks}


class UnknownClassError(LookupError):
    """A class that training does not have; `args` are the depth of its rank and the path to it."""


@dataclass(frozen=True)
class LabelIndex:
    """A taxonomy together with the way from names to labels.

    A class is its name within its parent, so `Animalia/unknown` and `Plantae/unknown` are two classes.

    Attributes:
        taxonomy: the ranks that `encode` gives labels for.
        lookup: for each rank of the source, label by (label of the parent, name).
        columns: the ranks of the source that the taxonomy keeps.
    """

    taxonomy: Taxonomy
    lookup: tuple[Mapping[tuple[int, str], int], ...]
    columns: tuple[int, ...]

    def encode(self, lineage: Lineage) -> tuple[int, ...]:
        """Labels of a lineage, one per rank of the taxonomy.

        Raises:
            UnknownClassError: a name that training does not have under that parent.
        """
        labels: list[int] = []
        for depth, name in enumerate(lineage):
            parent = labels[-1] if labels else UNKNOWN
            label = UNKNOWN if name is None else _find(self.lookup[depth], parent, name, rooted=depth > 0)
            if label is None:
                raise UnknownClassError(depth, "/".join(part or "?" for part in lineage[: depth + 1]))
            labels.append(label)
        return tuple(labels[column] for column in self.columns)

    def select(self, names: Sequence[str]) -> LabelIndex:
        """The same classes seen through some of the ranks, in the order given.

        Raises:
            KeyError: a name that is no rank.
        """
        position = {name: column for column, name in enumerate(self.taxonomy.names)}
        columns = tuple(position[name] for name in names)
        ranks = tuple(self.taxonomy.ranks[column] for column in columns)
        parents = tuple(self._ancestors(low, high) for high, low in pairwise(columns))
        return LabelIndex(Taxonomy(ranks, parents), self.lookup, columns)

    def _ancestors(self, low: int, high: int) -> tuple[int, ...]:
        """For each class of rank `low`, its ancestor in rank `high`."""
        labels = range(len(self.taxonomy.ranks[low].classes))
        if low <= high:
            return (UNKNOWN,) * len(labels)
        found = list(labels)
        for depth in range(low, high, -1):
            row = self.taxonomy.parents[depth - 1]
            found = [row[label] if label != UNKNOWN else UNKNOWN for label in found]
        return tuple(found)


def index_labels(rank_names: Sequence[str], lineages: Iterable[Lineage]) -> LabelIndex:
    """Number the classes of training, sorted by parent and name, and learn which parent each has.

    Args:
        rank_names: names of the ranks, coarse to fine.
        lineages: the lineages of all training samples; repetitions do not matter.

    Raises:
        DataError: a name whose parent is unknown and which occurs under several known parents.

    >>> index = index_labels(["genus", "species"], [("Felis", "catus"), ("Canis", "lupus"), (None, "lupus")])
    >>> index.encode((None, "lupus")), index.taxonomy.parents
    ((-1, 0), ((0, 1),))
    """
    unique = sorted(set(lineages), key=lambda lineage: [name or "" for name in lineage])
    parents = [UNKNOWN] * len(unique)
    lookup: list[dict[tuple[int, str], int]] = []
    for depth, rank in enumerate(rank_names):
        pairs = [(p, lineage[depth]) for p, lineage in zip(parents, unique, strict=True)]
        table = _number(rank, [(p, name) for p, name in pairs if name is not None], rooted=depth > 0)
        lookup.append(table)
        found = [UNKNOWN if n is None else _find(table, p, n, rooted=depth > 0) for p, n in pairs]
        parents = [UNKNOWN if label is None else label for label in found]
    keys = [list(table) for table in lookup]
    taxonomy = Taxonomy(
        tuple(Rank(name, _display_names(keys, depth)) for depth, name in enumerate(rank_names)),
        tuple(tuple(parent for parent, _ in table) for table in lookup[1:]),
    )
    return LabelIndex(taxonomy, tuple(lookup), tuple(range(len(rank_names))))


def require_classes(taxonomy: Taxonomy, source: str, remedy: str) -> None:
    """Refuse a rank with fewer than two classes.

    Args:
        taxonomy: what to look at.
        source: the folder, file or class that it came from, for the message.
        remedy: what the user can do about it.

    Raises:
        DataError: names each such rank.
    """
    for rank in taxonomy.ranks:
        if len(rank.classes) < 2:
            count = f"one class, {rank.classes[0]!r}" if rank.classes else "no class at all"
            raise DataError(
                f"{source}: rank {rank.name!r} has {count}, so there is nothing to learn; {remedy}"
            )


def shared_names(index: LabelIndex) -> dict[str, list[str]]:
    """For each rank of the source, the names that occur under several parents."""
    counts = [Counter(name for _, name in table) for table in index.lookup]
    names = index.taxonomy.names
    return {names[depth]: sorted(n for n, c in count.items() if c > 1) for depth, count in enumerate(counts)}


def _number(rank: str, pairs: list[tuple[int, str]], *, rooted: bool) -> dict[tuple[int, str], int]:
    """Number the classes of one rank; a name with an unknown parent joins the class that has this name."""
    keys = {(parent, name) for parent, name in pairs if parent != UNKNOWN or not rooted}
    known = Counter(name for _, name in keys)
    for parent, name in pairs:
        if parent != UNKNOWN or not rooted or known[name] == 1:
            continue
        if known[name] > 1:
            raise DataError(
                f"rank {rank!r}: {name!r} stands without its parent but occurs under {known[name]} parents; "
                "fill in the rank above it"
            )
        keys.add((UNKNOWN, name))
    return {key: label for label, key in enumerate(sorted(keys))}


def _find(table: Mapping[tuple[int, str], int], parent: int, name: str, *, rooted: bool) -> int | None:
    """Label of a name under a parent; where a side does not know the parent, the only class of that name."""
    if (parent, name) in table or not rooted:
        return table.get((parent, name))
    if parent != UNKNOWN:
        return table.get((UNKNOWN, name))
    labels = [label for (_, other), label in table.items() if other == name]
    return labels[0] if len(labels) == 1 else None


def _display_names(keys: Sequence[Sequence[tuple[int, str]]], depth: int) -> tuple[str, ...]:
    """The plain name where it is unique within the rank, else the path from the coarsest rank."""
    counts = Counter(name for _, name in keys[depth])
    return tuple(
        n if counts[n] == 1 else "/".join(_path(keys, depth, label))
        for label, (_, n) in enumerate(keys[depth])
    )


def _path(keys: Sequence[Sequence[tuple[int, str]]], depth: int, label: int) -> list[str]:
    parent, name = keys[depth][label]
    return [*(_path(keys, depth - 1, parent) if depth and parent != UNKNOWN else []), name]
