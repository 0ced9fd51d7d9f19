"""Unknown keys: the closest key, and the key for a word of another framework."""

from __future__ import annotations

import functools
import re
from pathlib import Path as FilePath

from linnaeus.config.keys import (
    KEYS,
    PLUGGABLE_PATHS,
    PRESETS,
    Path,
    closest,
    dotted,
    names_in,
)


@functools.cache
def aliases() -> dict[str, str]:
    """`KEY=VALUE`, or a sentence, by the name that users type; read from `aliases.yaml`."""
    import yaml

    table = yaml.safe_load(FilePath(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return {name: meaning for meaning, names in table.items() for name in names.split()}


def alias(word: str, value: str | None = None) -> str | None:
    """Translate a word of another framework, as the end of an error message.

    Args:
        word: an option (`--batch-size`, `-b`), a word (`lr=0.1`) or a key that does not exist (`TRAIN.LR`),
            with or without a value. Of a key only the last component counts, unless all of it is known.
        value: the typed value; a number or a choice of the key takes the place of the example's.

    Returns:
        The setting to write, or a sentence about its equivalent; None for an unknown word.
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
    return f"write {key}={typed if is_number else example}"


def unknown_key(path: Path, value: str) -> str:
    """Return the text after `no such key` for an unknown key."""
    name, node = dotted(path), path[:-1]
    if any("." in str(part) for part in path):
        return "; keys in a file are nested, not joined by dots"
    real = closest(name)
    other = None if real and real.lower() == name.lower() else alias(name, value)
    if other or real:
        return f"; {other or f'did you mean {real}?'}"
    upper = tuple(str(part).upper() for part in node)
    if upper in PLUGGABLE_PATHS and upper != node:
        return f"; did you mean {dotted((*upper, path[-1]))}?"
    if node in PLUGGABLE_PATHS:
        return f"; {dotted(node)} takes other keys when {dotted(node)}._target_ is set"
    return ""


def not_a_value(path: Path, text: object) -> str:
    """Return how to set the keys of a group, or to choose a preset for it."""
    group = "/".join(path).lower()
    if (
        isinstance(text, str)
        and re.fullmatch(r"[A-Za-z][\w.-]*", text)
        and names_in(group, [PRESETS])
    ):
        return f"; did you mean {group}={text}?"
    return f"; set the keys below it, such as {next(dotted(key) for key in KEYS if key[: len(path)] == path)}"
