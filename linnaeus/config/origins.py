"""Says beside each value of a printed configuration where it comes from (`--print-config --origin`)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import yaml

from linnaeus.config.keys import Path
from linnaeus.config.merge import Entry
from linnaeus.config.values import Bare, show

_REFERS = re.compile(r"(?<!\\)(?:\\\\)*\$\{")


def with_origins(text: str, entries: Mapping[Path, Entry]) -> str:
    """The YAML text of a configuration, with a comment on the line of each value.

    Args:
        text: what `to_yaml` gives.
        entries: the value that won at each key, with its origin.
    """
    origins = {tuple(map(str, path)): _origin(entry) for path, entry in entries.items()}
    lines = text.split("\n")
    for path, number in _values(yaml.compose(text, Loader=yaml.SafeLoader), ()):
        prefixes = (path[:size] for size in range(len(path), 0, -1))
        origin = next((origins[prefix] for prefix in prefixes if prefix in origins), None)
        if origin is not None:
            lines[number] += f"  # {origin}"
    return "\n".join(lines)


def _origin(entry: Entry) -> str:
    given = entry.given.text if isinstance(entry.given, Bare) else entry.given
    follows = f", follows {show(given)[1:-1]}" if isinstance(given, str) and _REFERS.search(given) else ""
    return f"{' '.join(entry.origin.split())}{follows}"


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
