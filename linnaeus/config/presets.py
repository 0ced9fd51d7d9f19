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
    """Names of the files of each group in some folders, by default the presets; nested groups included."""
    found: dict[str, set[str]] = {}
    for folder in folders or (FOLDER,):
        for group, files in files_of(folder).items():
            found.setdefault(group, set()).update(file.stem for file in files)
    return {group: sorted(found[group]) for group in sorted(found)}


def files_of(folder: FilePath, *, is_top: bool = False) -> dict[str, list[FilePath]]:
    """The files of each group in a folder, one for each name; with `is_top` those at its top, in `.`."""
    found: dict[str, dict[str, FilePath]] = {}
    for suffix in SUFFIXES:
        for file in folder.glob(f"*{suffix}") if is_top else folder.rglob(f"*{suffix}"):
            group = file.parent.relative_to(folder).as_posix()
            if (is_top or group != ".") and is_file(file):
                found.setdefault(group, {}).setdefault(file.stem, file)
    return {group: [found[group][name] for name in sorted(found[group])] for group in sorted(found)}


def find(path: str, folders: Sequence[FilePath]) -> FilePath | None:
    """The file of a path such as `model/resnet50`, in the first folder that has it."""
    names = [path] if path.endswith(SUFFIXES) else [f"{path}{suffix}" for suffix in SUFFIXES]
    return next((folder / name for folder in folders for name in names if is_file(folder / name)), None)


def names_in(group: str, folders: Sequence[FilePath]) -> list[str]:
    """The names to choose from in a group; of the group "" the files at the top."""
    files = (
        file for folder in folders for suffix in SUFFIXES for file in (folder / group).glob(f"*{suffix}")
    )
    return sorted({file.stem for file in files if is_file(file)})


def is_file(path: FilePath) -> bool:
    """Whether there is such a file; a name that cannot be one is none."""
    try:
        return path.is_file()
    except (OSError, ValueError):  # too long, a circle of links, a NUL
        return False


def is_folder(path: FilePath) -> bool:
    """Whether there is such a folder; a name that cannot be one is none."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def expanded(name: str) -> FilePath:
    """The path of a name, with `~` replaced where there is such a home."""
    try:
        return FilePath(name).expanduser()
    except (RuntimeError, ValueError):  # no such home, a NUL
        return FilePath(name)


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
