"""What files and command line set: a tree of nested mappings whose leaves are `Setting`.

Precedence, lowest first: presets and other files of a node's group that the command line selects
(`model=resnet50`), the files of `--cfg` and `--config-name` in their order, files of other groups
(`experiment=birds`), keys of the command line. Within a file its defaults list decides, by Hydra's rules.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path as FilePath
from typing import Any

from linnaeus.config.aliases import alias
from linnaeus.config.files import File, read_file
from linnaeus.config.keys import KEYS, NODES, Path, closest, dotted, is_open, suggest
from linnaeus.config.overrides import CommandLine, Override
from linnaeus.config.presets import (
    EXPERIMENT,
    FOLDER,
    available,
    expanded,
    find,
    is_file,
    is_folder,
    names_in,
)
from linnaeus.config.values import Bare, Setting, from_command_line, show, tree_of, untyped

COMMAND_LINE = "command line"
PLAN = "PLAN"
"""The node of a run's `config.yaml` that holds its batch plan. Reading a file ignores the node."""


@dataclass
class Files:
    """The files that are read for one command line, each once.

    Attributes:
        folders: where groups and files are looked up; the first that has a file counts.
        read: every file read, by its path in the search path; those of `--cfg` by a name of their own.
    """

    folders: Sequence[FilePath]
    read: dict[str, File] = field(default_factory=dict)

    def get(self, path: str) -> File | None:
        """The file at a path such as `model/resnet50`; None where there is none."""
        if path not in self.read:
            file = find(path, self.folders)
            if file is None:
                return None
            self.read[path] = read_file(str(file), "defaults")
            if file.is_relative_to(FOLDER):
                self.read[path].tree = _preset(self.read[path].tree, "=".join(path.rsplit("/", 1)))
        return self.read[path]


def _preset(tree: Any, name: str) -> Any:
    if isinstance(tree, Setting):
        return replace(tree, origin=f"preset {name}", preset=name)
    return {key: _preset(child, name) for key, child in tree.items()}


@dataclass
class Given:
    """What a command line and its files set.

    Attributes:
        tree: the settings that won.
        chosen: the name chosen in each group.
        problems: one sentence each.
        warnings: one sentence for each choice of the command line that a file beats.
        is_complete: whether all files could be read and composed.
    """

    tree: dict[Any, Any]
    chosen: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    is_complete: bool = True


def read_tree(line: CommandLine, below: Mapping[Any, Any]) -> Given:
    """Read what a command line names, over the settings `below`."""
    given = Given({})
    merge(given.tree, below)
    own = [expanded(name) for name in line.named("--config-dir")]
    for folder in (folder for folder in own if not is_folder(folder)):
        what = "is a file, not a" if is_file(folder) else "no such"
        given.problems.append(f"{folder}: {what} folder (--config-dir)")
    files = Files([*own, *(expanded(name).parent for name in line.named("--cfg")), FOLDER])
    names: dict[str, None] = {}
    for option, name in line.sources:
        if option != "--config-dir" and (path := _root(files, option, name, given)) is not None:
            names.pop(path, None)  # of a file named twice, the later one counts
            names[path] = None
    groups = {group: name for group, name in line.groups.items() if _exists(group, name, files, own, given)}
    tree = _composed(files, [*names], groups, given)
    merge(given.tree, tree)
    if given.is_complete:
        given.warnings = _beaten(tree, files, names, line)
    given.tree.pop(PLAN, None)
    given.problems += [file.problem for file in files.read.values() if file.problem]
    for override in line.overrides:
        problem = _apply(given.tree, override)
        if problem and given.is_complete:
            given.problems.append(f"{override.key}: {problem} ({COMMAND_LINE})")
    return given


def _composed(files: Files, names: Sequence[str], groups: Mapping[str, str], given: Given) -> dict[Any, Any]:
    """The tree of all files. Plain files just follow one another; all else is for Hydra to compose."""
    given.is_complete = not any(file.problem for file in files.read.values())
    if groups or any(files.read[name].defaults is not None or files.read[name].package for name in names):
        from linnaeus.config.compose import compose  # here, because Hydra takes long to import

        try:
            tree, given.chosen = compose(files, names, groups)
            return tree
        except Exception as error:  # Hydra raises errors of many kinds for a list that it cannot read
            given.is_complete = False
            if not any(file.problem for file in files.read.values()):
                given.problems.append(_from_hydra(error, files))
    tree = {}
    for name in names:
        merge(tree, files.read[name].tree)
    return tree


def _root(files: Files, option: str, name: str, given: Given) -> str | None:
    """The path in the search path of what `--cfg` or `--config-name` names; None where there is none."""
    if option == "--cfg":
        known = {str(expanded(file.name)): path for path, file in files.read.items()}
        path = known.get(str(expanded(name)), f"__cfg{len(known)}")
        files.read[path] = read_file(name, option)
        return None if files.read[path].problem else path
    if files.get(name) is not None:
        return name
    there = names_in("", files.folders)
    hint = f"there are {', '.join(there)}{suggest(name, there)}" if there else "--config-dir says where it is"
    given.problems.append(f"{name}: no such file (--config-name); {hint}")
    return None


def _exists(key: str, typed: str, files: Files, own: Sequence[FilePath], given: Given) -> bool:
    """Whether there are the files that the command line chooses in a group; adds a problem where not."""
    group = key.partition("@")[0]
    there = names_in(group, files.folders)
    if not there:
        groups = [*available(*own, FOLDER)]  # a `--cfg` file may lie beside anything
        hint = None if group == EXPERIMENT else alias(group, typed)
        hint = hint or f"groups are {', '.join(groups)}{suggest(group, groups)}"
        given.problems.append(f"{group}: no such key or preset group ({COMMAND_LINE}); {hint}")
        return False
    names = [name.strip().strip("'\"") for name in typed.strip("~[]").split(",")]
    missing = [name for name in names if (name or not typed) and name not in there]
    is_several = len(names) > 1 and not typed.strip("~").startswith("[")
    if missing or is_several:
        problem = f"no preset {missing[0]!r}" if missing else f"{typed} is not one name"
        hint = suggest(missing[0], there) if missing else sweep_hint(key, typed)
        given.problems.append(f"{group}: {problem} ({COMMAND_LINE}); there are {', '.join(there)}{hint}")
    return not missing and not is_several


def sweep_hint(key: str, typed: str) -> str:
    """The command that takes several values, where such were typed for a key or group; else empty."""
    is_list = "," in typed and not typed.startswith(("[", "{", "'", '"', "("))
    is_sweep = is_list or re.match(r"(choice|range|interval|glob|sort|shuffle)\(", typed)
    return f"; to run with each of them: linnaeus sweep {key}={typed}" if is_sweep else ""


def _beaten(tree: Any, files: Files, names: Iterable[str], line: CommandLine) -> list[str]:
    """What to tell where `--cfg` files set keys that a choice of the command line sets otherwise."""
    typed = {f"{group}={name}" for group, name in line.presets.items()}
    keys = {override.key for override in line.overrides}
    own = {files.read[name].name for name in names}
    warnings = []
    for path, file in files.read.items():
        choice = "=".join(path.rsplit("/", 1))
        if choice not in typed:
            continue
        for key, setting in leaves(file.tree):
            winner = _at(tree, key)
            if (
                isinstance(winner, Setting)
                and winner.origin.rpartition(", line")[0] in own
                and untyped(winner, check=False) != untyped(setting, check=False)
                and dotted(key) not in keys
            ):
                warnings.append(
                    f"{dotted(key)} of {winner.origin} wins over {choice}: files win over groups of the "
                    "command line; keys there win over both"
                )
    return warnings


def _from_hydra(error: Exception, files: Files) -> str:
    """What Hydra finds wrong, in one sentence."""
    if isinstance(error, RecursionError):
        return "defaults: the files lead back to themselves, or are nested too deeply"
    text = " ".join(re.split(r"\n\n| : Override\(", str(error).strip())[0].split()) or type(error).__name__
    for path, file in files.read.items():
        text = re.sub(rf"\b{re.escape(path)}\b(?!/)", lambda _, name=file.name: name, text)  # type: ignore[misc]
    there = ", ".join(getattr(error, "options", None) or [])
    return f"defaults: {text}" + (f"; there are {there}" if there else "")


# The tree


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
        elif child.value != {} or not isinstance(here, dict):  # an empty mapping sets nothing below it
            tree[name] = child


def _at(tree: Any, path: Path) -> Any:
    for name in path:
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def overridden(overrides: Sequence[Override]) -> Iterator[tuple[Path, Any]]:
    """The keys that overrides set or delete, each with its setting; with `KEY={...}` with a tree of them."""
    for override in overrides:
        path = tuple(override.key.split("."))
        value: Any = None if override.text is None else from_command_line(override.text)
        takes_mapping = path not in KEYS or KEYS[path].is_mapping
        if isinstance(value, Bare) and value.text.lstrip().startswith("{") and takes_mapping:
            meaning = untyped(value, check=False)
            value = meaning if isinstance(meaning, dict) else value
        yield path, tree_of(value, COMMAND_LINE)


def _apply(tree: dict[Any, Any], override: Override) -> str | None:
    """Set or delete one key; returns what is wrong with it."""
    ((path, setting),) = overridden([override])
    *above, last = path
    node: Any = tree
    for number, name in enumerate(above, 1):
        if isinstance(untyped(node.get(name), check=False), list):
            return f"{dotted(path[:number])} is a list, which can only be set as a whole"
        if not isinstance(node.get(name), dict):
            if override.delete:
                break
            node[name] = {}
        node = node[name]
    else:
        if not override.delete:
            merge(node, {last: setting})
            return None
        if last in node:
            if override.text is None or untyped(node[last], check=False) == untyped(setting, check=False):
                del node[last]
                return None
            return f"is {show(untyped(node[last], check=False))}, not {show(setting)}: nothing deleted"
    if path in KEYS or path in NODES:
        return None
    if is_open(path):
        return "is not set"
    real = closest(override.key)
    return f"no such key; did you mean ~{real}?" if real else "no such key"
