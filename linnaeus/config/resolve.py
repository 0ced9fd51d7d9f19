"""Turns the tree of settings into a `Config`: OmegaConf types, resolves and builds; we find all problems."""

from __future__ import annotations

import copy
import functools
import operator
import re
import typing
from collections.abc import Mapping
from typing import Any

from omegaconf import Container, OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException, ValidationError

from linnaeus.config.aliases import alias
from linnaeus.config.keys import (
    EXPERIMENT,
    KEYS,
    NODES,
    PLUGGABLE_PATHS,
    TARGET,
    Key,
    Path,
    closest,
    dotted,
    strip_optional,
    suggest,
)  # fmt: skip
from linnaeus.config.resolvers import register
from linnaeus.config.schema import Config
from linnaeus.config.tree import COMMAND_LINE, leaves, sweep_hint
from linnaeus.config.values import MISSING, WANTED, Setting, convert, resolve_number, show, untyped

_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


class Resolver:
    """Resolves one tree.

    Attributes:
        settings: the setting of each key that is not at its default.
        wrong: what is wrong with a key, the predicate of a sentence.
        config: the configuration; None where something is wrong.
    """

    def __init__(self, tree: Mapping[Any, Any], chosen: Mapping[str, str]) -> None:
        register(resolve_number, chosen)
        self.settings: dict[Path, Setting] = {}
        self.wrong: dict[Path, str] = {}
        self._typed = copy.deepcopy(_defaults())
        self._free: set[Path] = set()
        for name, child in tree.items():
            self._take((name,), child)
        for path in [*KEYS, *(path for path in self.settings if path not in KEYS)]:
            is_there = path in self.settings or not self._is_free(path)
            if is_there and path not in self.wrong and (problem := self._problem(path)):
                self.wrong[path] = problem
        self._check_bounds_of_sizes()
        for path in [path for path in self.wrong if self._follows_a_wrong_key(path)]:
            del self.wrong[path]
        self.config: Config | None = None if self.wrong else OmegaConf.to_object(self._typed)  # type: ignore[assignment]

    def _take(self, path: Path, child: Any) -> None:
        """Assign a setting, or all below a path."""
        key = KEYS.get(path)
        is_tree = isinstance(child, dict)
        if path in PLUGGABLE_PATHS and is_tree and isinstance(child.get(TARGET), Setting):
            self._free.add(path)
            built_in = child[TARGET].preset
            # Where the user's own class replaces a node, presets for the built-in node do not apply.
            self._take_free(path, child if built_in else _without_presets(child))
        elif key and key.is_mapping and is_tree:
            self._take_free(path, child)
        elif path in NODES and is_tree:
            for name, below in child.items():
                self._take((*path, name), below)
        elif is_tree:
            for leaf, setting in leaves(child, path):
                self.wrong[leaf] = _unknown(leaf, setting)
        elif key is None:
            if path not in NODES:
                self.wrong[path] = _unknown(path, child)
            elif child.value not in (None, {}):  # an empty section of a file sets nothing
                self.wrong[path] = _not_a_value(path, child)
        elif not (key.is_mapping and child.value in (None, {})):
            self.settings[path] = child
            try:
                _assign(self._typed, path, convert(child.value, key.hint))
            except ValidationError:
                hint, _ = strip_optional(key.hint)
                wanted = WANTED.get(getattr(hint, "__origin__", hint))
                self.wrong[path] = f"{show(child.value)} is not {wanted} ({child.origin})"
            except ValueError as error:
                self.wrong[path] = f"{error} ({child.origin}){_sweep_hint(path, child)}"

    def _take_free(self, path: Path, tree: dict[Any, Any]) -> None:
        """Assign a node that takes any key."""
        is_whole = True
        for leaf, setting in leaves(tree, path):
            try:
                if not all(isinstance(name, str) for name in leaf):
                    raise ValueError("the names of arguments must be text")
                if path in KEYS and TARGET in leaf:
                    self.wrong[leaf] = _unknown(leaf, setting)
                untyped(setting)
                self.settings[leaf] = setting
            except ValueError as error:
                self.wrong[leaf] = f"{error} ({setting.origin})"
                is_whole = False
        _assign(self._typed, path, untyped(tree) if is_whole else {})

    def _problem(self, path: Path) -> str | None:
        """What is wrong with a resolved value."""
        key = None if self._is_free(path) else KEYS.get(path)
        setting, origin = self.settings.get(path), self._origin(path)
        given = setting.text if setting else key.default if key else None
        try:
            value = self._typed
            for name in path:
                value = value[name]
            if isinstance(value, Container):
                value = OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
        except (OmegaConfBaseException, RecursionError) as error:
            if given == MISSING:
                return f"has no value yet, and needs one ({origin})"
            return f"{show(given)} cannot be resolved: {_reason(error)} ({origin})"
        if key is None:
            is_dotted_path = isinstance(value, str) and all(part.isidentifier() for part in value.split("."))
            if path[-1] == TARGET and path[:-1] in self._free and not is_dotted_path:
                return f"{show(value)} is not the dotted path of a class or function ({origin})"
            return None
        hint, _ = strip_optional(key.hint)
        kind = typing.get_origin(hint)
        if kind is not None and value is not None and self._followed(path):
            if not isinstance(value, kind):
                return f"{show(value)} is not {WANTED[kind]} ({origin})"
            try:
                convert(value, hint)
            except ValueError as error:
                return f"{error} ({origin})"
        if key.choices and value is not None and value not in key.choices:
            hint = suggest(str(value), key.choices)
            return f"{show(value)} is not one of {', '.join(key.choices)} ({origin}){hint}"
        wrong = _out_of_bounds(key, value) or (key.check(value) if key.check else None)
        return f"{show(value)} is not allowed: {wrong} ({origin})" if wrong else None

    def _is_free(self, path: Path) -> bool:
        return any(path[: len(node)] == node for node in self._free)

    def _origin(self, path: Path) -> str:
        return self.settings[path].origin if path in self.settings else "default"

    def _check_bounds_of_sizes(self) -> None:
        """MIN_BATCH_SIZE is at most MAX_BATCH_SIZE."""
        for suffix in ("", "_VAL"):
            low, high = (("DATA", "AUTOBATCH", f"{bound}_BATCH_SIZE{suffix}") for bound in ("MIN", "MAX"))
            if low in self.wrong or high in self.wrong:
                continue
            least, most = (self._typed.DATA.AUTOBATCH[path[-1]] for path in (low, high))
            if most is not None and least > most:
                place = self._origin(low if low in self.settings else high)
                self.wrong[low] = f"{least} is above {dotted(high)} {most} ({place})"

    def _follows_a_wrong_key(self, path: Path) -> bool:
        """Whether the problem is that of a key that this one follows, and not in a circle with it."""
        ahead, seen = self._followed(path), set[Path]()
        while ahead - seen:
            seen |= ahead
            ahead = {other for here in ahead for other in self._followed(here)}
        return path not in seen and not seen.isdisjoint(self.wrong)

    def _followed(self, path: Path) -> set[Path]:
        """The keys in the interpolations of a value."""
        default = KEYS[path].default if path in KEYS else None
        text = self.settings[path].text if path in self.settings else default
        return (
            {tuple(name.split(".")) for name in _REFERENCE.findall(text)} if isinstance(text, str) else set()
        )


@functools.cache
def _defaults() -> Any:
    """The schema's defaults; a default with arithmetic is a call of its resolver."""
    typed = OmegaConf.structured(Config)
    for key in KEYS.values():
        if isinstance(key.default, str) and "${" in key.default:
            _assign(typed, key.path, convert(key.default, key.hint))
    return typed


def _assign(typed: Any, path: Path, value: Any) -> None:
    for name in path[:-1]:
        typed = typed[name]
    typed[path[-1]] = value


def _without_presets(tree: dict[Any, Any]) -> dict[Any, Any]:
    kept = {
        name: _without_presets(child) if isinstance(child, dict) else child for name, child in tree.items()
    }
    return {name: child for name, child in kept.items() if child and not getattr(child, "preset", None)}


def _reason(error: Exception) -> str:
    reason = re.sub(r"^\w+ raised while resolving interpolation: ", "", str(error).splitlines()[0])
    if isinstance(error, InterpolationKeyError):
        name = reason.split("'")[1] if "'" in reason else ""
        real = closest(name)
        return f"there is no key {name}" + (f"; did you mean {real}?" if real and real != name else "")
    return "it refers to itself" if "ecursi" in reason else reason


def _out_of_bounds(key: Key, value: Any) -> str | None:
    numbers = [number for number in (value if isinstance(value, list) else [value]) if number is not None]
    bounds = key.bounds.items()
    if all(getattr(operator, name)(number, bound) for number in numbers for name, bound in bounds):
        return None
    allowed = " and ".join(f"{_SIGNS[name]} {bound}" for name, bound in bounds)
    return f"{'each' if isinstance(value, list) else 'it'} must be {allowed}"


def _sweep_hint(path: Path, setting: Setting) -> str:
    typed = setting.text if setting.origin == COMMAND_LINE else None
    return sweep_hint(dotted(path), typed) if isinstance(typed, str) else ""


def _unknown(path: Path, setting: Setting) -> str:
    name, origin = dotted(path), setting.origin
    problem = f"no such key ({origin})"
    if path[0] == "hydra":
        return f"{problem}; {alias(name)}"
    if any("." in str(part) for part in path):
        return f"{problem}; keys in a file are nested, not joined by dots"
    if f"{path[0]}/" in origin:
        return f"{problem}; put `# @package _global_` at the top of the file to set keys of any group"
    upper = next((path[:size] for size in range(1, len(path)) if path[:size] in KEYS), None)
    if upper and TARGET not in path:
        return f"{problem}; {dotted(upper)} takes a value and has no keys below it"
    node = next((node for node in PLUGGABLE_PATHS if path[:-1] == node), None)
    real = closest(name)
    other = None if real and real.lower() == name.lower() else alias(name, str(setting.text))
    top = str(path[0]).upper()
    if other:
        return f"{problem}; {other}"
    if real:
        return f"{problem}; did you mean {real}?"
    if node:
        return f"{problem}; {dotted(node)} takes other keys when {dotted(node)}._target_ is set"
    if top != path[0] and (top,) in NODES:
        return f"{problem}; did you mean {dotted((top, *path[1:]))}?"
    if ", line " in origin and top != path[0]:
        return (
            f"{problem}; a file has no variables of its own: refer to the key that holds the value "
            "(${OPTIMIZER.LR}), or to the environment (${oc.env:NAME})"
        )
    return problem


def _not_a_value(path: Path, setting: Setting) -> str:
    problem = f"is a group of keys, not a key that takes {show(setting.value)} ({setting.origin})"
    group = "/".join(map(str, path)).lower()
    is_name = isinstance(setting.text, str) and re.fullmatch(r"[A-Za-z][\w.-]*", setting.text)
    if setting.origin == COMMAND_LINE and is_name and group != EXPERIMENT:
        return f"{problem}; did you mean {group}={setting.text}?"
    first = next((dotted(key) for key in KEYS if key[: len(path)] == path), "")
    return f"{problem}; set the keys below it{f', such as {first}' if first else ''}"
