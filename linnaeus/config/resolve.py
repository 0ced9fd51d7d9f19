"""Turns the tree of settings into a `Config`: OmegaConf types, resolves and builds; we find all problems."""

from __future__ import annotations

import copy
import functools
import operator
import re
from collections.abc import Mapping
from typing import Any

from omegaconf import Container, OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException, ValidationError

from linnaeus.config.aliases import alias, not_a_value, unknown_key
from linnaeus.config.defaults import values_of_nulls
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
from linnaeus.config.schema import Config
from linnaeus.config.tree import COMMAND_LINE, leaves, sweep_hint
from linnaeus.config.values import (
    MISSING,
    WANTED,
    Setting,
    convert,
    escape,
    register,
    show,
    untyped,
)

_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


class Resolver:
    """Resolves one tree.

    Args:
        tree: the settings.
        chosen: the name chosen in each group.
        cfg: the last file of `--cfg` or `--config-name`, which names a run without a name.

    Attributes:
        settings: the setting of each key that is not at its default.
        wrong: what is wrong with a key, the predicate of a sentence.
        config: the configuration; None where something is wrong.
    """

    def __init__(
        self, tree: Mapping[Any, Any], chosen: Mapping[str, str], cfg: str | None = None
    ) -> None:
        register(chosen)
        self.settings: dict[Path, Setting] = {}
        self.wrong: dict[Path, str] = {}
        self._typed = copy.deepcopy(_defaults())
        self._free: set[Path] = set()
        for name, child in tree.items():
            self._take((name,), child)
        for path, value in values_of_nulls(self._typed, cfg):
            _assign(self._typed, path, value)
        for path in [*KEYS, *(path for path in self.settings if path not in KEYS)]:
            is_there = path in self.settings or not self._is_free(path)
            if is_there and path not in self.wrong and (problem := self._problem(path)):
                self.wrong[path] = problem
        self._check_bounds_of_sizes()
        # A key that follows a wrong one is not listed, unless they follow each other.
        ahead = {path: self._followed(path) & self.wrong.keys() for path in self.wrong}
        first = [path for path in ahead if all(path in ahead[other] for other in ahead[path])]
        self.wrong = {path: self.wrong[path] for path in first or ahead}
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
        elif key is None or is_tree:
            for leaf, setting in leaves(child, path):
                text, origin = setting.text, setting.origin
                if leaf not in NODES:
                    self.wrong[leaf] = f"no such key ({origin}){unknown_key(leaf, str(text))}"
                elif setting.value not in (None, {}):  # an empty section of a file sets nothing
                    problem = (
                        f"is a group of keys, not a key that takes {show(setting.value)} ({origin})"
                    )
                    self.wrong[leaf] = problem + not_a_value(
                        leaf, text if origin == COMMAND_LINE else None
                    )
        elif not (key.is_mapping and child.value in (None, {})):
            self.settings[path] = child
            try:
                _assign(self._typed, path, convert(child.value, key.hint))
            except ValidationError:
                hint, _ = strip_optional(key.hint)
                wanted = WANTED.get(getattr(hint, "__origin__", hint))
                self.wrong[path] = f"{show(child.value)} is not {wanted} ({child.origin})"
            except ValueError as error:
                is_typed = child.origin == COMMAND_LINE and isinstance(child.text, str)
                hint = sweep_hint(dotted(path), child.text) if is_typed else ""
                self.wrong[path] = f"{error} ({child.origin}){hint}"

    def _take_free(self, path: Path, tree: dict[Any, Any]) -> None:
        """Assign a node that takes any key."""
        found: dict[Path, Setting] = {}
        wrong: dict[Path, str] = {}
        for leaf, setting in leaves(tree, path):
            try:
                if not all(isinstance(name, str) for name in leaf):
                    raise ValueError("the names of arguments must be text")
                if path in KEYS and TARGET in leaf:
                    raise ValueError("no such key")
                untyped(setting)
                found[leaf] = setting
            except ValueError as error:
                wrong[leaf] = f"{error} ({setting.origin})"
        if wrong:  # what the other arguments follow may be among these
            self.wrong |= wrong
        else:
            self.settings |= found
            _assign(self._typed, path, untyped(tree))

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
            if key and self._followed(path):  # OmegaConf checks the type of what is assigned
                _assign(self._typed, path, escape(value))
        except (OmegaConfBaseException, RecursionError) as error:
            if given == MISSING:
                return f"has no value yet, and needs one ({origin})"
            return f"{show(given)} cannot be resolved: {_reason(error)} ({origin})"
        if key is None:
            is_dotted_path = isinstance(value, str) and all(
                part.isidentifier() for part in value.split(".")
            )
            if path[-1] == TARGET and path[:-1] in self._free and not is_dotted_path:
                return f"{show(value)} is not the dotted path of a class or function ({origin})"
            return None
        texts = [
            text for text in (value if isinstance(value, list) else [value]) if text is not None
        ]
        if key.choices and (
            other := next((text for text in texts if text not in key.choices), None)
        ):
            meaning = alias(str(other))
            is_here = meaning is not None and dotted(path) in meaning
            hint = f"; {meaning}" if is_here else suggest(str(other), key.choices)
            return f"{show(other)} is not one of {', '.join(key.choices)} ({origin}){hint}"
        wrong = _out_of_bounds(key, value) or (key.check(value) if key.check else None)
        return f"{show(value)} is not allowed: {wrong} ({origin})" if wrong else None

    def _is_free(self, path: Path) -> bool:
        return any(path[: len(node)] == node for node in self._free)

    def _origin(self, path: Path) -> str:
        return self.settings[path].origin if path in self.settings else "default"

    def _check_bounds_of_sizes(self) -> None:
        """MIN_BATCH_SIZE is at most MAX_BATCH_SIZE."""
        for suffix in ("", "_VAL"):
            low, high = (
                ("DATA", "AUTOBATCH", f"{bound}_BATCH_SIZE{suffix}") for bound in ("MIN", "MAX")
            )
            if low in self.wrong or high in self.wrong:
                continue
            least, most = (self._typed.DATA.AUTOBATCH[path[-1]] for path in (low, high))
            if most is not None and least > most:
                place = self._origin(low if low in self.settings else high)
                self.wrong[low] = f"{least} is above {dotted(high)} {most} ({place})"

    def _followed(self, path: Path) -> set[Path]:
        """The keys in the interpolations of a value."""
        default = KEYS[path].default if path in KEYS else None
        text = self.settings[path].text if path in self.settings else default
        names = _REFERENCE.findall(text) if isinstance(text, str) else ()
        return {tuple(name.split(".")) for name in names}


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
        name: _without_presets(child) if isinstance(child, dict) else child
        for name, child in tree.items()
    }
    return {
        name: child for name, child in kept.items() if child and not getattr(child, "preset", None)
    }


def _reason(error: Exception) -> str:
    reason = re.sub(r"^\w+ raised while resolving interpolation: ", "", str(error).splitlines()[0])
    if isinstance(error, InterpolationKeyError):
        name = reason.split("'")[1] if "'" in reason else ""
        real = closest(name)
        return f"there is no key {name}" + (
            f"; did you mean {real}?" if real and real != name else ""
        )
    return "it refers to itself" if "ecursi" in reason else reason


def _out_of_bounds(key: Key, value: Any) -> str | None:
    numbers = [
        number for number in (value if isinstance(value, list) else [value]) if number is not None
    ]
    bounds = key.bounds.items()
    if all(getattr(operator, name)(number, bound) for number in numbers for name, bound in bounds):
        return None
    allowed = " and ".join(f"{_SIGNS[name]} {bound}" for name, bound in bounds)
    return f"{'each' if isinstance(value, list) else 'it'} must be {allowed}"
