"""Loads a `Config` from the command line: Hydra composes files and groups, `check` types the result.

Precedence, lowest first: presets and other files of a node's group that the command line selects
(`model=resnet50`), the files of `--cfg` and `--config-name` in their order, files of other groups
(`experiment=birds`), keys of the command line. Within a file its defaults list decides, by Hydra's rules.
"""

from __future__ import annotations

import functools
import math
import os
import re
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

from hydra import compose, initialize
from omegaconf import OmegaConf

from linnaeus.config.aliases import alias, renamed
from linnaeus.config.check import Checked, leaves, plain
from linnaeus.config.dump import PLAN, to_yaml, with_origins
from linnaeus.config.files import File, Files, Source, read_file
from linnaeus.config.keys import (
    EXPERIMENT,
    KEYS,
    NODES,
    PLUGGABLE_PATHS,
    PRESETS,
    Path,
    available,
    closest,
    dotted,
    is_open,
    names_in,
    node_of,
    suggest,
)
from linnaeus.config.overrides import CommandLine, Override, parse_command_line
from linnaeus.config.references import missing_references
from linnaeus.config.schema import Config
from linnaeus.config.values import (
    COMMAND_LINE,
    SEVERAL,
    Setting,
    escape,
    parse,
    show,
    tree_of,
)
from linnaeus.runtime.errors import ConfigError

_PRIMARY = "__command_line__"
"""Name of the configuration whose defaults list is that of the command line."""
_LOCK = threading.Lock()
"""Hydra has one composition at a time in a process."""


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration, and what else the command line asks for.

    Attributes:
        config: the resolved configuration.
        print_config: whether to print the configuration and exit.
        settings: what each key is set to, and where.
        show_origins: whether to print the origins too.
    """

    config: Config
    print_config: bool
    settings: Mapping[Path, Setting]
    show_origins: bool

    def is_on_command_line(self, path: Path) -> bool:
        """Whether the command line sets this key or a node above it."""
        prefixes = (path[:size] for size in range(len(path), 0, -1))
        setting = next((self.settings[each] for each in prefixes if each in self.settings), None)
        return setting is not None and setting.origin == COMMAND_LINE

    def text(self) -> str:
        """What `--print-config` prints, with the origins where `--origin` asks for them."""
        if not self.show_origins:
            return to_yaml(self.config)
        return with_origins(self.config, self.settings)


def load_config(
    argv: Sequence[str], below: Mapping[Any, Any] | None = None, *, references: bool = False
) -> LoadedConfig:
    """Load the configuration that a command line describes.

    Args:
        argv: the tokens after the program's name.
        below: a tree of settings that files and command line win over, as `settings_of` gives.
        references: whether files, folders, classes and names of timm that values name must be there.

    Raises:
        ConfigError: lists all problems.
    """
    line = parse_command_line(argv)
    try:
        found = _read(line)
        tree = merge(below or {}, found.tree)
        tree.pop(PLAN, None)
        for override in line.overrides:
            try:
                tree = _applied(tree, override)
            except ValueError as error:
                if found.is_complete:
                    found.problems.append(f"{override.key}: {error} ({COMMAND_LINE})")
        cfg = [name for option, name in line.sources if option != "--config-dir"]
        checked = Checked(tree, found.chosen, cfg[-1] if cfg else None)
    except RecursionError:
        raise ConfigError("values are nested too deeply to be read") from None
    problems = [*line.problems, *found.problems]
    wanted = references and not line.print_config
    missing = dict(missing_references(checked)) if wanted else {}
    for path, problem in (missing | checked.wrong).items():
        # A file that cannot be read may set a `_target_`, so the keys that these nodes take are unknown.
        is_open_node = any(path[: len(node)] == node != path for node in PLUGGABLE_PATHS)
        if found.is_complete or not is_open_node:
            problems.append(f"{dotted(path)}: {problem}")
    if problems or checked.config is None:
        raise ConfigError(problems)
    return LoadedConfig(checked.config, line.print_config, checked.settings, line.show_origins)


def settings_of(nodes: Mapping[str, Any], origin: str) -> Mapping[Any, Any]:
    """The settings of the nodes of a resolved configuration; messages say that they come from `origin`."""
    return {name: tree_of(node, Setting(None, origin)) for name, node in escape(nodes).items()}


def read_run_config(path: FilePath) -> Mapping[Any, Any]:
    """Read the `config.yaml` of a run, also of an older version, as a tree of settings for `load_config`.

    Raises:
        ConfigError: it cannot be read, or has interpolations or a defaults list, which a run does not write.
    """
    file = read_file(str(path), "RUN")
    if file.problem:
        raise ConfigError(file.problem)
    text = repr(plain(file.tree)).replace("\\\\", "\\")
    if file.defaults is not None or re.search(r"(?<!\\)(?:\\\\)*\$\{", text):
        raise ConfigError(
            f"{path}: a run's file has values only, no interpolation and no defaults list"
        )
    tree: Mapping[Any, Any] = renamed(file.tree)
    return tree


@dataclass
class _Found:
    """What the files of a command line set.

    Attributes:
        chosen: the name chosen in each group.
        is_complete: whether all files could be read and composed.
    """

    files: Files
    tree: dict[Any, Any] = field(default_factory=dict)
    chosen: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    is_complete: bool = True


def merge(tree: Mapping[Any, Any], other: Mapping[Any, Any]) -> dict[Any, Any]:
    """A tree with the settings of another one over its own."""
    merged = dict(tree)
    for name, child in other.items():
        here = merged.get(name)
        if isinstance(child, dict):
            merged[name] = merge(here if isinstance(here, dict) else {}, child)
        elif child.value != {} or not isinstance(here, dict):  # {} sets nothing below it
            merged[name] = child
    return merged


def _read(line: CommandLine) -> _Found:
    """Read the files that a command line names, and let Hydra compose them where there are groups."""
    own = [FilePath(name) for option, name in line.sources if option == "--config-dir"]
    beside = (FilePath(name).parent for option, name in line.sources if option == "--cfg")
    files = Files([*own, *beside, PRESETS])
    found = _Found(files)
    problems = found.problems
    roots: dict[str, File] = {}
    try:
        problems += [
            f"{folder}: no such folder (--config-dir)" for folder in own if not folder.is_dir()
        ]
        for option, name in line.sources:
            if option == "--cfg":
                roots[f"__cfg{len(roots)}__"] = read_file(name, option)
            elif option == "--config-name" and (file := files.get(name)):
                roots[name] = file
            elif option == "--config-name":
                hint = suggest(name, names_in("", files.folders))
                problems.append(f"{name}: no such file in --config-dir (--config-name){hint}")
        files.read |= roots
        for file in roots.values():  # plain files just follow one another
            package = (file.package or "_global_").removeprefix("_global_")
            found.tree = merge(found.tree, _below(package, file.tree))
        if line.groups or any(file.defaults is not None for file in roots.values()):
            wrong = {group: _missing(choice, files, own) for group, choice in line.groups.items()}
            problems += filter(None, wrong.values())
            choices = [choice for group, choice in line.groups.items() if not wrong[group]]
            found.tree, found.chosen = _compose(files, [*roots], choices)
    except Exception as error:  # Hydra raises errors of many kinds for a list that it cannot read
        found.is_complete = False
        if not any(file.problem for file in files.read.values()):
            problems.append(_sentence(error, files))
    unread = [file.problem for file in files.read.values() if file.problem]
    problems += unread
    found.is_complete &= not unread
    if found.is_complete:
        for warning in _beaten(found, tuple(file.name for file in roots.values()), line):
            _warn(warning)
    return found


def _below(key: str, tree: Any) -> Any:
    """A tree at a dotted key."""
    for name in reversed(key.split(".")):
        tree = {name: tree} if name else tree
    return tree


def _compose(
    files: Files, names: Sequence[str], choices: Iterable[Override]
) -> tuple[dict[Any, Any], dict[str, str]]:
    """Let Hydra compose files by name, lowest precedence first, with what the command line chooses.

    Returns:
        The tree of settings, and the name chosen in each group.
    """
    lowest: list[str] = []  # groups that no list chooses: files win over what is chosen there
    overrides: list[str] = []

    has_list = any(files.read[name].defaults is not None for name in names)

    def ask(*, is_last: bool = False) -> Any:
        defaults = [*({group: None} for group in lowest), *names, "_self_"]
        files.read[_PRIMARY] = File("command line", defaults=defaults)
        Source.is_draft, Source.served = not is_last, set()
        return compose(_PRIMARY, overrides, return_hydra_config=True)

    with _LOCK, Source.of(files), initialize(config_path=None, version_base="1.3"):
        for choice in sorted(choices, key=_depth):
            known = {*ask().hydra.runtime.choices} if has_list else set()
            listed = {path.rpartition("/")[0] for path in Source.served}  # also by a list of names
            known |= listed - {key.partition("@")[0] for key in known}
            if choice.key.partition("/")[0] == EXPERIMENT:  # it may change what nobody has chosen
                lowest += [group for group in available() if group not in (*known, *lowest)]
            same = [key for key in known if key.partition("@")[0] == choice.key]
            key = same[0] if len(same) == 1 else choice.key
            is_new, is_of_node = key not in known, _depth(choice) < math.inf
            if is_new and choice.delete:
                continue  # there is nothing to leave out
            lowest += [key] if is_new and is_of_node else []
            sign = "~" if choice.delete else "+" if is_new and not is_of_node else ""
            overrides.append(f"{sign}{key}" + ("" if choice.text is None else f"={choice.text}"))
            file = files.get(f"{choice.key.partition('@')[0]}/{choice.text}")
            has_list |= file is None or file.defaults is not None
        config: Any = OmegaConf.to_container(ask(is_last=True))
    chosen = config.pop("hydra")["runtime"]["choices"]
    config |= {"hydra": config.pop("\0hydra")} if "\0hydra" in config else {}
    tree = {name: files.unmarked(child) for name, child in config.items()}
    return tree, {group: str(name) for group, name in chosen.items() if name}


def _depth(choice: Override) -> float:
    """How deep a group of a node lies, since files choose in groups below theirs; others come last."""
    group = choice.key.partition("@")[0]
    return math.inf if node_of(group) in (None, "_global_") else group.count("/")


def _missing(choice: Override, files: Files, own: Sequence[FilePath]) -> str | None:
    """What is wrong with a choice in a group, where there are no such files; `own` are the folders typed."""
    group, text = choice.key.partition("@")[0], choice.text or ""
    there = names_in(group, files.folders)
    if not there:
        groups = [*available(*own)]  # a `--cfg` file may lie beside anything
        hint = None if group == EXPERIMENT else alias(group, choice.text)
        hint = hint or f"groups are {', '.join(groups)}{suggest(group, groups)}"
        return f"{group}: no such key or preset group ({COMMAND_LINE}); {hint}"
    names = re.findall(r"[^\s,'\"]+", text[1:-1]) if text.startswith("[") else [text]
    missing = next((name for name in names if name not in there), None)
    if missing is None or choice.text is None:
        return None
    is_sweep = parse(text).problem == SEVERAL
    hint = f"; to run with each of them: linnaeus sweep {choice.key}={text}" if is_sweep else ""
    hint = hint or suggest(missing, there)
    return f"{group}: no preset {missing!r} ({COMMAND_LINE}); there are {', '.join(there)}{hint}"


def _sentence(error: Exception, files: Files) -> str:
    """What Hydra finds wrong, in one sentence."""
    if isinstance(error, RecursionError):
        return "defaults: the files lead back to themselves, or are nested too deeply"
    text = re.split(r"Config search path:| : Override\(", str(error))[0]
    text = " ".join(text.strip().replace("\n\n", "; ").split()) or type(error).__name__
    for path, file in files.read.items():
        text = text.replace(path, file.name) if path.startswith("__cfg") else text
    return f"defaults: {text}"


def _beaten(found: _Found, own: tuple[str, ...], line: CommandLine) -> Iterator[str]:
    """Name the choices of the command line whose keys a file of `--cfg` sets otherwise; `own` are these."""
    winners, typed = dict(leaves(found.tree)), {override.key for override in line.overrides}
    for choice in line.groups.values():
        file = found.files.read.get(f"{choice.key}/{choice.text}")
        for key, setting in leaves(file.tree if file else {}):
            winner = winners.get(key, setting)
            is_own = winner.origin.startswith(own) and dotted(key) not in typed
            if is_own and winner.value != setting.value:
                yield (
                    f"{dotted(key)} of {winner.origin} wins over {choice.key}={choice.text}: files win over "
                    "groups of the command line; keys there win over both"
                )


@functools.cache
def _warn(sentence: str) -> None:
    """Print a warning once: a sweep loads many configurations, and torchrun starts many ranks."""
    if os.environ.get("RANK", "0") == "0":
        print(f"warning: {sentence}", file=sys.stderr)


def overridden(overrides: Sequence[Override]) -> Iterator[tuple[Path, Any]]:
    """The keys that overrides set or delete, each with its setting; with `KEY={...}` with a tree of them."""
    for override in overrides:
        setting = Setting(None, COMMAND_LINE) if override.text is None else parse(override.text)
        yield tuple(override.key.split(".")), tree_of(setting.value, setting)


def _applied(tree: dict[Any, Any], override: Override) -> dict[Any, Any]:
    """A tree with one key set or deleted; raises `ValueError` with what is wrong with that."""
    ((path, setting),) = overridden([override])
    node: Any = tree
    for depth, name in enumerate(path[:-1], 1):
        node = node.get(name, {})
        if isinstance(node, Setting):
            if isinstance(node.value, list):
                raise ValueError(
                    f"{dotted(path[:depth])} is a list, which can only be set as a whole"
                )
            node = {}
    here = node.get(path[-1])
    if not override.delete:
        return merge(tree, _below(override.key, setting))
    if here is not None:
        if override.text is not None and plain(here) != plain(setting):
            raise ValueError(f"is {show(plain(here))}, not {show(setting)}: nothing deleted")
        return _without(tree, path)
    is_known = path in KEYS or path in NODES
    if is_known and override.text is None:
        return tree
    if is_known or is_open(path):
        raise ValueError("is not set")
    real = closest(override.key)
    raise ValueError(f"no such key; did you mean ~{real}?" if real else "no such key")


def _without(tree: dict[Any, Any], path: Path) -> dict[Any, Any]:
    """A tree without what is at a path."""
    name, below = path[0], path[1:]
    if below:
        return {**tree, name: _without(tree[name], below)}
    return {key: child for key, child in tree.items() if key != name}
