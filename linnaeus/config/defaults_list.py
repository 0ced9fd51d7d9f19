"""Hydra's part: which files count, in which order and in which package, according to the defaults lists.

Hydra walks through the defaults lists (`create_defaults_list`, which belongs to its internals and is called
here only). It is handed the entries as our reader found them, and asks for a file by its path. The entries
note how Hydra uses them, so that all problems are found in one go, each with its file and line.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from hydra import version
from hydra._internal.defaults_list import create_defaults_list
from hydra.core.default_element import ConfigDefault, GroupDefault
from hydra.core.override_parser.types import Override, OverrideType, ValueType
from hydra.core.singleton import Singleton
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from linnaeus.config.files import DEFAULTS, SELF, DefaultsEntry
from linnaeus.config.search_path import SearchPath
from linnaeus.config.sources import COMMAND_LINE, Choice, Order, is_below_files

ROOT = ":"
"""Path of the defaults list that stands for the command line: the selected groups and the `--cfg` files."""


def order_files(search: SearchPath, roots: Sequence[str], choices: Sequence[Choice]) -> Order:
    """The files that count, as Hydra composes them.

    A group that the command line selects, or that `override` names, replaces the choice of a defaults list.
    Where there is none to replace, it joins the list of the command line, and Hydra starts again.
    """
    walk = _Walk(search, roots, choices)
    result = walk.run()
    while walk.place_unused() or walk.let_later_root_override():
        result = walk.run()
    problems = list(walk.problems())
    if result is None:
        return Order([(root, "") for root in roots], problems=problems or [walk.why_failed()])
    files = [(found.config_path, found.package or "") for found in result.defaults]
    chosen = {key: name for key, name in result.overrides.known_choices.items() if isinstance(name, str)}
    return Order([file for file in files if file[0] != ROOT], chosen, problems)


class _Walk:
    """Hydra's way through the defaults lists. It stands for the repository that Hydra asks for files.

    Attributes:
        entries: those that Hydra came to, the last ones first.
        missing: one sentence for each file that is not there.
        failure: what Hydra raised.
    """

    def __init__(self, search: SearchPath, roots: Sequence[str], choices: Sequence[Choice]) -> None:
        self.search = search
        self.entries: list[Any] = []
        self.missing: dict[str, None] = {}
        self.failure: Exception | None = None
        self._roots = list(roots)
        self._choices = {choice.key: choice for choice in choices}
        self._placed: dict[str, DefaultsEntry] = {}
        self._astray: dict[str, None] = {}
        self._not_left_out: list[str] = []
        self._owners: dict[DefaultsEntry, str] = {}
        self._as_override: set[tuple[str, DefaultsEntry]] = set()
        self._loaded: dict[str, ConfigResult | None] = {}

    def run(self) -> Any:
        """Let Hydra walk. Returns its result, or None and keeps its failure."""
        self.entries, self.missing, self._loaded, self.failure = [], {}, {}, None
        overrides = [_command_line_override(choice) for choice in self._choices.values()]
        try:
            with _version_base():
                return create_defaults_list(self, ROOT, overrides, prepend_hydra=False, skip_missing=True)
        except (HydraException, OmegaConfBaseException, AssertionError, ValueError, RecursionError) as error:
            self.failure = error
            return None

    def place_unused(self) -> bool:
        """Put one choice that replaces none into the list of the command line; False where there is none."""
        used = self._by_key(override=False)
        for key, choice in self._choices.items():
            if choice.is_left_out:
                if self._is_mistaken(choice, used.get(key, [])):
                    del self._choices[key]
                    return True
                if isinstance(used[key][-1].value, list):  # Hydra leaves out single names only
                    self._choices[key] = replace(choice, names=(), is_left_out=False)
                    return True
            elif key not in used and key not in self._placed:
                names = choice.names[0] if len(choice.names) == 1 else choice.names
                self._place(key, names, COMMAND_LINE)
                return True
        for key, entries in self._by_key(override=True).items():
            if key not in used and key not in self._placed and not self._is_astray(key, entries[-1]):
                last = entries[-1]
                self._place(key, last.source.names, last.source.origin, last.asker)
                return True
        return False

    def _is_astray(self, key: str, entry: Any) -> bool:
        """Whether an `override` names a choice below its file's package, which nobody has made. A problem.

        As a choice, it would come below that package too, and an `override` in its file below that one.
        """
        if "@" not in key or entry.source.package is not None:
            return False
        group, _, package = key.partition("@")
        self._astray[
            f"{DEFAULTS}: override /{group} ({entry.source.origin}) would come below {package}, where "
            f"nothing is chosen; write `override /{group}@_global_: NAME`, or `# @package _global_` at the "
            "top of that file"
        ] = None
        return True

    def _is_mistaken(self, choice: Choice, entries: Sequence[Any]) -> bool:
        """Whether `~group` finds nothing to leave out. It is a problem where another name is chosen."""
        if not entries:
            return True
        found = entries[-1].value
        found = tuple(found) if isinstance(found, list) else (found,)
        if choice.names in ((), found):
            return False
        wanted, there = (", ".join(map(repr, names)) for names in (choice.names, found))
        self._not_left_out.append(
            f"~{choice.key}: is not {wanted} but {there} ({entries[-1].source.origin}), "
            f"nothing left out ({COMMAND_LINE})"
        )
        return True

    def _place(self, key: str, names: str | tuple[str, ...] | None, origin: str, asker: str = ROOT) -> None:
        group, _, package = key.partition("@")
        self._placed[key] = entry = DefaultsEntry(
            group, names, is_group=True, package=package or None, origin=origin
        )
        self._owners[entry] = asker

    def let_later_root_override(self) -> bool:
        """Let a file of `--cfg`, or one that it leads to, replace a choice of the files before it.

        It counts as if it said `override`.
        """
        for entries in self._by_key(override=False).values():
            ranks = [self._rank(entry) for entry in entries]
            last = max(ranks)
            if len(entries) > 1 and last > 0 and ranks.count(last) == 1:
                later = entries[ranks.index(last)]
                self._as_override.add((later.owner, later.source))
                return True
        return False

    def _rank(self, entry: Any) -> int:
        """The place in `--cfg` and `--config-name` of the file that leads to an entry; -1 for others."""
        if entry.owner in self._roots:
            return self._roots.index(entry.owner)
        number = self.search.root_number(entry.owner)
        numbers = [self.search.root_number(root) for root in self._roots]
        return -1 if number is None else numbers.index(number)

    def _by_key(self, *, override: bool) -> dict[str, list[Any]]:
        """The entries that choose in a group, or that change such a choice, by Hydra's name of the choice."""
        found: dict[str, list[Any]] = {}
        for entry in reversed(self.entries):
            if isinstance(entry, GroupDefault) and entry.override == override:
                found.setdefault(entry.get_override_key(), []).append(entry)
        return found

    def changes_of(self, key: str) -> list[Any]:
        """The entries with `override` of one choice, the one that counts first."""
        return [entry for entry in self.entries if entry.is_override() and entry.get_override_key() == key]

    def problems(self) -> Iterator[str]:
        """What is wrong with the entries; one sentence each."""
        yield from self.missing
        yield from self._astray
        yield from self._not_left_out
        for key, entries in self._by_key(override=False).items():
            origins = list(dict.fromkeys(entry.source.origin for entry in entries))
            if entries[-1].is_missing():
                names = ", ".join(self.search.names(entries[-1].get_group_path()))
                yield f"{key}: needs a choice ({origins[-1]}): {key}=NAME; there are {names}"
            elif len(entries) > 1:
                places = " and ".join(origins)
                yield f"{key}: is chosen twice ({places}); `override /{key}: NAME` changes a choice"
        if isinstance(self.failure, RecursionError):
            circle = " -> ".join(self._circle())
            yield f"{DEFAULTS}: the files lead back to themselves{circle and f' ({circle})'}"

    def why_failed(self) -> str:
        """What Hydra says of names that follow other choices, and where they are written."""
        origins = [entry.source.origin for entry in self.entries if "${" in f"{entry.source}"]
        reason = str(self.failure).partition("\n")[0] or "cannot be read"
        return f"{DEFAULTS}: {reason} ({' or '.join(dict.fromkeys(origins or [COMMAND_LINE]))})"

    def _circle(self) -> list[str]:
        """The places of the entries by which a file leads back to itself."""
        ways: dict[str, dict[str, str]] = {}
        for entry in self.entries:
            if not entry.is_override():
                ways.setdefault(entry.owner, {}).update(dict.fromkeys(_paths(entry), entry.source.origin))
        trails = [{ROOT: ""}]  # each: the files on a way from the root, with the entries that name them
        seen = set()
        while trails:
            trail = trails.pop()
            for name, origin in ways.get(next(reversed(trail)), {}).items():
                if name in trail:
                    inner = list(trail)[list(trail).index(name) + 1 :]
                    return [*(trail[file] for file in inner), origin]
                if name not in seen:
                    seen.add(name)
                    trails.append({**trail, name: origin})
        return []

    # What Hydra asks a repository for:

    def load_config(self, config_path: str) -> ConfigResult | None:
        """The package and the defaults list of a file, or None where there is no such file."""
        if config_path not in self._loaded:
            self._loaded[config_path] = self._load(config_path)
        return self._loaded[config_path]

    def config_exists(self, config_path: str) -> bool:
        """Whether there is such a file."""
        return self.load_config(config_path) is not None

    def group_exists(self, config_path: str) -> bool:
        """Whether an override selects a group: all that Hydra is given here do."""
        return True

    def _load(self, path: str) -> ConfigResult | None:
        if path == ROOT:
            entries, package = self._root_entries(), None
        else:
            file = self.search.read(path)
            if file is None:
                return None
            entries, package = (
                [self._entry(path, entry) for entry in file.defaults],
                self.search.package(path),
            )
        entries.sort(key=lambda entry: entry.is_override())  # Hydra wants them at the end
        return ConfigResult("linnaeus", path, OmegaConf.create({}), {"package": package}, entries)

    def _root_entries(self) -> list[Any]:
        """The list that stands for the command line, lowest precedence first."""
        files = [DefaultsEntry(root, origin="--cfg") for root in self._roots]
        below = [entry for entry in self._placed.values() if is_below_files(entry.path)]
        above = [entry for entry in self._placed.values() if not is_below_files(entry.path)]
        return [self._entry(ROOT, entry) for entry in [*below, *files, *above]]

    def _entry(self, owner: str, source: DefaultsEntry) -> Any:
        """Hydra's form of an entry."""
        entry: Any
        if source.path == SELF:
            return ConfigDefault(path=SELF)
        if source.is_group:
            names = list(source.names) if isinstance(source.names, tuple) else source.names
            is_override = source.override or (owner, source) in self._as_override
            entry = _Group(
                source.package, group=source.path, value=names, optional=source.optional, override=is_override
            )
        else:
            path, package = self._path_and_package(owner, source)
            entry = _File(package, path=path)
        entry.source, entry.owner, entry.walk = source, owner, self
        entry.asker = self._owners.get(source, owner) if owner == ROOT else owner
        return entry

    def asker_of(self, entry: Any) -> str:
        """The file that says which file of a group counts; the command line where it does."""
        if not entry.config_name_overridden:
            return str(entry.asker)
        key = entry.get_override_key()
        changes = [] if key in self._choices else self.changes_of(key)
        return str(changes[0].asker) if changes else ROOT

    def _path_and_package(self, owner: str, source: DefaultsEntry) -> tuple[str, str | None]:
        """Where the file of an entry such as `- base` is, and its package where the entry decides on it."""
        name, package = source.path, source.package
        if owner == ROOT:
            return name, package
        group = owner.rpartition("/")[0]
        is_relative = bool(group) and not name.startswith("/")
        path = self.search.from_root(owner, f"{group}/{name}" if is_relative else name.removeprefix("/"))
        file = self.search.read(path) if is_relative and "/" not in name else None
        if file and file.package is None and package is None:
            package = "_here_"  # that of the file that names it
        is_absolute = is_relative or name.startswith("/")
        return f"/{path}" if is_absolute else path, package


class _Noted:
    """An entry of a defaults list that notes what Hydra does with it. Mixed into Hydra's classes."""

    source: DefaultsEntry
    owner: str
    asker: str
    walk: _Walk

    def __deepcopy__(self, memo: Any) -> Any:
        """Hydra copies a file's entries for each use; the notes are for all of them."""
        return copy.copy(self)

    def update_parent(self, parent_base_dir: str | None, parent_package: str | None) -> None:
        """Hydra has come to the entry."""
        super().update_parent(parent_base_dir, parent_package)  # type: ignore[misc]
        if not any(entry is self for entry in self.walk.entries):
            self.walk.entries.append(self)


class _File(_Noted, ConfigDefault):  # type: ignore[misc]
    """An entry such as `- base`."""

    def is_optional(self) -> bool:
        """Hydra asks where there is no such file. Saying yes lets it go on."""
        name, search = self.source.path, self.walk.search
        is_group = name.lstrip("/") in search.groups()
        hint = f"write `- {name}: NAME`" if is_group else "it may lie beside this file or in --config-dir"
        self.walk.missing[f"{DEFAULTS}: no file {name!r} ({self.source.origin}); {hint}"] = None
        return True


class _Group(_Noted, GroupDefault):  # type: ignore[misc]
    """An entry such as `- model: resnet50`."""

    def is_optional(self) -> bool:
        """Hydra asks where there is no such file, and where it takes a list of names apart."""
        if not self.is_options() and not self.optional:
            self._note_missing(self.get_name())
        return not self.is_options() or bool(self.optional)

    def get_config_path(self) -> str:
        """The path of the file chosen, which a `--cfg` file may have in its own folder."""
        path = str(super().get_config_path())
        return self.walk.search.from_root(self.walk.asker_of(self), path)

    def get_options(self) -> list[str]:
        """The names in a list, without those that are missing."""
        search, group = self.walk.search, self.get_group_path()
        there = search.names(group)
        for name in self.value:
            if name not in there and not self.optional:
                self._note_missing(name)
        paths = [f"{group}/{name}" for name in self.value if name in there]
        found = [search.from_root(self.walk.asker_of(self), path) for path in paths]
        return [path.rpartition("/")[2] for path in found]

    def _note_missing(self, name: str) -> None:
        changed = self.walk.changes_of(self.get_override_key()) if self.config_name_overridden else []
        origin = (changed or [self])[0].source.origin
        self.walk.missing[self.walk.search.why_missing(self.get_group_path(), name, origin)] = None


def _paths(entry: Any) -> list[str]:
    """The files that an entry names."""
    if isinstance(entry, GroupDefault) and entry.is_options():
        return [f"{entry.get_group_path()}/{name}" for name in entry.value]
    return [entry.get_config_path()] if isinstance(entry.get_name(), str) else []


def _command_line_override(choice: Choice) -> Override:
    names: Any = list(choice.names)
    if choice.is_left_out:
        value = names[0] if names else None
        return Override(OverrideType.DEL, choice.group, ValueType.ELEMENT, value, package=choice.package)
    value = names[0] if len(names) == 1 else names
    return Override(OverrideType.CHANGE, choice.group, ValueType.ELEMENT, value, package=choice.package)


@contextmanager
def _version_base() -> Iterator[None]:
    """Hydra's newest behaviour, and then again that of a program around Linnaeus that uses Hydra."""
    before = Singleton._instances.pop(version.VersionBase, None)
    try:
        version.setbase("1.3")
        yield
    finally:
        Singleton._instances.pop(version.VersionBase, None)
        if before is not None:
            Singleton._instances[version.VersionBase] = before
