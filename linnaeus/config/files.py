"""Reads YAML files as OmegaConf does, and serves them to Hydra with a mark in place of each value.

Hydra's documented plugins make the files known: https://hydra.cc/docs/advanced/plugins/overview
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any, ClassVar

import yaml
from hydra import version
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from linnaeus.config.aliases import alias
from linnaeus.config.keys import PRESETS, SUFFIXES, names_in, node_of
from linnaeus.config.values import Setting, own_resolvers
from linnaeus.runtime.files import suggest_path

_PACKAGE = re.compile(r"^\s*#\s*@package\s+(\w+(?:\.\w+)*)\s*$", re.MULTILINE)


@dataclass
class File:
    """What one file says.

    Attributes:
        name: the path as messages show it.
        tree: nested mappings whose leaves are `Setting`.
        defaults: its defaults list as YAML has it, for Hydra; None without one.
        package: what its `# @package` line names, else None.
        problem: why it could not be read, so that nothing is known of its keys; else None.
    """

    name: str
    tree: dict[Any, Any] = field(default_factory=dict)
    defaults: Any = None
    package: str | None = None
    problem: str | None = None


def read_file(name: str, asked_by: str, origin: str | None = None) -> File:
    """Read a YAML file as OmegaConf does; `origin` stands for file and line in messages."""
    file, path = File(name), FilePath(name)
    try:
        text = own_resolvers(path.read_text(encoding="utf-8-sig"))
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        content = OmegaConf.to_container(OmegaConf.create(text)) if root is not None else {}
    except OSError as error:
        hint = suggest_path(path) if isinstance(error, FileNotFoundError) else ""
        hint = "; it is a URL: download it, and name the file" if "://" in name else hint
        if name in ("job", "hydra", "all") and asked_by == "--cfg":
            hint = f"; --cfg takes a file; {alias('--info')}"
        file.problem = f"{name}: {str(error.strerror).lower()} ({asked_by}){hint}"
    except Exception as error:  # PyYAML and OmegaConf raise errors of many kinds
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        reason = getattr(error, "problem", None) or str(error).partition("\n")[0]
        reason = "values are nested too deeply" if isinstance(error, RecursionError) else reason
        line = f", line {mark.line + 1}" if mark else ""
        file.problem = f"{name}{line}: broken YAML: {reason or 'not keys with values'}"
    else:
        if isinstance(root, yaml.MappingNode) and isinstance(content, dict):
            file.defaults = content.pop("defaults", None)
            file.tree = _tree(content, root, name, origin) if content else {}
        elif content:
            file.problem = f"{name}: must hold keys with values (KEY: value)"
        package = _PACKAGE.search(text)
        file.package = package[1] if package else None
    return file


def _tree(content: Any, node: yaml.Node | None, name: str, origin: str | None) -> Any:
    """The values with the lines on which they begin; a value that `<<` merges in has none."""
    if isinstance(content, dict) and content:
        is_mapping = isinstance(node, yaml.MappingNode)
        nodes = {key.value: child for key, child in node.value} if is_mapping else {}  # type: ignore[union-attr]
        return {
            key: _tree(child, nodes.get(str(key)), name, origin) for key, child in content.items()
        }
    place = f"{name}, line {node.start_mark.line + 1}" if node else name
    is_bare = isinstance(node, yaml.ScalarNode) and node.style is None and content is not None
    return Setting(content, origin or place, node.value if is_bare else None)  # type: ignore[union-attr]


class Files:
    """The files that one command line names, each read once.

    Attributes:
        folders: where groups and files are looked up; the first that has a file counts.
        read: every file read, by its path in the folders; the files of `--cfg` by a name of their own.
    """

    def __init__(self, folders: Sequence[FilePath]) -> None:
        self.folders = folders
        self.read: dict[str, File] = {}
        self._settings: list[Setting] = []

    def get(self, path: str) -> File | None:
        """The file at a path such as `model/resnet50`; None where there is none."""
        path = path.removesuffix(".yaml").removesuffix(".yml")
        places = (folder / f"{path}{suffix}" for folder in self.folders for suffix in SUFFIXES)
        if path not in self.read and (place := next(filter(FilePath.is_file, places), None)):
            preset = "=".join(path.rsplit("/", 1))
            origin = f"preset {preset}" if place.is_relative_to(PRESETS) else None
            self.read[path] = read_file(str(place), "defaults", origin)
        return self.read.get(path)

    def marked(self, tree: Any) -> Any:
        """A tree with a mark in place of each setting, which Hydra can compose."""
        if not isinstance(tree, Setting):
            return {name: self.marked(child) for name, child in tree.items()}
        if tree.value == {}:  # sets nothing below it
            return {}
        self._settings.append(tree)
        return f"\0{len(self._settings) - 1}"

    def unmarked(self, tree: Any) -> Any:
        """A composed tree with the settings that the marks stand for."""
        if isinstance(tree, str):
            return self._settings[int(tree[1:])]
        return {name: self.unmarked(child) for name, child in tree.items()} or Setting({}, "files")


class Source(ConfigSource):  # type: ignore[misc]
    """Serves the files of one command line.

    Attributes:
        files: reads the files.
        is_open: whether a command line is being composed.
        served: paths of the files that Hydra asked for.
        is_draft: whether `???` in a defaults list is no problem yet.
    """

    files: ClassVar[Files]
    is_open: ClassVar[bool] = False
    served: ClassVar[set[str]] = set()
    is_draft: ClassVar[bool] = False

    @classmethod
    @contextmanager
    def of(cls, files: Files) -> Iterator[None]:
        """Serve these files to Hydra, and leave a program around that uses Hydra as it is."""
        for plugin in (cls, _Place):
            Plugins.instance().register(plugin)
        cls.files, cls.served, cls.is_open = files, set(), True
        around, base = GlobalHydra.instance().hydra, version.getbase()
        GlobalHydra.instance().clear()
        try:
            yield
        finally:
            cls.is_open = False
            GlobalHydra.instance().hydra = around
            if isinstance(base, version.Version):
                version.VersionBase.instance().setbase(base)

    @staticmethod
    def scheme() -> str:
        """Return how places of this source begin."""
        return "linnaeus"

    def available(self) -> bool:
        """Return that there always is a source."""
        return True

    def load_config(self, config_path: str) -> ConfigResult:
        """Return a file as Hydra composes it."""
        file = self.files.get(config_path) or File(config_path)
        self.served.add(config_path)
        content = self.files.marked(file.tree)
        if "hydra" in content:  # no settings of Hydra itself
            content["\0hydra"] = content.pop("hydra")
        if file.defaults is not None:
            content["defaults"] = _draft(file.defaults) if self.is_draft else file.defaults
        header = {"package": file.package or node_of(config_path.rpartition("/")[0])}
        return ConfigResult("linnaeus", config_path, OmegaConf.create(content), header)

    def is_group(self, config_path: str) -> bool:
        """Return whether there is a folder of this name."""
        return any((folder / config_path).is_dir() for folder in self.files.folders)

    def is_config(self, config_path: str) -> bool:
        """Return whether there is a file of this name."""
        return self.files.get(config_path) is not None

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return the names to choose from in a group."""
        return names_in(config_path, self.files.folders)


class _Place(SearchPathPlugin):  # type: ignore[misc]
    """Adds the source to Hydra's search path, while files are served."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if Source.is_open:
            search_path.append("linnaeus", f"{Source.scheme()}://")


def _draft(defaults: Any) -> Any:
    """A defaults list without the choices that it leaves to the command line."""
    if not isinstance(defaults, list):
        return defaults
    return [
        {group: None if name == "???" else name for group, name in entry.items()}
        if isinstance(entry, dict)
        else entry
        for entry in defaults
    ]
