"""Reads YAML files as OmegaConf does: `1e-3` is a number, a date is text, and no key may stand twice."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

import yaml
from omegaconf import OmegaConf

from linnaeus.config.keys import PRESETS, SUFFIXES
from linnaeus.config.values import Bare, Setting
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


@dataclass
class Files:
    """The files that are read for one command line, each once.

    Attributes:
        folders: where groups and files are looked up; the first that has a file counts.
        read: every file read, by its path in the folders; those of `--cfg` by a name of their own.
    """

    folders: Sequence[FilePath]
    read: dict[str, File] = field(default_factory=dict)

    def get(self, path: str) -> File | None:
        """The file at a path such as `model/resnet50`; None where there is none."""
        path = path.removesuffix(".yaml").removesuffix(".yml")
        places = (folder / f"{path}{suffix}" for folder in self.folders for suffix in SUFFIXES)
        file = (
            None
            if path in self.read
            else next((place for place in places if place.is_file()), None)
        )
        if file is not None:
            preset = "=".join(path.rsplit("/", 1)) if file.is_relative_to(PRESETS) else None
            self.read[path] = read_file(str(file), "defaults", preset)
        return self.read.get(path)


def read_file(name: str, asked_by: str, preset: str | None = None) -> File:
    """Read a configuration file.

    Args:
        name: its path.
        asked_by: what names it, for messages.
        preset: group and name of a preset of the package, such as `model=resnet50`.
    """
    file, path = File(name), FilePath(name)
    try:
        text = path.read_text(encoding="utf-8-sig")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        content = OmegaConf.to_container(OmegaConf.create(text)) if root is not None else {}
    except OSError as error:
        hint = suggest_path(path) if isinstance(error, FileNotFoundError) else ""
        hint = "; it is a URL: download it, and name the file" if "://" in name else hint
        file.problem = f"{name}: {str(error.strerror).lower()} ({asked_by}){hint}"
    except (
        Exception
    ) as error:  # PyYAML and OmegaConf raise errors of many kinds for what is not a mapping
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        reason = (
            getattr(error, "problem", None)
            or str(error).partition("\n")[0]
            or "not keys with values"
        )
        reason = "values are nested too deeply" if isinstance(error, RecursionError) else reason
        file.problem = f"{name}{f', line {mark.line + 1}' if mark else ''}: broken YAML: {reason}"
    else:
        if isinstance(root, yaml.MappingNode) and isinstance(content, dict):
            file.defaults = content.pop("defaults", None)
            file.tree = _tree(content, root, name, preset) if content else {}
        elif content:
            file.problem = f"{name}: must hold keys with values (KEY: value)"
        package = _PACKAGE.search(text)
        file.package = package[1] if package else None
    return file


def _tree(content: Any, node: yaml.Node | None, name: str, preset: str | None) -> Any:
    """The values with the lines on which they begin; a value that `<<` merges in has none."""
    if isinstance(content, dict) and content:
        nodes = (
            {key.value: child for key, child in node.value}
            if isinstance(node, yaml.MappingNode)
            else {}
        )
        return {
            key: _tree(child, nodes.get(str(key)), name, preset) for key, child in content.items()
        }
    origin = f"{name}, line {node.start_mark.line + 1}" if node else name
    return Setting(_as_typed(content, node), f"preset {preset}" if preset else origin, preset)


def _as_typed(content: Any, node: yaml.Node | None) -> Any:
    """A value that keeps the text of scalars without quotes, for keys that take text."""
    if isinstance(content, list) and isinstance(node, yaml.SequenceNode):
        return [_as_typed(item, child) for item, child in zip(content, node.value, strict=True)]
    if isinstance(node, yaml.ScalarNode) and node.style is None and content is not None:
        return Bare(node.value, lambda: content)
    return content
