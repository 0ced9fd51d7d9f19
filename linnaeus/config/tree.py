"""What files and command line set: a tree of nested mappings whose leaves are `Setting`.

Precedence, lowest first: presets and other files of a node's group that the command line selects
(`model=resnet50`), the files of `--cfg` and `--config-name` in their order, files of other groups
(`experiment=birds`), keys of the command line. Within a file its defaults list decides, by Hydra's rules.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

from linnaeus.config.files import File, Files, read_file
from linnaeus.config.keys import (
    KEYS,
    NODES,
    PRESETS,
    Path,
    closest,
    dotted,
    is_open,
    names_in,
    suggest,
)
from linnaeus.config.overrides import CommandLine, Override
from linnaeus.config.values import Bare, Setting, from_command_line, show, tree_of, untyped

COMMAND_LINE = "command line"
PLAN = "PLAN"
"""The node of a run's `config.yaml` that holds its batch plan. Reading a file ignores the node."""


@dataclass
class Given:
    """What a command line and its files set.

    Attributes:
        chosen: the name chosen in each group.
        warnings: one sentence for each choice of the command line that a file beats.
        is_complete: whether all files could be read and composed.
    """

    tree: dict[Any, Any] = field(default_factory=dict)
    chosen: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    is_complete: bool = True


def read_tree(line: CommandLine, below: Mapping[Any, Any]) -> Given:
    """Read what a command line names, over the settings `below`."""
    given = Given()
    merge(given.tree, below)
    try:
        _read_files(line, given)
    except OSError as error:  # a name that is too long
        given.is_complete = False
        given.problems.append(f"{error.filename}: {error.strerror}")
    given.tree.pop(PLAN, None)
    for override in line.overrides:
        problem = _apply(given.tree, override)
        if problem and given.is_complete:
            given.problems.append(f"{override.key}: {problem} ({COMMAND_LINE})")
    return given


def _read_files(line: CommandLine, given: Given) -> None:
    """Read the files into the tree. Plain files just follow one another; for groups Hydra finds the order."""
    own = [FilePath(name) for option, name in line.sources if option == "--config-dir"]
    given.problems += [
        f"{folder}: no such folder (--config-dir)" for folder in own if not folder.is_dir()
    ]
    files = Files(
        [
            *own,
            *(FilePath(name).parent for option, name in line.sources if option == "--cfg"),
            PRESETS,
        ]
    )
    roots: dict[str, File] = {}
    for option, name in line.sources:
        if option == "--cfg":
            roots[f"__cfg{len(roots)}__"] = read_file(name, option)
        elif option == "--config-name" and (file := files.get(name)):
            roots[name] = file
        elif option == "--config-name":
            hint = suggest(name, names_in("", files.folders))
            given.problems.append(f"{name}: no such file in --config-dir (--config-name){hint}")
    files.read |= roots
    order = [(path, file.package or "") for path, file in roots.items()]
    if line.groups or any(file.defaults is not None for file in roots.values()):
        from linnaeus.config import compose  # here, because Hydra takes long to import

        wrong = {
            group: compose.problem_of(choice, files, own) for group, choice in line.groups.items()
        }
        given.problems += filter(None, wrong.values())
        choices = [choice for group, choice in line.groups.items() if not wrong[group]]
        try:
            order, given.chosen = compose.order_files(files, [*roots], choices)
        except (
            Exception
        ) as error:  # Hydra raises errors of many kinds for a list that it cannot read
            given.is_complete = False
            if not any(file.problem for file in files.read.values()):
                given.problems.append(compose.sentence(error, files))
    for path, package in order:
        part = file.tree if (file := files.get(path)) else {}
        for name in reversed(package.removeprefix("_global_").split(".")):
            part = {name: part} if name and part else part
        merge(given.tree, part)
    unread = [file.problem for file in files.read.values() if file.problem]
    given.problems += unread
    given.is_complete &= not unread
    if given.is_complete:
        given.warnings = _warnings(
            given.tree, files, tuple(file.name for file in roots.values()), line
        )


def sweep_hint(key: str, typed: str) -> str:
    """The command that takes several values, where such were typed for a key or group; else empty."""
    is_list = "," in typed and not typed.startswith(("[", "{", "'", '"', "("))
    is_sweep = is_list or re.match(r"(choice|range|interval|glob|sort|shuffle)\(", typed)
    return f"; to run with each of them: linnaeus sweep {key}={typed}" if is_sweep else ""


def _warnings(tree: Any, files: Files, own: tuple[str, ...], line: CommandLine) -> list[str]:
    """Name the choices of the command line whose keys a file of `--cfg` sets otherwise; `own` are these."""
    winners, typed = dict(leaves(tree)), {override.key for override in line.overrides}
    return [
        f"{dotted(key)} of {winner.origin} wins over {choice.key}={choice.text}: files win over groups of "
        "the command line; keys there win over both"
        for choice in line.groups.values()
        if (file := files.read.get(f"{choice.key}/{choice.text}"))
        for key, setting in leaves(file.tree)
        if (winner := winners.get(key))
        and winner.origin.startswith(own)
        and dotted(key) not in typed
        if untyped(winner, check=False) != untyped(setting, check=False)
    ]


def leaves(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Setting]]:
    """Every setting of a tree with its key."""
    if isinstance(tree, Setting):
        yield path, tree
    else:
        for name, child in tree.items():
            yield from leaves(child, (*path, name))


def merge(tree: dict[Any, Any], other: Mapping[Any, Any]) -> None:
    """Put the settings of another tree over those of a tree."""
    for name, child in other.items():
        here = tree.get(name)
        if isinstance(child, Mapping):
            tree[name] = here if isinstance(here, dict) else {}
            merge(tree[name], child)
        elif child.value != {} or not isinstance(
            here, dict
        ):  # an empty mapping sets nothing below it
            tree[name] = child


def overridden(overrides: Sequence[Override]) -> Iterator[tuple[Path, Any]]:
    """The keys that overrides set or delete, each with its setting; with `KEY={...}` with a tree of them."""
    for override in overrides:
        path = tuple(override.key.split("."))
        value: Any = None if override.text is None else from_command_line(override.text)
        takes_mapping = path not in KEYS or KEYS[path].is_mapping
        is_braced = isinstance(value, Bare) and value.text.lstrip().startswith("{")
        meaning = untyped(value, check=False) if takes_mapping and is_braced else value
        yield path, tree_of(meaning if isinstance(meaning, dict) else value, COMMAND_LINE)


def _apply(tree: dict[Any, Any], override: Override) -> str | None:
    """Set or delete one key; returns what is wrong with it."""
    ((path, setting),) = overridden([override])
    node: Any = tree
    for depth, name in enumerate(path[:-1], 1):
        child = node.get(name)
        if not isinstance(child, dict):
            if isinstance(untyped(child, check=False), list):
                return f"{dotted(path[:depth])} is a list, which can only be set as a whole"
            child = node[name] = {}
        node = child
    if not override.delete:
        merge(node, {path[-1]: setting})
        return None
    here = node.get(path[-1])
    if here is not None:
        if override.text is None or untyped(here, check=False) == untyped(setting, check=False):
            del node[path[-1]]
            return None
        return f"is {show(untyped(here, check=False))}, not {show(setting)}: nothing deleted"
    is_known = path in KEYS or path in NODES
    if is_known or is_open(path):
        return None if is_known and override.text is None else "is not set"
    real = closest(override.key)
    return f"no such key; did you mean ~{real}?" if real else "no such key"
