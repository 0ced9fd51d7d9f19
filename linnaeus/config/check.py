"""Checks a tree of settings: OmegaConf types and resolves it, and all problems are found at once."""

from __future__ import annotations

import copy
import functools
import operator
import re
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import Container, OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException, ValidationError

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
from linnaeus.config.schema import Config
from linnaeus.config.values import (
    COMMAND_LINE,
    MISSING,
    NULLS,
    SEVERAL,
    WANTED,
    Setting,
    convert,
    escape,
    register,
    show,
)

_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def leaves(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Setting]]:
    """Every setting of a tree with its key."""
    if isinstance(tree, Setting):
        yield path, tree
    else:
        for name, child in tree.items():
            yield from leaves(child, (*path, name))


def plain(tree: Any) -> Any:
    """The values of a tree of settings."""
    if isinstance(tree, Setting):
        return tree.value
    return {name: plain(child) for name, child in tree.items()}


class Checked:
    """A tree of settings, typed and resolved.

    Args:
        tree: nested mappings whose leaves are `Setting`.
        chosen: the name chosen in each group.
        cfg: the last file of `--cfg` or `--config-name`, which names a run without a name.

    Attributes:
        settings: the setting of each key that is not at its default.
        free: nodes of the user's own classes, and mappings, which take any key.
        wrong: what is wrong with a key, the predicate of a sentence.
        config: the configuration; None where something is wrong.
    """

    def __init__(
        self, tree: Mapping[Any, Any], chosen: Mapping[str, str], cfg: str | None = None
    ) -> None:
        register(chosen, cfg)
        self.settings: dict[Path, Setting] = {}
        self.wrong: dict[Path, str] = {}
        self._typed = copy.deepcopy(_defaults())
        self.free: set[Path] = set()
        for name, child in tree.items():
            self._assign((name,), child)
        for path in [*KEYS, *(path for path in self.settings if path not in KEYS)]:
            is_there = path in self.settings or not self._is_free(path)
            if is_there and path not in self.wrong and (problem := self._problem(path)):
                self.wrong[path] = problem
        for suffix in ("", "_VAL"):
            self._check_sizes(suffix)
        # A key that follows a wrong one is not listed, unless all follow each other.
        first = [path for path in self.wrong if not self._followed(path) & self.wrong.keys()]
        self.wrong = {path: self.wrong[path] for path in first or self.wrong}
        self.config: Config | None = None if self.wrong else OmegaConf.to_object(self._typed)  # type: ignore[assignment]

    def value(self, *path: str) -> Any:
        """The resolved value of a key of the schema; None where it is wrong or replaced."""
        if path in self.wrong or self._is_free(path):
            return None
        try:
            return _get(self._typed, path)
        except OmegaConfBaseException:  # it follows a wrong one
            return None

    def _assign(self, path: Path, child: Any) -> None:
        """Assign a setting, or all below a path."""
        key = KEYS.get(path)
        is_tree = isinstance(child, dict)
        is_class = path in PLUGGABLE_PATHS and is_tree and isinstance(child.get(TARGET), Setting)
        if is_class or (key and key.is_mapping and is_tree):
            self._assign_free(path, child)
        elif path in NODES and is_tree:
            for name, below in child.items():
                self._assign((*path, name), below)
        elif key is None or is_tree:
            for leaf, setting in leaves(child, path):
                if leaf not in NODES:
                    hint = unknown_key(leaf, str(setting.text or setting.value))
                    self.wrong[leaf] = f"no such key ({setting.origin}){hint}"
                elif setting.value not in (None, {}):  # an empty section of a file sets nothing
                    typed = setting.text if setting.origin == COMMAND_LINE else None
                    self.wrong[leaf] = (
                        f"is a group of keys, not a key that takes {show(setting)} ({setting.origin})"
                        + not_a_value(leaf, typed)
                    )
        elif not (key.is_mapping and child.value in (None, {})):
            self.settings[path] = child
            try:
                _set(self._typed, path, convert(child, key.hint))
            except (ValueError, ValidationError) as error:
                hint = strip_optional(key.hint)[0]
                wanted = WANTED.get(getattr(hint, "__origin__", hint))
                is_type = isinstance(error, ValidationError)
                reason = f"{show(child)} is not {wanted}" if is_type else str(error)
                self.wrong[path] = f"{reason} ({child.origin}){_sweep(path, child)}"

    def _assign_free(self, path: Path, tree: dict[Any, Any]) -> None:
        """Assign a node that takes any key."""
        self.free.add(path)
        found: dict[Path, Setting] = {}
        wrong: dict[Path, str] = {}
        for leaf, setting in leaves(tree, path):
            try:
                if not all(isinstance(name, str) for name in leaf):
                    raise ValueError("the names of arguments must be text")
                if path in KEYS and TARGET in leaf:
                    raise ValueError("no such key")
                convert(setting)
                found[leaf] = setting
            except ValueError as error:
                wrong[leaf] = f"{error} ({setting.origin}){_sweep(leaf, setting)}"
        if wrong:  # what the other arguments follow may be among these
            self.wrong |= wrong
        else:
            self.settings |= found
            _set(self._typed, path, plain(tree))

    def _problem(self, path: Path) -> str | None:
        """What is wrong with a resolved value."""
        key = None if self._is_free(path) else KEYS.get(path)
        setting = self.settings.get(path) or Setting(key and key.default, "default")
        origin = setting.origin
        try:
            value = _get(self._typed, path)
            if key and isinstance(setting.value, str) and "${" in setting.value:
                _set(self._typed, path, convert(Setting(escape(value), origin), key.hint))
                value = _get(self._typed, path)
        except (OmegaConfBaseException, RecursionError, ValueError) as error:
            if setting.value == MISSING:
                return f"has no value yet, and needs one ({origin})"
            return f"{show(setting)} cannot be resolved: {_reason(error)} ({origin})"
        if key is None:
            is_dotted_path = isinstance(value, str) and all(
                part.isidentifier() for part in value.split(".")
            )
            if path[-1] == TARGET and path[:-1] in self.free and not is_dotted_path:
                return f"{show(value)} is not the dotted path of a class or function ({origin})"
            return None
        items = value if isinstance(value, list) else [value]
        items = [item for item in items if item is not None]
        if key.choices and (other := next((i for i in items if i not in key.choices), None)):
            meaning = alias(str(other))
            is_here = meaning is not None and dotted(path) in meaning
            hint = f"; {meaning}" if is_here else suggest(str(other), key.choices)
            return f"{show(other)} is not one of {', '.join(key.choices)} ({origin}){hint}"
        wrong = _out_of_bounds(key, items) or (key.check(value) if key.check else None)
        return f"{show(value)} is not allowed: {wrong} ({origin})" if wrong else None

    def _is_free(self, path: Path) -> bool:
        return any(path[: len(node)] == node for node in self.free)

    def _check_sizes(self, suffix: str) -> None:
        """MIN_BATCH_SIZE is at most MAX_BATCH_SIZE."""
        low, high = (("DATA", "AUTOBATCH", f"{end}_BATCH_SIZE{suffix}") for end in ("MIN", "MAX"))
        least, most = self.value(*low), self.value(*high)
        if None not in (least, most) and least > most:
            setting = self.settings.get(low) or self.settings.get(high)
            place = setting.origin if setting else "default"
            self.wrong[low] = f"{least} is above {dotted(high)} {most} ({place})"

    def _followed(self, path: Path) -> set[Path]:
        """The keys in the interpolations of a value."""
        default = KEYS[path].default if path in KEYS else None
        value = self.settings[path].value if path in self.settings else default
        names = _REFERENCE.findall(value) if isinstance(value, str) else ()
        return {tuple(name.split(".")) for name in names}


@functools.cache
def _defaults() -> Any:
    """The schema's defaults; a default with arithmetic is a call of its resolver."""
    typed = OmegaConf.structured(Config)
    for key in KEYS.values():
        if key.path in NULLS or (isinstance(key.default, str) and "${" in key.default):
            _set(typed, key.path, convert(Setting(key.default, "default"), key.hint))
    return typed


def _get(typed: Any, path: Path) -> Any:
    value = functools.reduce(operator.getitem, path, typed)
    if isinstance(value, Container):
        return OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
    return value


def _set(typed: Any, path: Path, value: Any) -> None:
    is_null = value is None and path in NULLS
    value = f"${{linnaeus.null:{','.join(path)}}}" if is_null else value
    functools.reduce(operator.getitem, path[:-1], typed)[path[-1]] = value


def _sweep(path: Path, setting: Setting) -> str:
    """The command that takes several values, where such were typed."""
    typed = f"{dotted(path)}={setting.text}"
    return (
        f"; to run with each of them: linnaeus sweep {typed}" if setting.problem == SEVERAL else ""
    )


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
