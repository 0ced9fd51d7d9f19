"""What each source sets, key by key: command line, presets and files all end as settings."""

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
        path: the key; mappings are taken apart, so that below it there is no other key.
        value: what was typed; not yet of the key's type.
        origin: where it stands, for messages.
        delete: forget what earlier sources set at this key and below it.
    """

    path: Path
    value: Any
    origin: str
    delete: bool = False


def flatten(path: Path, value: Any, origin: str) -> Iterator[Setting]:
    """Take a mapping apart; an empty one stays as it is."""
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
        if override.delete:
            yield Setting(path, value, origin, delete=True)
        elif isinstance(value, Bare) and value.text.lstrip().startswith("{") and _takes_mapping(path):
            meaning = untyped(value, check=False)
            yield from flatten(path, meaning if isinstance(meaning, dict) else value, origin)
        else:
            yield Setting(path, value, origin)


def _takes_mapping(path: Path) -> bool:
    return path not in KEYS or KEYS[path].is_mapping
