"""Reads YAML files: every scalar as it was typed, with its line, and every problem.

PyYAML would turn text such as `on` or `007` into a bool or a number before the key's type is known, and would
silently keep the last of two equal keys. Here plain scalars keep their text, and equal keys are a problem.
A defaults list and a `# @package` line are those of Hydra: https://hydra.cc/docs/advanced/defaults_list
"""

from __future__ import annotations

import re
from collections.abc import ItemsView, Iterator
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

import yaml

from linnaeus.config.hydra_equivalents import is_hydra_key, why_no_effect
from linnaeus.config.keys import Path, dotted
from linnaeus.config.settings import Setting
from linnaeus.config.values import Bare

FLOAT_TAG = "tag:yaml.org,2002:float"
EXPONENT = re.compile(r"[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+|[-+]?(?:[0-9][0-9_]*)?\.[0-9_]*[eE][0-9]+")
"""Numbers such as 1e-3, which are text in YAML 1.1."""


class Loader(yaml.SafeLoader):
    """YAML as configurations use it: `1e-3` is a number, and a date is text."""


Loader.add_implicit_resolver(FLOAT_TAG, EXPONENT, list("-+0123456789."))
Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in Loader.yaml_implicit_resolvers.items()
}
for _tag in ("value", "merge"):  # `=` and `<<` are text when they are values
    Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", lambda loader, node: str(node.value))


class FastLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Reads the same values as `Loader`, where possible with PyYAML's parser in C, whose messages differ."""


FastLoader.yaml_implicit_resolvers = Loader.yaml_implicit_resolvers
FastLoader.yaml_constructors = Loader.yaml_constructors

DEFAULTS = "defaults"
"""The key of a file's defaults list."""
SELF = "_self_"
"""The entry that stands for the file's own keys."""

_ENTRY = re.compile(
    r"(?P<words>(?:(?:optional|override)\s+)*)(?P<path>/?[^\s@/]+(?:/[^\s@/]+)*)(?:@(?P<package>\w+(?:\.\w+)*))?"
)
_PACKAGE = re.compile(r"#\s*@package\s+(\w+(?:\.\w+)*)\s*")


@dataclass(frozen=True)
class DefaultsEntry:
    """One entry of a defaults list.

    Attributes:
        path: the group, or the file where `is_group` is false; `_self_` is the file itself.
        names: the file or files chosen in the group; None chooses none.
        is_group: whether it is written `group: name`.
        package: what is written after `@`.
        optional: whether the file may be missing.
        override: whether it changes the choice of another defaults list.
        origin: file and line, for messages.
    """

    path: str
    names: str | tuple[str, ...] | None = None
    is_group: bool = field(default=False, kw_only=True)
    package: str | None = field(default=None, kw_only=True)
    optional: bool = field(default=False, kw_only=True)
    override: bool = field(default=False, kw_only=True)
    origin: str = field(kw_only=True)


@dataclass
class File:
    """What one file says.

    Attributes:
        name: the path as messages show it.
        settings: in the file's order.
        defaults: its defaults list.
        package: what its `# @package` line names, else None.
        problems: one sentence each.
        is_broken: whether it could not be read, so that nothing is known of its settings.
    """

    name: str
    settings: list[Setting] = field(default_factory=list)
    defaults: list[DefaultsEntry] = field(default_factory=list)
    package: str | None = None
    problems: list[str] = field(default_factory=list)
    is_broken: bool = False


def read_file(name: str, option: str = "--cfg") -> File:
    """Read a configuration file; `option` is what named it, for messages."""
    file = File(name)
    try:
        text = FilePath(name).expanduser().read_text(encoding="utf-8-sig")
        file.package = _package(text)
        _Reader(text, file).read()
        return file
    except FileNotFoundError:
        problem = f"{name}: no such file ({option})"
    except IsADirectoryError:
        problem = f"{name}: is a folder, not a file ({option})"
    except OSError as error:
        problem = f"{name}: cannot be read: {error.strerror} ({option})"
    except yaml.YAMLError as error:
        problem = _yaml_problem(name, error)
    except (ValueError, RuntimeError) as error:  # not UTF-8, a NUL in the name, nested too deeply
        problem = f"{name}: is not a text file in YAML: {error} ({option})"
    return File(name, problems=[*file.problems, problem], is_broken=True)


def _package(text: str) -> str | None:
    """The package that a comment at the top of a file names."""
    for line in map(str.strip, text.splitlines()):
        if match := _PACKAGE.fullmatch(line):
            return match[1]
        if line and not line.startswith("#"):
            break
    return None


def _yaml_problem(name: str, error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    line = f", line {mark.line + 1}" if mark else ""
    parts = (getattr(error, "context", None), getattr(error, "problem", None))
    reason = ", ".join(part for part in parts if part) or str(error).splitlines()[0]
    return f"{name}{line}: broken YAML: {reason}"


class _Reader:
    """Turns the nodes of one file into settings."""

    def __init__(self, text: str, file: File) -> None:
        self.file = file
        self.name = file.name
        self.problems = file.problems
        self._loader = Loader(text)
        self._checked: set[int] = set()

    def read(self) -> None:
        """Fill the file's settings, defaults list and problems."""
        root = self._loader.get_single_node()
        self._check(root, (), frozenset())  # before `<<` merges keys that may be there already
        if isinstance(root, yaml.MappingNode):
            for node in (value for key, value in root.value if key.value == DEFAULTS):
                self.file.defaults += self._defaults(node)
            root.value = [(key, value) for key, value in root.value if key.value != DEFAULTS]
            self.file.settings += self._mapping(root, ())
        elif root is not None and self._value(root) is not None:
            kind = "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
            self.problems.append(f"{self.name}: must hold keys with values (KEY: value), not {kind}")

    def _defaults(self, node: yaml.Node) -> Iterator[DefaultsEntry]:
        """The entries of a defaults list; one that cannot be read is a problem."""
        if not isinstance(node, yaml.SequenceNode):
            if self._value(node) is not None:
                self.problems.append(
                    f"{DEFAULTS}: must be a list such as `- model: resnet50` ({self._place(node)})"
                )
            return
        has_self = False
        for item in node.value:
            entry = self._entry(item)
            if entry is None:
                self.problems.append(
                    f"{DEFAULTS}: an entry is a file (`- base`), a choice (`- model: resnet50`, `- override "
                    f"/model: resnet50`) or `- _self_` ({self._place(item)})"
                )
            elif is_hydra_key(group := entry.path.lstrip("/")):
                self.problems.append(f"{group}: {why_no_effect(group, entry.origin)}")
            elif entry.path == SELF and has_self:
                self.problems.append(f"{DEFAULTS}: _self_ stands twice ({entry.origin})")
            else:
                has_self |= entry.path == SELF
                yield entry

    def _entry(self, node: yaml.Node) -> DefaultsEntry | None:
        is_group = isinstance(node, yaml.MappingNode)
        names: str | tuple[str, ...] | None = None
        if isinstance(node, yaml.MappingNode):
            if len(node.value) != 1:
                return None
            node, chosen = node.value[0]
            names = self._names_chosen(chosen)
            if names == "":
                return None
        match = _ENTRY.fullmatch(node.value) if isinstance(node, yaml.ScalarNode) else None
        if not match or (match["path"] == SELF and (is_group or match["package"] or match["words"])):
            return None
        words = match["words"].split()
        if not is_group and words:
            return None
        return DefaultsEntry(
            match["path"],
            names,
            is_group=is_group,
            package=match["package"],
            optional="optional" in words,
            override="override" in words,
            origin=self._place(node),
        )

    def _names_chosen(self, node: yaml.Node) -> str | tuple[str, ...] | None:
        """The value of a `group: value` entry; empty text where it cannot be used."""
        if isinstance(node, yaml.SequenceNode):
            names = tuple(item.value for item in node.value if isinstance(item, yaml.ScalarNode))
            return names if len(names) == len(node.value) and all(map(_is_name, names)) else ""
        if not isinstance(node, yaml.ScalarNode):
            return ""
        if self._loader.construct_object(node) is None or node.value == "None":
            return None
        return node.value if _is_name(node.value) else ""

    def _place(self, node: yaml.Node) -> str:
        return f"{self.name}, line {node.start_mark.line + 1}"

    def _mapping(self, node: yaml.MappingNode, path: Path) -> Iterator[Setting]:
        for name, child in self._items(node):
            here = (*path, name)
            if isinstance(child, yaml.MappingNode) and child.value:
                yield from self._mapping(child, here)
            else:
                yield Setting(here, self._value(child), self._place(child))

    def _check(self, node: yaml.Node | None, path: Path, above: frozenset[int]) -> None:
        """Find keys that stand twice, and aliases of a node that holds them."""
        if not isinstance(node, yaml.CollectionNode):
            return
        if id(node) in above:
            raise _fault("an alias holds itself", node)
        if id(node) in self._checked:
            return
        self._checked.add(id(node))
        above |= {id(node)}
        if isinstance(node, yaml.SequenceNode):
            for child in node.value:
                self._check(child, path, above)
            return
        seen: set[Any] = set()
        for name_node, child in node.value:
            here = (*path, self._name(name_node))
            if here[-1] in seen:
                self.problems.append(f"{dotted(here)}: stands twice ({self._place(name_node)})")
            seen.add(here[-1])
            self._check(child, here, above)

    def _items(self, node: yaml.MappingNode) -> ItemsView[Any, yaml.Node]:
        """The keys and values of a mapping, with `<<` merged in."""
        self._loader.flatten_mapping(node)
        return {self._name(name_node): child for name_node, child in node.value}.items()

    def _name(self, node: yaml.Node) -> Any:
        name = self._loader.construct_object(node) if isinstance(node, yaml.ScalarNode) else None
        if not isinstance(name, (str, int, float)):
            raise _fault("a key must be text", node)
        return name

    def _value(self, node: yaml.Node) -> Any:
        if isinstance(node, yaml.MappingNode):
            return {name: self._value(child) for name, child in self._items(node)}
        if isinstance(node, yaml.SequenceNode):
            return [self._value(child) for child in node.value]
        assert isinstance(node, yaml.ScalarNode)
        value = self._loader.construct_object(node)
        if value is not None and not isinstance(value, (str, int, float)):
            raise _fault(f"a {type(value).__name__} cannot be a value", node)
        return value if value is None or node.style else Bare(node.value, lambda: value)


def _is_name(text: str) -> bool:
    return "${" in text or re.fullmatch(r"[^\s@/]+(/[^\s@/]+)*", text) is not None


def _fault(problem: str, node: yaml.Node) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
