"""Composes files and groups with Hydra (https://hydra.cc/docs/advanced/defaults_list).

Hydra decides which files count, in which order and in which package, and OmegaConf merges them. The files
are read here: in place of each value Hydra gets a mark, and the marks that are left say which values won,
with the file and the line of each.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.types import RunMode
from hydra.version import VersionBase
from omegaconf import OmegaConf

from linnaeus.config.presets import EXPERIMENT, available, names_in, node_of
from linnaeus.config.tree import Files
from linnaeus.config.values import Setting

SCHEME = "linnaeus"
PRIMARY = "linnaeus_command_line"
"""The configuration whose defaults list is that of the command line."""


class _Marks:
    """Marks in place of settings.

    Attributes:
        settings: what each mark stands for.
    """

    def __init__(self) -> None:
        self.settings: dict[str, Setting] = {}

    def put(self, tree: Any) -> Any:
        """The tree with a mark in place of each setting."""
        if isinstance(tree, dict):
            return {
                name: self.put(child)
                for name, child in tree.items()
                if not (isinstance(child, Setting) and child.preset and child.value == {})
            }
        if tree.value == {}:  # it changes nothing below it
            return {}
        mark = f"mark {len(self.settings)}"
        self.settings[mark] = tree
        return mark

    def replace(self, tree: Any) -> Any:
        """The tree with the settings in place of the marks."""
        if isinstance(tree, dict):
            return {name: self.replace(child) for name, child in tree.items()} or Setting({}, "files")
        return self.settings[tree]


class Source(ConfigSource):  # type: ignore[misc]
    """Gives Hydra the files of the command line that is being read."""

    files: ClassVar[Files]
    marks: ClassVar[_Marks]

    @staticmethod
    def scheme() -> str:
        """As in `linnaeus://`."""
        return SCHEME

    def load_config(self, config_path: str) -> ConfigResult:
        """A file with marks in place of its values."""
        path = config_path.removesuffix(".yaml")
        file = self.files.get(path)
        assert file is not None, "Hydra asks for files that are there"
        content = self.marks.put(file.tree)
        if file.defaults is not None:
            content["defaults"] = file.defaults
        group = path.rpartition("/")[0]
        package = file.package or (node_of(group) if group else None)
        header = {"package": package}
        return ConfigResult(self.provider, f"{SCHEME}://", OmegaConf.create(content), header)

    def is_group(self, config_path: str) -> bool:
        """Whether some folder has such a group."""
        return any((folder / config_path).is_dir() for folder in self.files.folders)

    def is_config(self, config_path: str) -> bool:
        """Whether there is such a file."""
        return self.files.get(config_path.removesuffix(".yaml")) is not None

    def available(self) -> bool:
        """Always: it reads no folder of its own."""
        return True

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """The names in a group, for the message about a missing one."""
        return [] if results_filter == ObjectType.GROUP else names_in(config_path, self.files.folders)


Plugins.instance().register(Source)


@contextmanager
def _hydra(files: Files) -> Iterator[None]:
    """Hydra with our source; that of a program around is back afterwards."""
    program, version = GlobalHydra.instance().hydra, VersionBase.instance().version_base
    GlobalHydra.instance().clear()
    Source.files, Source.marks = files, _Marks()
    try:
        with hydra.initialize(config_path=None, version_base="1.3"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it recommends `_self_` in each list
            yield
    finally:
        GlobalHydra.instance().hydra = program
        VersionBase.instance().version_base = version
        ConfigStore.instance().repo.pop(f"{PRIMARY}.yaml", None)


def compose(
    files: Files, names: Sequence[str], groups: Mapping[str, str]
) -> tuple[dict[Any, Any], dict[str, str]]:
    """Compose files and groups.

    Args:
        files: reads them.
        names: paths of files, lowest precedence first.
        groups: the name typed for each group, such as `model` or `encoder@MODEL.x`; `~` leaves it out.

    Returns:
        The tree of settings, and the name chosen in each group.

    Raises:
        Exception: whatever Hydra finds wrong; for lists that it cannot read it raises errors of many kinds.
    """
    # Files win over a group of a node that no list chooses, and lose to other groups such as `experiment`.
    first: list[str] = []
    with _hydra(files):
        has_lists = any(files.read[name].defaults is not None for name in names)
        known = _known(first, names, []) if has_lists else set()
        for is_nested in (False, True):  # what is chosen for a node may choose for what lies below it
            typed = [
                group for group, name in groups.items() if name[0] != "~" and ("/" in group) == is_nested
            ]
            if typed and is_nested:
                known = _known(first, names, _overrides(groups, first, known, is_final=False))
            first += [group for group in typed if not _key(group, known) and _is_of_node(group)]
        if any(map(_is_experiment, groups)):  # it may change what nobody has chosen
            first += [group for group in available() if group not in known and group not in first]
        _store(first, names)
        overrides = [*_SEARCH, *_overrides(groups, first, known)]
        config = hydra.compose(PRIMARY, overrides, return_hydra_config=True)
        chosen = {group: str(name) for group, name in config.hydra.runtime.choices.items() if name}
        tree = OmegaConf.to_container(config)
    assert isinstance(tree, dict)
    del tree["hydra"]
    return {name: Source.marks.replace(child) for name, child in tree.items()}, chosen


def _overrides(
    groups: Mapping[str, str], first: Sequence[str], known: set[str], *, is_final: bool = True
) -> list[str]:
    """The choices as Hydra takes them: what nothing has chosen yet is added, or cannot be left out."""
    overrides = []
    for group, name in groups.items():
        key = group if group in first else _key(group, known)
        if key is not None:
            sign, name = ("~", name[1:]) if name.startswith("~") else ("", name)
            overrides.append(f"{sign}{key}={name}" if name else f"{sign}{key}")
        elif is_final and not name.startswith("~"):
            overrides.append(f"+{group}={name}")
    return overrides


def _key(group: str, known: set[str]) -> str | None:
    """Hydra's name of a choice: below a node in capitals a group is known with its package."""
    matches = [key for key in known if key.partition("@")[0] == group]
    return group if group in known else matches[0] if len(matches) == 1 else None


_SEARCH = [f"hydra.searchpath=[{SCHEME}://]"]


def _store(first: Sequence[str], names: Sequence[str]) -> None:
    defaults = [*({group: None} for group in first), *names, "_self_"]
    ConfigStore.instance().store(PRIMARY, {"defaults": defaults})


def _known(first: Sequence[str], names: Sequence[str], overrides: Sequence[str]) -> set[str]:
    """The groups in which something is chosen, or left out."""
    _store(first, names)
    loader = GlobalHydra.instance().config_loader()
    found = loader.compute_defaults_list(PRIMARY, [*_SEARCH, *overrides], RunMode.RUN)
    choices = {*found.overrides.known_choices}
    groups = {file.config_path.rpartition("/")[0] for file in found.defaults if file.config_path}
    return choices | groups - {choice.partition("@")[0] for choice in choices}  # also of lists of names


def _is_experiment(group: str) -> bool:
    return group.split("/")[0] == EXPERIMENT


def _is_of_node(group: str) -> bool:
    return not _is_experiment(group) and node_of(group.partition("@")[0]) is not None
