"""The reference page of all keys, generated from the schema."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any

from linnaeus.config.keys import KEYS, NODES, PLUGGABLE_PATHS, Key, Path, dotted, strip_optional

_INTRODUCTION = """\
# Configuration reference

Every key with its default. `python -m linnaeus.train --print-config` prints them as YAML. A default in
`${...}` follows another key. The search of this site finds keys by name, also by the whole name such as
`DATA.BATCH_SIZE`; each row can be linked to: `#DATA.BATCH_SIZE`.
"""
_NAMES = {int: "whole number", float: "number", str: "text", bool: "True or False", Any: "see the text"}
_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def reference() -> str:
    """The page, in Markdown: a table for each group of keys."""
    return "\n".join([_INTRODUCTION, *(line for path, doc in NODES.items() for line in _section(path, doc))])


def _section(path: Path, doc: str) -> Iterator[str]:
    keys = [key for key in KEYS.values() if key.path[:-1] == path]
    yield f"{'#' * (len(path) + 1)} {dotted(path)}\n"
    yield f"{doc[0].upper()}{doc[1:]}.\n"
    if path in PLUGGABLE_PATHS:
        yield f"Or a class of your own: `{dotted(path)}._target_`, with its arguments beside it.\n"
    if keys:
        yield "| key | default | takes | meaning |"
        yield "|---|---|---|---|"
        yield from map(_row, keys)
        yield ""


def _row(key: Key) -> str:
    unit = f" ({key.unit})" if key.unit else ""
    default = "null" if key.default is None else key.default
    cells = (f"`{key.path[-1]}`", f"`{default}`", _takes(key), f"{key.doc}{unit} {_anchor(key)}")
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def _anchor(key: Key) -> str:
    """A link to the row that shows the whole name, by which the search finds it."""
    name = dotted(key.path)
    return f'<a class="key" id="{name}" href="#{name}">{name}</a>'


def _takes(key: Key) -> str:
    """The type, the choices and the bounds, in words."""
    hint, is_optional = strip_optional(key.hint)
    words = ", ".join(f"`{choice}`" for choice in key.choices) if key.choices else _type(hint)
    bounds = " and ".join(f"{_BOUNDS[name]} {bound:g}" for name, bound in key.bounds.items())
    return " ".join(part for part in (words, bounds, "*or null*" if is_optional else "") if part)


def _type(hint: Any) -> str:
    origin = typing.get_origin(hint)
    if origin is list:
        return f"list of {_type(typing.get_args(hint)[0])}"
    return "mapping" if origin is dict else _NAMES[hint]
