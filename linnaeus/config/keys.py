"""The keys of the schema by path, the closest key to a misspelled one, and the groups of files that set keys.

A path is a tuple of components, such as `("DATA", "BATCH_SIZE")`; users type it joined by dots. Keys of a
file may be numbers or contain dots, so paths are compared, not dotted text.

The presets of a group are `linnaeus/presets/<group>/<name>.yaml`; users have groups of their own.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher, get_close_matches
from pathlib import Path as FilePath
from typing import Any

from linnaeus.config.schema import PLUGGABLE, Config

Path = tuple[Any, ...]

TARGET = "_target_"
PRESETS = FilePath(__file__).resolve().parent.parent / "presets"


@dataclass(frozen=True)
class Key:
    """One key that holds a value. Its fields are the arguments of `schema.key`."""

    path: Path
    hint: Any
    default: Any
    doc: str
    unit: str | None
    choices: tuple[str, ...] | None
    bounds: Mapping[str, float]
    check: Callable[[Any], str | None] | None

    @property
    def is_mapping(self) -> bool:
        """Whether any key may stand below this one."""
        return typing.get_origin(self.hint) is dict


def dotted(path: Path) -> str:
    """Return a path as users type it."""
    return ".".join(str(part) for part in path)


def strip_optional(hint: Any) -> tuple[Any, bool]:
    """Split `X | None` into X and whether None is allowed."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        members = [member for member in typing.get_args(hint) if member is not type(None)]
        return members[0], True
    return hint, False


def _walk(cls: type, path: Path) -> Iterator[Key | tuple[Path, str]]:
    """Every key, and the path and doc of every group of keys."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        here, hint = (*path, field.name), hints[field.name]
        factory: Any = field.default_factory
        node: Any = next(filter(dataclasses.is_dataclass, (hint, factory)), None)
        if node is not None:
            yield here, field.metadata["doc"]
            yield from _walk(node, here)
            continue
        default = field.default if factory is dataclasses.MISSING else factory()
        yield Key(here, hint, default, **field.metadata)


_found = list(_walk(Config, ()))
KEYS: dict[Path, Key] = {found.path: found for found in _found if isinstance(found, Key)}
NODES: dict[Path, str] = {found[0]: found[1] for found in _found if not isinstance(found, Key)}
PLUGGABLE_PATHS: frozenset[Path] = frozenset(tuple(name.split(".")) for name in PLUGGABLE)


def is_open(path: Path) -> bool:
    """Whether any key may stand at a path: below a node that a `_target_` may replace, or below a mapping."""
    above = [path[:size] for size in range(1, len(path))]
    return any(
        node in PLUGGABLE_PATHS or (node in KEYS and KEYS[node].is_mapping) for node in above
    )


def closest(name: str) -> str | None:
    """Return the key that a misspelled dotted name most likely means, or None.

    Both the whole name and its last component are compared, so a key without its node is found too.

    >>> closest("DATA.BATCHSIZE"), closest("BATCH_SIZE"), closest("data.autobatch.enable")
    ('DATA.BATCH_SIZE', 'DATA.BATCH_SIZE', 'DATA.AUTOBATCH.ENABLED')
    """
    wanted = name.upper()
    score, _, best = max(
        (_likeness(wanted, dotted(path)), -len(path), dotted(path)) for path in KEYS
    )
    return best if score >= 0.77 else None


def _likeness(wanted: str, candidate: str) -> float:
    whole = SequenceMatcher(None, wanted, candidate).ratio()
    last = SequenceMatcher(None, wanted.rpartition(".")[2], candidate.rpartition(".")[2]).ratio()
    return max(whole, 0.85 * last + 0.15 * whole)


def suggest(
    word: str, candidates: Collection[str], before: str = "", *, most: int = 1, cutoff: float = 0.5
) -> str:
    """`; did you mean X?` for the candidates most like the word; empty where none is like it.

    >>> suggest("bird", ["birds", "fish"], "data.")
    '; did you mean data.birds?'
    """
    found = get_close_matches(word, list(candidates), n=most, cutoff=cutoff)
    return f"; did you mean {', '.join(before + each for each in found)}?" if found else ""


def available(*folders: FilePath) -> dict[str, list[str]]:
    """Return names of the presets of each group, and of the files of some folders; nested groups included."""
    folders = (PRESETS, *folders)
    found = {
        path.relative_to(top).as_posix()
        for top in folders
        for path in top.rglob("*")
        if path.is_dir()
    }
    return {group: names for group in sorted(found) if (names := names_in(group, folders))}


def names_in(group: str, folders: Sequence[FilePath]) -> list[str]:
    """Return the names to choose from in a group; of the group "" the files at the top."""
    files = (file for folder in folders for file in (folder / group).glob("*"))
    return sorted({file.stem for file in files if file.suffix == ".yaml" and file.is_file()})
