"""Keys that are not there: the closest one, what a word of another framework means here, and renamed ones."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any

from linnaeus.config.keys import (
    KEYS,
    PLUGGABLE_PATHS,
    PRESETS,
    TARGET,
    Path,
    closest,
    dotted,
    names_in,
)

RENAMED: Mapping[Path, str] = {
    ("DATA", "DATASET", "RANKS"): "LEVELS",
    ("LOSS", "RANK_WEIGHTS"): "LEVEL_WEIGHTS",
}
"""The new last component of keys that earlier versions had under another name."""


@functools.cache
def aliases() -> dict[str, str]:
    """`KEY=VALUE`, or a sentence, by the name that users type; read from `aliases.yaml`."""
    import yaml

    table = yaml.safe_load(FilePath(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    found = {name: meaning for meaning, names in table.items() for name in names.split()}
    for path, name in RENAMED.items():
        found[dotted(path).lower()] = f"the key is now {dotted((*path[:-1], name))}"
    return found


def alias(word: str, value: str | None = None) -> str | None:
    """What a word of another framework means here, as the end of an error message.

    Args:
        word: an option (`--batch-size`, `-b`), a word (`lr=0.1`) or a key that does not exist (`TRAIN.LR`),
            with or without a value. Of a key only the last component counts, unless all of it is known.
        value: the typed value; a number or a choice of the key takes the place of the example's.

    Returns:
        The setting to write, or what there is in its place; None for an unknown word.
    """
    name = word.partition("=")[0].lstrip("-+~").lower().replace("-", "_")
    name = "hydra" if name.startswith(("hydra.", "hydra/")) else name
    meaning = aliases().get(name) or aliases().get(
        name.rpartition(".")[2] if name[-2:-1] != "." else ""
    )
    if meaning is None or not re.fullmatch(r"[\w.]+=\S+", meaning):
        return meaning
    typed = value or word.partition("=")[2]
    key, _, example = meaning.partition("=")
    is_number = re.fullmatch(r"[\d.]+(e-?\d+)?", typed) and re.match(r"\d", example)
    known = KEYS.get(tuple(key.split(".")))  # none below a node that takes any key
    is_choice = known is not None and typed in (known.choices or ())
    return f"write {key}={typed if is_number or is_choice else example}"


def renamed(nodes: Any, path: Path = ()) -> Any:
    """Return the nodes that an earlier version has written under today's names of keys.

    A node with a `_target_` has the names of its own arguments, which stay.
    """
    if not isinstance(nodes, Mapping) or TARGET in nodes:
        return nodes
    return {
        RENAMED.get((*path, name), name): renamed(node, (*path, name))
        for name, node in nodes.items()
    }


def unknown_key(path: Path, value: str) -> str:
    """What is wrong with a key that is not there, after the word `no such key`."""
    name, node = dotted(path), path[:-1]
    if any("." in str(part) for part in path):
        return "; keys in a file are nested, not joined by dots"
    real = closest(name)
    other = None if real and real.lower() == name.lower() else alias(name, value)
    if other or real:
        return f"; {other or f'did you mean {real}?'}"
    upper = tuple(str(part).upper() for part in path)
    for size in range(len(node), 0, -1):
        if upper[:size] in PLUGGABLE_PATHS and upper[:size] != path[:size]:
            return f"; did you mean {dotted((*upper[:size], *path[size:]))}?"
    if node in PLUGGABLE_PATHS:
        return f"; {dotted(node)} takes other keys when {dotted(node)}._target_ is set"
    return ""


def not_a_value(path: Path, text: object) -> str:
    """How to set what is below a group of keys, or to choose a preset for it."""
    group = "/".join(path).lower()
    if (
        isinstance(text, str)
        and re.fullmatch(r"[A-Za-z][\w.-]*", text)
        and names_in(group, [PRESETS])
    ):
        return f"; did you mean {group}={text}?"
    return f"; set the keys below it, such as {next(dotted(key) for key in KEYS if key[: len(path)] == path)}"
