"""Says beside each value of a printed configuration where it comes from (`--print-config --origin`)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import yaml

from linnaeus.config.keys import KEYS, Path
from linnaeus.config.values import Setting, show

_REFERS = re.compile(r"(?<!\\)(?:\\\\)*\$\{")


def with_origins(text: str, settings: Mapping[Path, Setting]) -> str:
    """The YAML text of a configuration, with a comment on the line of each value.

    Args:
        text: what `to_yaml` gives.
        settings: the setting of each key that is not at its default.
    """
    defaults = {path: Setting(key.default, "default") for path, key in KEYS.items()}
    origins = {tuple(map(str, path)): setting for path, setting in (defaults | {**settings}).items()}
    lines = text.split("\n")
    for path, number in _values(yaml.compose(text, Loader=yaml.SafeLoader), ()):
        prefixes = (path[:size] for size in range(len(path), 0, -1))
        setting = next((origins[prefix] for prefix in prefixes if prefix in origins), None)
        if setting is not None:
            follows = isinstance(setting.text, str) and _REFERS.search(setting.text)
            lines[number] += f"  # {' '.join(setting.origin.split())}"
            lines[number] += f", follows {show(setting.text)[1:-1]}" if follows else ""
    return "\n".join(lines)


def _values(node: yaml.Node | None, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], int]]:
    """The path of each value, and the number of the line on which its key stands, from 0."""
    if not isinstance(node, yaml.MappingNode):
        return
    for name, child in node.value:
        here = (*path, str(name.value))
        if isinstance(child, yaml.MappingNode) and child.value:
            yield from _values(child, here)
        else:
            yield here, name.start_mark.line
