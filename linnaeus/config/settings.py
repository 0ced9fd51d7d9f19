"""A setting: one key set by the command line, a preset or a file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from linnaeus.config.keys import KEYS, Path
from linnaeus.config.overrides import Override
from linnaeus.config.values import Bare, from_command_line, untyped


@dataclass(frozen=True)
class Setting:
    """One key set, or deleted, by one source.

    Attributes:
        path: the key. A mapping becomes one setting for each of its keys.
        value: the value as typed, not yet converted to the key's type.
        origin: where it was typed, for messages.
        delete: remove what earlier sources set at this key and below it.
        is_preset: whether a preset of the package sets it.
    """

    path: Path
    value: Any
    origin: str
    delete: bool = False
    is_preset: bool = False


def flatten(path: Path, value: Any, origin: str) -> Iterator[Setting]:
    """One setting for each key of a mapping, nested ones included; an empty mapping is a value."""
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from flatten((*path, name), item, origin)
    else:
        yield Setting(path, value, origin)


def from_overrides(overrides: Sequence[Override]) -> Iterator[Setting]:
    """The settings of the command line. `KEY={...}` on a group of keys sets each of them."""
    origin = "command line"
    for override in overrides:
        path = tuple(override.key.split("."))
        value = None if override.text is None else from_command_line(override.text)
        takes_mapping = path not in KEYS or KEYS[path].is_mapping
        if override.delete:
            yield Setting(path, value, origin, delete=True)
        elif isinstance(value, Bare) and value.text.lstrip().startswith("{") and takes_mapping:
            meaning = untyped(value, check=False)
            yield from flatten(path, meaning if isinstance(meaning, dict) else value, origin)
        else:
            yield Setting(path, value, origin)
