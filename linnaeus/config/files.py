"""Reads YAML files as OmegaConf does: `1e-3` is a number, a date is text, and no key may stand twice."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from linnaeus.config.aliases import alias
from linnaeus.config.values import Bare, Setting

DEFAULTS = "defaults"
"""The key of a file's defaults list."""
_PACKAGE = re.compile(r"\s*#\s*@package\s+(\w+(?:\.\w+)*)\s*")


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


def read_file(name: str, asked_by: str) -> File:
    """Read a configuration file; messages say that `asked_by` names it."""
    file = File(name)
    try:
        if "://" in name:
            raise ValueError("it is a URL; download it first")
        text = FilePath(name).expanduser().read_text(encoding="utf-8-sig")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        content = OmegaConf.to_container(OmegaConf.create(text)) if root is not None else {}
    except FileNotFoundError:
        other = FilePath(name).expanduser().with_suffix(".yml" if name.endswith(".yaml") else ".yaml")
        hint = f"; did you mean {other}?" if other.is_file() else ""
        file.problem = f"{name}: no such file ({asked_by}){hint}"
    except IsADirectoryError:
        file.problem = f"{name}: is a folder, not a file ({asked_by})"
    except OSError as error:
        file.problem = f"{name}: cannot be read: {error.strerror} ({asked_by})"
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        reason = getattr(error, "problem", None) or str(error).splitlines()[0]
        file.problem = f"{name}{f', line {mark.line + 1}' if mark else ''}: broken YAML: {reason}"
    except RecursionError:
        file.problem = f"{name}: broken YAML: an alias holds itself, or values are nested too deeply"
    except (ValueError, RuntimeError, TypeError) as error:  # not UTF-8, a NUL
        file.problem = f"{name}: is not a text file in YAML: {error} ({asked_by})"
    else:
        file.package = next((match[1] for line in text.splitlines() if (match := _PACKAGE.match(line))), None)
        if isinstance(root, yaml.MappingNode):
            assert isinstance(content, dict)
            if "hydra" in content:
                file.problem = f"hydra: no such key ({name}); {alias('hydra.run')}"
                return file
            file.defaults = content.pop(DEFAULTS, None)
            nodes = {key.value: child for key, child in root.value}
            file.tree = {key: _tree(child, nodes.get(str(key)), name) for key, child in content.items()}
        elif root is not None and root.tag != "tag:yaml.org,2002:null":
            kind = "a list" if isinstance(content, list) else "a single value"
            file.problem = f"{name}: must hold keys with values (KEY: value), not {kind}"
    return file


def _tree(content: Any, node: yaml.Node | None, name: str) -> Any:
    """The values with the lines on which their keys stand; a value that `<<` merges in has none."""
    if not isinstance(content, dict) or not content:
        line = "" if node is None else f", line {node.start_mark.line + 1}"
        return Setting(_as_typed(content, node), f"{name}{line}")
    nodes = {key.value: child for key, child in node.value} if isinstance(node, yaml.MappingNode) else {}
    return {key: _tree(child, nodes.get(str(key)), name) for key, child in content.items()}


def _as_typed(content: Any, node: yaml.Node | None) -> Any:
    """A value that keeps the text of scalars without quotes, for keys that take text."""
    if isinstance(content, list) and isinstance(node, yaml.SequenceNode):
        return [_as_typed(item, child) for item, child in zip(content, node.value, strict=True)]
    if isinstance(node, yaml.ScalarNode) and node.style is None and content is not None:
        return Bare(node.value, lambda: content)
    return content
