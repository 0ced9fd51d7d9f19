"""Turns merged entries into a `Config`: resolves interpolations, checks values, builds the dataclasses."""

from __future__ import annotations

import dataclasses
import operator
import re
import typing
from collections.abc import Mapping
from typing import Any

from omegaconf import Container, OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

from linnaeus.config.keys import KEYS, TARGET, Key, Path, closest, dotted, node_class, suggest
from linnaeus.config.merge import Entry, Merged, Problem
from linnaeus.config.resolvers import register
from linnaeus.config.schema import Config
from linnaeus.config.values import MISSING, convert, resolve_number, show

_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def resolve(merged: Merged, chosen: Mapping[str, str]) -> tuple[Config | None, list[Problem]]:
    """Resolve and check everything.

    Args:
        merged: one entry for each key.
        chosen: the name chosen in each group, for `${hydra:runtime.choices...}`.

    Returns:
        The configuration, or None when there are problems, and the problems.
    """
    register(resolve_number, chosen)
    container = OmegaConf.create(_nest({path: entry.value for path, entry in merged.entries.items()}))
    values: dict[Path, Any] = {}
    found: dict[Path, str] = {}
    for path, entry in merged.entries.items():
        try:
            values[path] = _resolve_one(container, path, entry)
            problem = _problem(KEYS.get(path), path, values[path], entry)
        except ValueError as error:
            problem = f"{error} ({entry.origin})"
        if problem:
            found[path] = problem
    causes = [path for path in found if _is_cause(path, merged, found)]
    problems = [(path, f"{dotted(path)}: {found[path]}") for path in causes]
    problems += _crossed(values, merged.entries)
    return (None if problems else _build(Config, (), values, merged.free)), problems


def _resolve_one(container: Any, path: Path, entry: Entry) -> Any:
    """The value at one path, without interpolations, in the key's type."""
    try:
        value = container
        for part in path:
            value = value[part]
        if isinstance(value, Container):
            value = OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
    except (OmegaConfBaseException, RecursionError) as error:
        if entry.value == MISSING:
            raise ValueError("has no value yet, and needs one") from None
        raise ValueError(f"{show(entry.given)} cannot be resolved: {_reason(error)}") from None
    return convert(value, KEYS[path].hint, resolved=True) if path in KEYS else value


def _reason(error: Exception) -> str:
    reason = str(error).splitlines()[0]
    reason = re.sub(r"^\w+ raised while resolving interpolation: ", "", reason)
    if isinstance(error, InterpolationKeyError):
        name = reason.split("'")[1] if "'" in reason else ""
        real = closest(name)
        return f"there is no key {name}" + (f"; did you mean {real}?" if real and real != name else "")
    return "it refers to itself" if "Recursive" in reason or "recursion" in reason else reason


def _problem(key: Key | None, path: Path, value: Any, entry: Entry) -> str | None:
    """What is wrong with a resolved value."""
    if key is None:
        is_dotted_path = isinstance(value, str) and all(part.isidentifier() for part in value.split("."))
        if path[-1] == TARGET and not is_dotted_path:
            return f"{show(value)} is not the dotted path of a class or function ({entry.origin})"
        return None
    if key.choices and value is not None and value not in key.choices:
        allowed = ", ".join(key.choices)
        return f"{show(value)} is not one of {allowed} ({entry.origin}){suggest(str(value), key.choices)}"
    wrong = _out_of_bounds(key, value) or (key.check(value) if key.check else None)
    return f"{show(value)} is not allowed: {wrong} ({entry.origin})" if wrong else None


def _out_of_bounds(key: Key, value: Any) -> str | None:
    numbers = [number for number in (value if isinstance(value, list) else [value]) if number is not None]
    bounds = key.bounds.items()
    if all(getattr(operator, name)(number, bound) for number in numbers for name, bound in bounds):
        return None
    allowed = " and ".join(f"{_SIGNS[name]} {bound}" for name, bound in bounds)
    return f"{'each' if isinstance(value, list) else 'it'} must be {allowed}"


def _is_cause(path: Path, merged: Merged, found: Mapping[Path, str]) -> bool:
    """Whether a problem is this key's own, and not that of a key that it follows."""
    followed = _followed(path, merged) - {path}
    return not any(other in found and not _leads_to(path, other, merged) for other in followed)


def _leads_to(target: Path, start: Path, merged: Merged) -> bool:
    """Whether interpolations lead from one key to another, as they do within a cycle."""
    seen: set[Path] = set()
    ahead = {start}
    while ahead:
        seen |= ahead
        ahead = {path for here in ahead for path in _followed(here, merged)} - seen
    return target in seen


def _followed(path: Path, merged: Merged) -> set[Path]:
    """The keys in the interpolations of an entry."""
    entry = merged.entries.get(path)
    text = entry.value if entry and isinstance(entry.value, str) else ""
    return {tuple(name.split(".")) for name in _REFERENCE.findall(text)}


def _crossed(values: Mapping[Path, Any], entries: Mapping[Path, Entry]) -> list[Problem]:
    """Checks that need two keys."""
    problems: list[Problem] = []
    for suffix in ("", "_VAL"):
        low = ("DATA", "AUTOBATCH", f"MIN_BATCH_SIZE{suffix}")
        high = ("DATA", "AUTOBATCH", f"MAX_BATCH_SIZE{suffix}")
        if low in values and values.get(high) is not None and values[low] > values[high]:
            place = entries[high if entries[low].origin == "default" else low].origin
            sentence = f"{values[low]} is above {dotted(high)} {values[high]} ({place})"
            problems.append((low, f"{dotted(low)}: {sentence}"))
    return problems


def _nest(values: Mapping[Path, Any]) -> dict[Any, Any]:
    tree: dict[Any, Any] = {}
    for path, value in values.items():
        node = tree
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = value
    return tree


def _build(cls: type, path: Path, values: Mapping[Path, Any], free: set[Path]) -> Any:
    """Make the dataclass of one node; a free node is a plain dict."""
    hints = typing.get_type_hints(cls)
    arguments: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        here = (*path, field.name)
        node = node_class(field, hints[field.name])
        if here in values:
            arguments[field.name] = values[here]
        elif here in free or node is None:
            size = len(here)
            arguments[field.name] = _nest({p[size:]: v for p, v in values.items() if p[:size] == here})
        else:
            arguments[field.name] = _build(node, here, values, free)
    return cls(**arguments)
