"""The search path: where the files of groups and defaults lists are looked up, each read once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path as FilePath

from linnaeus.config.files import DEFAULTS, File, read_file
from linnaeus.config.keys import KEYS, NODES, PLUGGABLE_PATHS, dotted, suggest
from linnaeus.config.presets import FOLDER, SUFFIXES, available, expanded

GLOBAL = "_global_"
"""The package of a file whose keys stand at the top."""
GROUP = "_group_"
"""The package that a group's files have without a `# @package` line."""
EXPERIMENT = "experiment"
"""The group whose files set any node, as everywhere with Hydra, although there is a node EXPERIMENT."""


def default_package(group: str) -> str:
    """The package of a group's files that have no `# @package` line: the node of the group's name, or none.

    >>> default_package("data/augment"), default_package("model/encoder"), default_package("experiment")
    ('DATA.AUGMENT', 'MODEL.encoder', '_global_')
    """
    names = tuple(group.split("/"))
    node = tuple(name.upper() for name in names)
    if names[0] == EXPERIMENT:
        return GLOBAL
    if node in NODES or (node in KEYS and KEYS[node].is_mapping):
        return dotted(node)
    for size in range(1, len(node)):
        if node[:size] in PLUGGABLE_PATHS:
            return dotted((*node[:size], *names[size:]))
    return GLOBAL


class SearchPath:
    """Finds and reads files by their path in the search path, such as `model/resnet50`.

    Attributes:
        files: every file read, by its path.
    """

    def __init__(self, folders: Sequence[FilePath], beside: Sequence[FilePath] = ()) -> None:
        """Look into `folders`, then into those of the `--cfg` files (`beside`), then among the presets."""
        self.files: dict[str, File] = {}
        self._own_folders = folders
        self._folders = [*folders, *beside, FOLDER]
        self._roots: dict[FilePath, tuple[str, FilePath]] = {}  # the path and the folder of each
        self._presets: set[str] = set()
        self._known: dict[tuple[int, FilePath], str] = {}
        self._number: dict[str, int] = {}

    def add_root(self, name: str, option: str) -> str:
        """Read a `--cfg` file by its name on disk; returns the path by which it is known from then on.

        Each file that a root leads to has a path of its own, even where another root leads to the same
        file: the settings then count at both places.
        """
        file = expanded(name)
        place = _resolved(file.parent) / file.name
        if place not in self._roots:
            path = self._add(len(self._roots), "", file, name, option)
            self._roots[place] = (path, file.parent)
        return self._roots[place][0]

    def from_root(self, owner: str, path: str) -> str:
        """The path of a file that another file (`owner`) names.

        What a `--cfg` file leads to is looked up in each `--config-dir`, then in the folder of that `--cfg`
        file. Where neither has it, and for other owners, the path stays.
        """
        number = self._number.get(owner)
        if number is None:
            return path
        folders = [*self._own_folders, list(self._roots.values())[number][1]]
        file = next(filter(None, (_file_in(folder, path) for folder in folders)), None)
        group = path.rpartition("/")[0]
        return path if file is None else self._add(number, group, file, str(file), DEFAULTS)

    def _add(self, number: int, group: str, file: FilePath, name: str, option: str) -> str:
        key = (number, _resolved(file))
        if key not in self._known:
            path = f"{group}/:{len(self._known)}" if group else f":{len(self._known)}"
            self._known[key], self._number[path] = path, number
            self.files[path] = read_file(name, option)
        return self._known[key]

    def read(self, path: str) -> File | None:
        """The file at a path, or None where there is none."""
        if path not in self.files:
            found = ((folder, _file_in(folder, path)) for folder in self._folders)
            folder, file = next((pair for pair in found if pair[1]), (None, None))
            if file is None:
                return None
            read = read_file(str(file), DEFAULTS)
            if folder is FOLDER:
                self._presets.add(path)
            self.files[path] = _preset(path, read) if folder is FOLDER else read
        return self.files[path]

    def is_preset(self, path: str) -> bool:
        """Whether a file that was read is one of the package's presets."""
        return path in self._presets

    def package(self, path: str) -> str | None:
        """Where the keys of a file stand; None: in the package of the file that names it."""
        file = self.read(path)
        if file is None:
            return None
        group = path.rpartition("/")[0]
        default = default_package(group) if group else None
        if file.package is None or file.package == GROUP:
            return default
        if file.package.startswith(f"{GROUP}."):
            return file.package.replace(GROUP, default or GLOBAL, 1)
        return file.package

    def names(self, group: str) -> list[str]:
        """The names to choose from in a group."""
        folders = (folder / group for folder in self._folders)
        return sorted(
            {
                file.stem
                for folder in folders
                if is_folder(folder)
                for suffix in SUFFIXES
                for file in folder.glob(f"*{suffix}")
                if is_file(file)
            }
        )

    def groups(self) -> list[str]:
        """The groups of the package and of the user's folders. Folders beside a file are not searched."""
        return sorted({group for folder in [*self._own_folders, FOLDER] for group in available(folder)})

    def why_missing(self, group: str, name: str, origin: str) -> str:
        """The problem of a choice for which there is no file."""
        if names := self.names(group):
            hint = f"there are {', '.join(names)}{suggest(name, names)}"
            return f"{group}: no preset {name!r} ({origin}); {hint}"
        groups = self.groups()
        return (
            f"{group}: no such key or preset group ({origin}); groups are {', '.join(groups)}"
            f"{suggest(group, groups)}"
        )


def _preset(path: str, file: File) -> File:
    """A preset of the package. Its settings name the preset instead of a file and line."""
    group, _, name = path.rpartition("/")
    origin = f"preset {group}={name}"
    file.settings = [replace(setting, origin=origin, is_preset=True) for setting in file.settings]
    return file


def _file_in(folder: FilePath, path: str) -> FilePath | None:
    """The file of a path in a folder, with or without its suffix."""
    names = [path] if path.endswith(SUFFIXES) else [f"{path}{suffix}" for suffix in SUFFIXES]
    return next((folder / name for name in names if is_file(folder / name)), None)


def is_file(path: FilePath) -> bool:
    """Whether there is such a file; a name that cannot be one is none."""
    try:
        return path.is_file()
    except OSError:  # too long
        return False


def is_folder(path: FilePath) -> bool:
    """Whether there is such a folder; a name that cannot be one is none."""
    try:
        return path.is_dir()
    except OSError:
        return False


def _resolved(path: FilePath) -> FilePath:
    """The path without links, where it can be told."""
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError):
        return path
