"""Write the table of all configuration keys, from the schema.

python tools/keys_page.py            # print it
python tools/keys_page.py --write    # put it into docs/keys.md
"""

from __future__ import annotations

import argparse
import pathlib
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from linnaeus.config.keys import KEYS, NODES, PLUGGABLE_PATHS, Key, Path, dotted, strip_optional

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "keys.md"

_INTRODUCTION = """\
# Every key

<!-- made by tools/keys_page.py --write; do not edit -->

`linnaeus train --print-config` prints all keys as YAML. A default in `${...}` follows another key. Each row
has a link: `#DATA.BATCH_SIZE`. Keys that few need are folded.
"""
_FEW_NEED = frozenset(
    {
        "CHANNELS",
        "DISTRIBUTE_BN",
        "FIND_UNUSED_PARAMETERS",
        "FOLDER_NAMES",
        "IMAGE_COLUMN",
        "LENGTH",
        "LOG_LEVEL",
        "MAX_TRIALS",
        "MEMORY_LIMIT_GB",
        "NOISE",
        "NUM_SAMPLES",
        "NUM_SAMPLES_VAL",
        "NUM_SPEC_SAMPLES",
        "OBJECTIVE",
        "PIN_MEMORY",
        "PREFETCH_FACTOR",
        "RESUME_WITH",
        "START",
        "START_MINUTES",
        "START_VAL",
        "STEPS_PER_TRIAL",
        "STRATEGY",
        "TIMEOUT_MINUTES",
        "UNFREEZE_EPOCH",
        "UNKNOWN_FRACTION",
    }
)
"""Last components of the keys that are folded, beside those that follow another key."""
_NAMES = {
    int: "whole number",
    float: "number",
    str: "text",
    bool: "True or False",
    Any: "see the text",
}
_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def reference() -> str:
    """Return the page of all keys, in Markdown: a table for each group of keys."""
    return "\n".join(
        [_INTRODUCTION, *(line for path, doc in NODES.items() for line in _section(path, doc))]
    )


def _section(path: Path, doc: str) -> Iterator[str]:
    keys = [key for key in KEYS.values() if key.path[:-1] == path]
    yield f"{'#' * (len(path) + 1)} {dotted(path)}\n"
    yield f"{doc[0].upper()}{doc[1:]}.\n"
    if path in PLUGGABLE_PATHS:
        yield f"Or a class of your own: `{dotted(path)}._target_`, with its arguments beside it.\n"
    few = [key for key in keys if key.path[-1] in _FEW_NEED or str(key.default).startswith("${")]
    if usual := [key for key in keys if key not in few]:
        yield from _table(usual)
    if few:
        yield f"<details markdown><summary>{', '.join(key.path[-1] for key in few)}</summary>\n"
        yield from _table(few)
        yield "</details>\n"


def _table(keys: Sequence[Key]) -> Iterator[str]:
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
    shown = {name: "2^63" if bound == 2**63 else f"{bound:g}" for name, bound in key.bounds.items()}
    bounds = " and ".join(f"{_BOUNDS[name]} {bound}" for name, bound in shown.items())
    return " ".join(part for part in (words, bounds, "*or null*" if is_optional else "") if part)


def _type(hint: Any) -> str:
    origin = typing.get_origin(hint)
    if origin is list:
        return f"list of {_type(typing.get_args(hint)[0])}"
    return "mapping" if origin is dict else _NAMES[hint]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Print the table of all keys.")
    parser.add_argument("--write", action="store_true", help="write it to docs/keys.md instead")
    if parser.parse_args().write:
        PAGE.write_text(reference())
    else:
        print(reference(), end="")
