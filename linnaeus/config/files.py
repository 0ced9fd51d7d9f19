"""Reads YAML files: every scalar as it was typed, with its line, and every problem.

PyYAML would turn text such as `on` or `007` into a bool or a number before the key's type is known, and would
silently keep the last of two equal keys. Here plain scalars keep their text, and equal keys are a problem.
"""

from __future__ import annotations

import re
from collections.abc import ItemsView, Iterator
from pathlib import Path as FilePath
from typing import Any

import yaml

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


def read_file(name: str) -> tuple[list[Setting], list[str]]:
    """Read a configuration file.

    Args:
        name: the path as the user gave it.

    Returns:
        The settings in the file's order, and the problems.
    """
    problems: list[str] = []
    try:
        text = FilePath(name).expanduser().read_text(encoding="utf-8")
        return list(_Reader(name, text, problems).settings()), problems
    except FileNotFoundError:
        problem = f"{name}: no such file (--cfg)"
    except IsADirectoryError:
        problem = f"{name}: is a folder, not a file (--cfg)"
    except OSError as error:
        problem = f"{name}: cannot be read: {error.strerror} (--cfg)"
    except yaml.YAMLError as error:
        problem = _yaml_problem(name, error)
    except (ValueError, RuntimeError) as error:  # not UTF-8, a NUL in the name, nested too deeply
        problem = f"{name}: is not a text file in YAML: {error} (--cfg)"
    return [], [*problems, problem]


def _yaml_problem(name: str, error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    line = f", line {mark.line + 1}" if mark else ""
    parts = (getattr(error, "context", None), getattr(error, "problem", None))
    reason = ", ".join(part for part in parts if part) or str(error).splitlines()[0]
    return f"{name}{line}: broken YAML: {reason}"


class _Reader:
    """Turns the nodes of one file into settings."""

    def __init__(self, name: str, text: str, problems: list[str]) -> None:
        self.name = name
        self.problems = problems
        self._loader = Loader(text)
        self._checked: set[int] = set()

    def settings(self) -> Iterator[Setting]:
        root = self._loader.get_single_node()
        self._check(root, (), frozenset())  # before `<<` merges keys that may be there already
        if isinstance(root, yaml.MappingNode):
            yield from self._mapping(root, ())
        elif root is not None and self._value(root) is not None:
            kind = "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
            self.problems.append(f"{self.name}: must hold keys with values (KEY: value), not {kind}")

    def _mapping(self, node: yaml.MappingNode, path: Path) -> Iterator[Setting]:
        for name, child in self._items(node):
            here = (*path, name)
            if isinstance(child, yaml.MappingNode) and child.value:
                yield from self._mapping(child, here)
            else:
                origin = f"{self.name}, line {child.start_mark.line + 1}"
                yield Setting(here, self._value(child), origin)

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
                line = name_node.start_mark.line + 1
                self.problems.append(f"{dotted(here)}: stands twice ({self.name}, line {line})")
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


def _fault(problem: str, node: yaml.Node) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
