"""Merges the settings of all sources into one typed value per key; an unknown key is a problem."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from linnaeus.config.hydra_equivalents import is_hydra_key, why_no_effect
from linnaeus.config.keys import (
    KEYS,
    NODES,
    PLUGGABLE_PATHS,
    TARGET,
    Key,
    Path,
    Place,
    classify,
    closest,
    dotted,
)
from linnaeus.config.search_path import EXPERIMENT
from linnaeus.config.settings import Setting, flatten
from linnaeus.config.values import convert, show, untyped

Problem = tuple[Path, str]
"""The key that is wrong, and the sentence that says so."""


@dataclass(frozen=True)
class Entry:
    """The value that won at one key.

    Attributes:
        value: the value, of the key's type; or text with interpolations.
        given: the value as it was typed, for messages.
        origin: where it was typed, in words; `default` for the schema's default.
    """

    value: Any
    given: Any
    origin: str


@dataclass
class Merged:
    """All entries, the nodes that a `_target_` has replaced, and the problems found."""

    entries: dict[Path, Entry] = field(default_factory=dict)
    free: set[Path] = field(default_factory=set)
    problems: list[Problem] = field(default_factory=list)


def merge(settings: Sequence[Setting]) -> Merged:
    """Merge settings over the schema's defaults, the later over the earlier."""
    merged = Merged()
    kept = _apply_deletions(settings, merged.problems)
    merged.free = {setting.path[:-1] for setting in kept if _is_target(setting.path)}
    preset_targets = {setting.path[:-1] for setting in kept if _is_target(setting.path) and setting.is_preset}
    merged.entries = {path: entry for path, entry in _defaults().items() if not _below_any(path, merged.free)}
    for setting in kept:
        # Where the user's own class replaces a node, presets for the built-in node do not apply.
        if setting.is_preset and _below_any(setting.path, merged.free - preset_targets):
            continue
        problem = _set(merged, setting)
        if problem:
            merged.problems.append((setting.path, f"{dotted(setting.path)}: {problem}"))
    return merged


@functools.cache
def _defaults() -> Mapping[Path, Entry]:
    """The schema's defaults. Parsing their interpolations takes a third of the time of a merge."""
    return {path: Entry(convert(key.default, key.hint), key.default, "default") for path, key in KEYS.items()}


def _is_target(path: Path) -> bool:
    return path[:-1] in PLUGGABLE_PATHS and path[-1] == TARGET


def _below_any(path: Path, nodes: Iterable[Path]) -> bool:
    return any(path[: len(node)] == node for node in nodes)


def _apply_deletions(settings: Sequence[Setting], problems: list[Problem]) -> list[Setting]:
    """Leave out the settings that a later `~KEY` deletes."""
    kept: list[Setting] = []
    for setting in settings:
        if not setting.delete:
            kept.append(setting)
            continue
        path, before = setting.path, len(kept)
        if setting.value is not None and not _holds(kept, setting):
            sentence = f"is not {show(setting.value)}, nothing deleted ({setting.origin})"
            problems.append((path, f"~{dotted(path)}: {sentence}"))
            continue
        kept = [other for other in kept if other.path[: len(path)] != path]
        if len(kept) == before and classify(path) in (Place.NO_KEY, Place.FREE):
            problems.append((path, f"~{dotted(path)}: {_unknown(path, setting.origin)}"))
    return kept


def _holds(kept: Sequence[Setting], deletion: Setting) -> bool:
    """Whether the value in `~KEY=VALUE` is the key's value before the deletion."""
    key = KEYS.get(deletion.path)
    current = [key.default] if key else []
    current += [setting.value for setting in kept if setting.path == deletion.path]
    try:
        hint = key.hint if key else Any
        return bool(current) and convert(current[-1], hint) == convert(deletion.value, hint)
    except ValueError:
        return False


def _set(merged: Merged, setting: Setting) -> str | None:
    """Enter one setting; returns what is wrong with it, or None."""
    place = classify(setting.path, merged.free)
    if place is Place.NO_KEY:
        return _unknown(setting.path, setting.origin)
    if place is Place.NODE:
        # An empty section in a file sets nothing.
        return None if setting.value in (None, {}) else _not_a_value(setting)
    try:
        if isinstance(place, Key):
            if not (place.is_mapping and setting.value is None):
                value = convert(setting.value, place.hint)
                _put(merged.entries, setting.path, Entry(value, setting.value, setting.origin))
            return None
        if not all(isinstance(part, str) for part in _names(setting.path, merged.free)):
            return f"the names of arguments must be text ({setting.origin})"
        for part in flatten(setting.path, untyped(setting.value), setting.origin):
            _put(merged.entries, part.path, Entry(part.value, setting.value, setting.origin))
    except ValueError as error:
        return f"{error} ({setting.origin})"
    return None


def _names(path: Path, free: Iterable[Path]) -> Path:
    """The components that name arguments: the first one below each free node or mapping."""
    roots = [*free, *(key.path for key in KEYS.values() if key.is_mapping)]
    return tuple(path[len(root)] for root in roots if path[: len(root)] == root and len(path) > len(root))


def _put(entries: dict[Path, Entry], path: Path, entry: Entry) -> None:
    """Enter a value and drop entries above and below it. An empty mapping leaves the entries below it."""
    size = len(path)
    below = [other for other in entries if other[:size] == path and len(other) > size]
    if entry.value == {} and below:
        return
    for length in range(1, size):
        above = entries.get(path[:length])
        if above and isinstance(above.value, list):
            raise ValueError(f"{dotted(path[:length])} is a list, which can only be set as a whole")
        entries.pop(path[:length], None)
    for other in below:
        del entries[other]
    entries[path] = entry


def _unknown(path: Path, origin: str) -> str:
    if is_hydra_key(str(path[0])):
        return why_no_effect(dotted(path), origin)
    upper = next((path[:size] for size in range(1, len(path)) if path[:size] in KEYS), None)
    if any("." in str(part) for part in path):
        return f"no such key ({origin}); keys in a file are nested, not joined by dots"
    if upper and TARGET not in path and KEYS[upper].is_mapping:
        return f"is not set ({origin})"
    if upper and TARGET not in path:
        return f"no such key ({origin}); {dotted(upper)} takes a value and has no keys below it"
    if path in NODES:
        return f"is a group of keys ({origin})"
    real = closest(dotted(path))
    top = str(path[0]).upper()
    if real is None and top != path[0] and (top,) in NODES:
        real = dotted((top, *path[1:]))
    node = next((node for node in PLUGGABLE_PATHS if path[:-1] == node), None)
    hints = []
    if node and not (real or "").startswith(f"{dotted(node)}."):
        hints.append(f"{dotted(node)} takes other keys when {dotted(node)}._target_ is set")
    if real:
        hints.append(f"did you mean {real}?")
    if len(path) == 1 and ", line " in origin and str(path[0]).islower():
        hints.append(
            "a file has no variables of its own: refer to the key that holds the value (${OPTIMIZER.LR}), or "
            "to the environment (${oc.env:NAME})"
        )
    return "; ".join([f"no such key ({origin})", *hints])


def _not_a_value(setting: Setting) -> str:
    first = next((dotted(path) for path in KEYS if path[: len(setting.path)] == setting.path), "")
    example = f", such as {first}" if first else ""
    problem = f"is a group of keys, not a key that takes {show(setting.value)} ({setting.origin})"
    text = untyped(setting.value, check=False)
    group = "/".join(map(str, setting.path)).lower()
    is_typed = setting.origin == "command line" and isinstance(text, str) and re.fullmatch(r"[\w.-]+", text)
    if is_typed and group != EXPERIMENT:
        return f"{problem}; did you mean {group}={text}?"
    return f"{problem}; set the keys below it{example}"
