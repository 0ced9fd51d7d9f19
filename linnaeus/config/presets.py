"""The groups: presets that ship in `linnaeus/presets/<group>/<name>.yaml`, and files of one's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path as FilePath

from linnaeus.config.keys import KEYS, NODES, PLUGGABLE_PATHS, dotted

FOLDER = FilePath(__file__).resolve().parent.parent / "presets"
SUFFIXES = (".yaml", ".yml")
"""Endings of files; where both are there, the first counts."""
EXPERIMENT = "experiment"
"""The group whose files set any node, as everywhere with Hydra, although there is a node EXPERIMENT."""


def available(*folders: FilePath) -> dict[str, list[str]]:
    """Names of the presets of each group, and of the files of some folders; nested groups included."""
    found: dict[str, set[str]] = {}
    for folder in (FOLDER, *folders):
        for file in folder.rglob("*.y*ml"):
            if file.suffix in SUFFIXES and file.parent != folder and file.is_file():
                found.setdefault(file.parent.relative_to(folder).as_posix(), set()).add(file.stem)
    return {group: sorted(found[group]) for group in sorted(found)}


def names_in(group: str, folders: Sequence[FilePath]) -> list[str]:
    """The names to choose from in a group; of the group "" the files at the top."""
    files = (file for folder in folders for file in (folder / group).glob("*.y*ml"))
    return sorted({file.stem for file in files if file.suffix in SUFFIXES and file.is_file()})


def find(path: str, folders: Sequence[FilePath]) -> FilePath | None:
    """The file of a path such as `model/resnet50`, in the first folder that has it."""
    names = [path] if path.endswith(SUFFIXES) else [f"{path}{suffix}" for suffix in SUFFIXES]
    files = (folder / name for folder in folders for name in names)
    return next((file for file in files if file.is_file()), None)


def node_of(group: str) -> str | None:
    """The node that a group's files set where they have no `# @package` line; None where Hydra's rule holds.

    >>> node_of("data/augment"), node_of("model/encoder"), node_of("experiment"), node_of("mine")
    ('DATA.AUGMENT', 'MODEL.encoder', '_global_', None)
    """
    names = tuple(group.split("/"))
    node = tuple(name.upper() for name in names)
    if names[0] == EXPERIMENT:
        return "_global_"
    if node in NODES or (node in KEYS and KEYS[node].is_mapping):
        return dotted(node)
    above = next((node[:size] for size in range(1, len(node)) if node[:size] in PLUGGABLE_PATHS), None)
    return dotted((*above, *names[len(above) :])) if above else None
