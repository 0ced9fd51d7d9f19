"""Checks a composed configuration: OmegaConf resolves and types it, and all problems are found at once."""

from __future__ import annotations

import copy
import functools
import operator
import re
import typing
from collections.abc import Callable, Mapping
from typing import Any

from omegaconf import Container, OmegaConf
from omegaconf.errors import (
    InterpolationKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)

from linnaeus.config.aliases import alias, not_a_value, unknown_key
from linnaeus.config.keys import (
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
)
from linnaeus.config.overrides import leaves
from linnaeus.config.schema import Config
from linnaeus.config.values import (
    WANTED,
    convert,
    escape,
    fill_nulls,
    map_texts,
    own_resolvers,
    register,
    show,
    with_arithmetic,
)

_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_TEXT = (str, str | None)
_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


class Checked:
    """A configuration, resolved and typed.

    Args:
        tree: nested mappings of values, with interpolations.
        origin: gives the place that sets a key, for messages.
        chosen: the name chosen in each group.
        cfg: the last file of `--cfg` or `--config-name`, which names a run without a name.

    Attributes:
        values: the resolved value of each key that is not at its default and not wrong.
        wrong: what is wrong with a key, the predicate of a sentence.
        config: the configuration; None where something is wrong.
    """

    def __init__(
        self,
        tree: Mapping[Any, Any],
        origin: Callable[[Path], str],
        chosen: Mapping[str, str],
        cfg: str | None = None,
    ) -> None:
        register(chosen)
        self._origin = origin
        self._groups = {group.partition("/")[0] for group in chosen}
        self._given: dict[Path, Any] = {}
        self._free: set[Path] = set()
        self.values: dict[Path, Any] = {}
        self.wrong: dict[Path, str] = {}
        for name, child in tree.items():
            self._sort_in((name,), map_texts(child, own_resolvers))
        root: dict[str, Any] = {}
        keys = {path: key for path, key in KEYS.items() if not self._is_free(path)}
        for path in self._free:
            _put(root, path, {})
        defaults = {path: key.default for path, key in keys.items()}
        for path, value in (defaults | self._given).items():
            _put(root, path, with_arithmetic(value, keys[path].hint if path in keys else None))
        self._root = OmegaConf.create(root)
        fill_nulls(self._root, cfg)
        self._typed = copy.deepcopy(_schema())
        for path in self._free:
            _set(self._typed, path, {})
        for path in dict.fromkeys([*keys, *self._given]):
            if path not in self.wrong and (problem := self._resolve(path, keys.get(path))):
                self.wrong[path] = problem
        for suffix in ("", "_VAL"):
            self._check_sizes(suffix)
        # A key that follows a wrong one is not listed, unless all follow each other.
        first = [path for path in self.wrong if not self._followed(path) & self.wrong.keys()]
        self.wrong = {path: self.wrong[path] for path in first or self.wrong}
        self.config: Config | None = None if self.wrong else OmegaConf.to_object(self._typed)  # type: ignore[assignment]

    def value(self, *path: str) -> Any:
        """The resolved value of a key of the schema; None where it is wrong or replaced."""
        is_there = path not in self.wrong and not self._is_free(path)
        return _get(self._typed, path) if is_there else None

    def _is_free(self, path: Path) -> bool:
        return any(path[: len(node)] == node for node in self._free)

    def _sort_in(self, path: Path, child: Any) -> None:
        """Note a value, or all below a path, as given or wrong."""
        key = KEYS.get(path)
        is_tree = isinstance(child, dict) and bool(child)
        is_class = (
            path in PLUGGABLE_PATHS and is_tree and not isinstance(child.get(TARGET, {}), dict)
        )
        if is_class or (key and key.is_mapping and is_tree):
            self._free.add(path)
            for leaf, value in leaves(child, path):
                self._note(leaf, value)
        elif path in NODES and is_tree:
            for name, below in child.items():
                self._sort_in((*path, name), below)
        elif key is None or is_tree:
            for leaf, value in leaves(child, path):
                self._note_unknown(leaf, value)
        elif not (key.is_mapping and child in (None, {})):
            self._note(path, child)

    def _note(self, path: Path, value: Any) -> None:
        problem = None
        if not all(isinstance(name, str) for name in path):
            problem = "the names of arguments must be text"
        elif TARGET in path and any(n in KEYS and path[: len(n)] == n for n in self._free):
            problem = "no such key"
        if problem:
            self.wrong[path] = f"{problem} ({self._origin(path)})"
        else:
            self._given[path] = value

    def _note_unknown(self, path: Path, value: Any) -> None:
        origin = self._origin(path)
        if path not in NODES:
            hint = unknown_key(path, str(value))
            if path[0] in self._groups:
                hint = "; the first line of a group's file says where its keys belong: # @package _global_"
            self.wrong[path] = f"no such key ({origin}){hint}"
        elif value not in (None, {}):  # an empty section of a file sets nothing
            self.wrong[path] = (
                f"is a group of keys, not a key that takes {show(value)} ({origin})"
                + not_a_value(path, value)
            )

    def _resolve(self, path: Path, key: Key | None) -> str | None:
        """Resolve, type and check one value; returns what is wrong with it."""
        raw = self._given.get(path, key and key.default)
        origin = self._origin(path)
        try:
            value = _get(self._root, path)
            if key:
                if value is False and "off" in (key.choices or ()):
                    value = "off"  # in YAML `off` is false
                if value is raw and isinstance(raw, bool | float) and key.hint in _TEXT:
                    return f"{raw} is not text; quotes make it text ({origin})"
                value = convert(value, key.hint)
            _set(self._typed, path, escape(value))
            value = _get(self._typed, path)
        except MissingMandatoryValue:
            return f"has no value yet, and needs one ({origin})"
        except ValidationError:
            hint = strip_optional(key.hint)[0] if key else None
            wanted = WANTED.get(typing.get_origin(hint) or hint)
            return f"{show(raw)} is not {wanted} ({origin})"
        except (OmegaConfBaseException, RecursionError) as error:
            return f"{show(raw)} cannot be resolved: {_reason(error)} ({origin})"
        except ValueError as error:
            return f"{error} ({origin})"
        if path in self._given:
            self.values[path] = value
        if key is None:
            is_name = isinstance(value, str) and all(map(str.isidentifier, value.split(".")))
            if path[-1] == TARGET and path[:-1] in self._free and not is_name:
                return f"{show(value)} is not the dotted path of a class or function ({origin})"
            return None
        items = [
            item for item in (value if isinstance(value, list) else [value]) if item is not None
        ]
        if key.choices and (other := next((i for i in items if i not in key.choices), None)):
            meaning = alias(str(other))
            is_here = meaning is not None and dotted(path) in meaning
            hint = f"; {meaning}" if is_here else suggest(str(other), key.choices)
            return f"{show(other)} is not one of {', '.join(key.choices)} ({origin}){hint}"
        wrong = _out_of_bounds(key, items) or (key.check(value) if key.check else None)
        return f"{show(value)} is not allowed: {wrong} ({origin})" if wrong else None

    def _check_sizes(self, suffix: str) -> None:
        """MIN_BATCH_SIZE is at most MAX_BATCH_SIZE."""
        low, high = (("DATA", "AUTOBATCH", f"{end}_BATCH_SIZE{suffix}") for end in ("MIN", "MAX"))
        least, most = self.value(*low), self.value(*high)
        if None not in (least, most) and least > most:
            place = self._origin(low if low in self._given else high)
            self.wrong[low] = f"{least} is above {dotted(high)} {most} ({place})"

    def _followed(self, path: Path) -> set[Path]:
        """The keys in the interpolations of a value."""
        value = self._given.get(path, KEYS[path].default if path in KEYS else None)
        return {tuple(name.split(".")) for name in _REFERENCE.findall(str(value))}


@functools.cache
def _schema() -> Any:
    return OmegaConf.structured(Config)


def _get(config: Any, path: Path) -> Any:
    value = functools.reduce(operator.getitem, path, config)
    if isinstance(value, Container):
        return OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
    return value


def _set(config: Any, path: Path, value: Any) -> None:
    for name in path[:-1]:
        if name not in config:
            config[name] = {}
        config = config[name]
    config[path[-1]] = value


def _put(tree: dict[Any, Any], path: Path, value: Any) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = value


def _reason(error: Exception) -> str:
    text = str(error).splitlines()[0] if str(error) else "it refers to itself"
    reason = re.sub(r"^\w+ raised while resolving interpolation: ", "", text)
    if isinstance(error, InterpolationKeyError):
        name = reason.split("'")[1] if "'" in reason else ""
        real = closest(name)
        hint = f"; did you mean {real}?" if real and real != name else ""
        return f"there is no key {name}{hint}"
    return "it refers to itself" if "ecursi" in reason else reason


def _out_of_bounds(key: Key, numbers: list[Any]) -> str | None:
    bounds = key.bounds.items()
    if all(getattr(operator, name)(number, bound) for number in numbers for name, bound in bounds):
        return None
    allowed = " and ".join(f"{_SIGNS[name]} {bound}" for name, bound in bounds)
    return f"{'each' if 'list' in str(key.hint) else 'it'} must be {allowed}"
