"""Which files count, in which order and in which package, according to the defaults lists.

The rules are those of Hydra (https://hydra.cc/docs/advanced/defaults_list). Lists are walked from their last
entry to their first, outer before inner: the first `override` of a choice that is met counts, and it changes
the choices that are met after it. Entries that follow other choices (`${model}`) are walked last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from linnaeus.config.files import DEFAULTS, SELF, DefaultsEntry
from linnaeus.config.search_path import GLOBAL, GROUP, SearchPath, default_package

COMMAND_LINE = "command line"
HERE = "_here_"
"""The package of the file that an entry stands in."""
PLACED = -1
"""Stands in place of a root's number for choices that no list makes."""


@dataclass(frozen=True)
class Choice:
    """What the command line chooses in a group.

    Attributes:
        group: the group, such as `model` or `data/augment`.
        names: the file or files chosen (`resnet50`, `[one,two]`); for a group that is left out, the one that
            it must have (`~model=resnet50`), or none for any.
        package: what stands after `@`.
        is_left_out: whether the group is left out, as `~model` and `model=null` ask for.
    """

    group: str
    names: tuple[str, ...]
    package: str | None = None
    is_left_out: bool = False

    @property
    def key(self) -> str:
        """The name of the choice in Hydra: a group may be chosen once for each package."""
        return f"{self.group}@{self.package}" if self.package else self.group

    def entry(self) -> DefaultsEntry:
        """The choice as an entry of a defaults list."""
        names = self.names[0] if len(self.names) == 1 else self.names
        return DefaultsEntry(
            f"/{self.group}", names, is_group=True, package=self.package, origin=COMMAND_LINE
        )


@dataclass
class Order:
    """The files that count.

    Attributes:
        files: the path and the package of each, lowest precedence first.
        chosen: the name chosen in each group.
        problems: one sentence each.
    """

    files: list[tuple[str, str]] = field(default_factory=list)
    chosen: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def is_below_files(group: str) -> bool:
    """Whether `--cfg` files win over a group of the command line. They lose to an experiment."""
    return default_package(group) != GLOBAL


def order_files(search: SearchPath, roots: Sequence[str], choices: Sequence[Choice]) -> Order:
    """The order of all files.

    A choice of the command line replaces that of a defaults list. Where there is none to replace, it joins
    the files that the command line names, and the lists are walked again: its file may choose for another.

    Args:
        search: finds the files.
        roots: the files of `--cfg` and `--config-name`, in their order.
        choices: what the command line chooses or leaves out.
    """
    placed: list[Choice] = []
    by_key = {choice.key: choice for choice in choices}
    while True:
        walk = _Walk(search, by_key)
        files = walk.all_files(roots, placed)
        for key, choice in by_key.items():
            is_placed = choice in placed
            if key in walk.keys_met and not is_placed:
                continue
            implied = [other for other in walk.implied.get(choice.group, []) if other not in by_key]
            if implied:  # `/model: x` in a file of another node chooses for MODEL too
                by_key[implied[0]] = by_key.pop(key)
                placed = [other for other in placed if other != choice]
                break
            if not is_placed and not choice.is_left_out:
                placed.append(choice)
                break
        else:
            chosen = {key: name for key, name in walk.chosen.items() if isinstance(name, str)}
            return Order(files, chosen, list(walk.problems))


@dataclass(frozen=True)
class _Here:
    """A file on the way through the lists.

    Attributes:
        path: its path in the search path; empty for the command line.
        package: where its keys stand.
        root: the number of the `--cfg` file that leads to it; None where none does.
        trail: the files that lead to it, itself included, each with the place of the entry that names it.
    """

    path: str = ""
    package: str = ""
    root: int | None = None
    trail: tuple[tuple[str, str], ...] = ()

    @property
    def group(self) -> str:
        return self.path.rpartition("/")[0]

    def group_of(self, entry: DefaultsEntry) -> str:
        """The group that an entry of this file is about."""
        is_relative = self.group and not entry.path.startswith("/")
        return f"{self.group}/{entry.path}" if is_relative else entry.path.removeprefix("/")

    def key_of(self, entry: DefaultsEntry) -> str:
        """Hydra's name of the choice that an entry of this file makes or changes."""
        group = self.group_of(entry)
        natural = group.replace("/", ".").lower()
        package = entry.package or entry.path.removeprefix("/").replace("/", ".")
        package = self.below(package, group)
        if package.lower() == natural or (not package and is_below_files(group)):
            return group
        return f"{group}@{package or GLOBAL}"

    def below(self, package: str, group: str) -> str:
        """The package that an entry of this file names; that of another group's node with `_group_`."""
        if package == HERE:
            return self.package
        if GROUP in package:
            package = f"{GLOBAL}.{package.replace(GROUP, default_package(group))}"
        return f"{self.package}.{package}".rpartition(GLOBAL)[2].strip(".")


_Files = list[tuple[str, str]]
"""Paths and packages, lowest precedence first."""


class _Walk:
    """One way through the lists.

    Attributes:
        keys_met: the choices that lists make, each with the entries met and the root that leads to each.
        implied: by group, the keys of choices whose package only follows from that of their file.
        chosen: the name that counts for each choice of one name.
        problems: one sentence each.
    """

    def __init__(self, search: SearchPath, choices: dict[str, Choice]) -> None:
        self.keys_met: dict[str, list[tuple[DefaultsEntry, int | None]]] = {}
        self.implied: dict[str, list[str]] = {}
        self.chosen: dict[str, str | None] = {}
        self.problems: dict[str, None] = {}
        self._search = search
        self._left_out = {key: choice for key, choice in choices.items() if choice.is_left_out}
        self._changes = {  # with the file that asks for each; the command line is asked first
            key: (choice.entry(), _Here()) for key, choice in choices.items() if key not in self._left_out
        }
        self._typed = tuple(self._changes)

    def all_files(self, roots: Sequence[str], placed: Sequence[Choice]) -> _Files:
        """The files that the roots, the choices that no list makes, and the lists of all of these name."""
        start = _Here(root=PLACED)
        above = [choice for choice in placed if not is_below_files(choice.group)]
        below = [choice for choice in placed if is_below_files(choice.group)]
        parts = [self._group(choice.entry(), start) for choice in reversed(above)]
        for number, path in reversed(list(enumerate(roots))):
            package = (self._search.package(path) or "").removeprefix(GLOBAL)
            parts.append(self._file(path, package.removeprefix("."), _Here(root=number), COMMAND_LINE))
        parts += [self._group(choice.entry(), start) for choice in reversed(below)]
        while unused := [key for key in self._changes if key not in {*self.keys_met, *self._typed}]:
            parts.append(self._unused(unused[-1], start))
        return [file for part in reversed(parts) for file in part]

    def _unused(self, key: str, start: _Here) -> _Files:
        """The files of an `override` of what no list has chosen: it chooses itself."""
        entry, _ = self._changes[key]
        group, _, package = key.partition("@")
        if not package or entry.package:
            return self._group(replace(entry, path=f"/{group}", package=package or None), start)
        # It would come below that package too, and an `override` in its file below that one.
        self.keys_met[key] = []
        place = GLOBAL if is_below_files(group) else f"{GLOBAL}.{group.replace('/', '.')}"
        self._problem(
            f"{DEFAULTS}: override /{group} ({entry.origin}) would come below {package}, where nothing is "
            f"chosen; write `override /{group}@{place}: NAME`, or `# @package {GLOBAL}` atop that file"
        )
        return []

    def _file(self, path: str, package: str, asker: _Here, origin: str) -> _Files:
        """A file and those that its defaults list names."""
        paths = [other for other, _ in asker.trail]
        if path in paths:
            circle = [*(place for _, place in asker.trail[paths.index(path) + 1 :]), origin]
            first = circle.index(min(circle))  # of a circle with two ways in, each gives the same sentence
            circle = [*circle[first:], *circle[:first]]
            self._problem(f"{DEFAULTS}: the files lead back to themselves ({' -> '.join(circle)})")
            return []
        file = self._search.read(path)
        root = None if asker.root == PLACED else asker.root
        here = _Here(path, package, root, (*asker.trail, (path, origin)))
        entries = list(file.defaults) if file else []
        for entry in (entry for entry in entries if entry.override):
            self._change(entry, here)
        if not any(entry.path == SELF for entry in entries):
            entries.append(DefaultsEntry(SELF, origin=origin))
        walked = [entry for entry in reversed(entries) if not entry.override]
        parts: dict[int, _Files] = {}
        for is_last in (False, True):
            for number, entry in enumerate(walked):
                if number not in parts and (is_last or not self._follows(entry, here)):
                    parts[number] = self._entry(entry, here)
        return [file for number in sorted(parts, reverse=True) for file in parts[number]]

    def _change(self, entry: DefaultsEntry, here: _Here) -> None:
        """Note what an `override` changes. It is a problem where the choice has counted already."""
        key = here.key_of(entry)
        if key in self._changes:
            return
        self._changes[key] = entry, here
        for other, root in self.keys_met.get(key, []):
            if self.chosen.get(key) != entry.names and not _are_two_roots(root, here.root):
                self._problem(
                    f"{key}: override ({entry.origin}) comes too late for the choice in {other.origin}: "
                    "lists are read from their end, and groups of the command line after --cfg files; put "
                    "the choice above the entry that leads to the override"
                )

    def _changed(self, entry: DefaultsEntry, here: _Here) -> tuple[DefaultsEntry, _Here]:
        """The entry that decides on the names, and the file that it stands in."""
        return self._changes.get(here.key_of(entry), (entry, here)) if entry.is_group else (entry, here)

    def _follows(self, entry: DefaultsEntry, here: _Here) -> bool:
        decides, _ = self._changed(entry, here)
        return "${" in f"{decides.names if entry.is_group else entry.path}"

    def _entry(self, entry: DefaultsEntry, here: _Here) -> _Files:
        if entry.path == SELF:
            return [(here.path, here.package)]
        return self._group(entry, here) if entry.is_group else self._named(entry, here)

    def _named(self, entry: DefaultsEntry, here: _Here) -> _Files:
        """The files of an entry such as `- base`."""
        name = self._resolved(entry.path, entry.origin)
        if name is None:
            return []
        path = self._search.from_root(here.path, here.group_of(replace(entry, path=name)))
        file = self._search.read(path)
        if file is None:
            is_group = name.lstrip("/") in self._search.groups()
            hint = f"write `- {name}: NAME`" if is_group else "it may lie beside this file or in --config-dir"
            self._problem(f"{DEFAULTS}: no file {name!r} ({entry.origin}); {hint}")
            return []
        is_beside = bool(here.group) and "/" not in name and file.package is None
        if is_beside and entry.package is None:
            entry = replace(entry, package=HERE)
        return self._file(path, self._package(entry, here, path), here, entry.origin)

    def _group(self, entry: DefaultsEntry, here: _Here) -> _Files:
        """The files of an entry such as `- model: resnet50`."""
        key, group = here.key_of(entry), here.group_of(entry)
        decides, asker = self._changed(entry, here)
        names = (
            self._resolved(decides.names, decides.origin) if isinstance(decides.names, str) else decides.names
        )
        if not self._counts(key, entry, names, here):
            return []
        if entry.package is None and "@" in key and group != here.group:
            self.implied.setdefault(group, []).append(key)
        if not isinstance(names, tuple):
            self.chosen[key] = names
        if names == "???":
            there = ", ".join(self._search.names(group))
            self._problem(f"{key}: needs a choice ({decides.origin}): {key}=NAME; there are {there}")
            return []
        files: _Files = []
        for name in reversed((names,) if isinstance(names, str) else names or ()):
            path = self._search.from_root(asker.path, f"{group}/{name}")
            if self._search.read(path) is not None:
                files[:0] = self._file(path, self._package(entry, here, path), here, decides.origin)
            elif not entry.optional:
                self._problem(self._search.why_missing(group, name, decides.origin))
        return files

    def _counts(
        self, key: str, entry: DefaultsEntry, names: str | tuple[str, ...] | None, here: _Here
    ) -> bool:
        """Whether a choice counts: not one that is left out, or that a later root has made. Notes it."""
        met = self.keys_met.setdefault(key, [])
        found = names if isinstance(names, tuple) else (names,)
        if (choice := self._left_out.get(key)) is not None:
            if choice.names in ((), found):
                return False
            wanted, there = (", ".join(map(repr, some)) for some in (choice.names, found))
            self._problem(
                f"~{key}: is not {wanted} but {there} ({entry.origin}), nothing left out ({COMMAND_LINE})"
            )
        for _, root in met:
            if PLACED in (root, here.root) or _are_two_roots(root, here.root):
                return False
        met.append((entry, here.root))
        # As with Hydra, lists of names add up, and one name may be chosen at several places.
        if not isinstance(names, tuple) and self.chosen.get(key, names) != names:
            places = " and ".join(dict.fromkeys(other.origin for other, _ in reversed(met)))
            self._problem(f"{key}: is chosen twice ({places}); `override /{key}: NAME` changes a choice")
        return True

    def _package(self, entry: DefaultsEntry, here: _Here, path: str) -> str:
        """Where the keys of a file stand that an entry names."""
        if entry.package is not None:
            return here.below(entry.package, here.group_of(entry))
        package = self._search.package(path)
        return here.package if package is None else package.removeprefix(GLOBAL).removeprefix(".")

    def _resolved(self, name: str, origin: str) -> str | None:
        """A name with other choices (`${model}`) put in; None, and a problem, where that cannot be done."""
        if "${" not in name:
            return name
        known = {key: entry.names for key, (entry, _) in self._changes.items()} | self.chosen
        try:
            found = OmegaConf.create({**known, DEFAULTS: name})[DEFAULTS]
        except (OmegaConfBaseException, ValueError, RecursionError) as error:
            is_unknown = not type(error).__name__.startswith("Grammar")
            reason = (
                f"Error resolving interpolation {name!r}" if is_unknown else f"{error}".partition("\n")[0]
            )
            self._problem(f"{DEFAULTS}: {reason} ({origin})")
            return None
        return str(found)

    def _problem(self, problem: str) -> None:
        self.problems[problem] = None


def _are_two_roots(one: int | None, other: int | None) -> bool:
    """Whether two files belong to different `--cfg` files, so that the later one wins."""
    return one != other and not {one, other} & {None, PLACED}
