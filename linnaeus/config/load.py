"""Loads a `Config` from the command line: Hydra composes files and groups, `check` types the result.

Precedence, lowest first: the schema, presets and other files of a node's group that the command line selects
(`model=resnet50`), the files of `--cfg` and `--config-name` in their order, files of other groups
(`experiment=birds`), keys of the command line. Within a file its defaults list decides, by Hydra's rules.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from linnaeus.config.aliases import alias, unknown_key
from linnaeus.config.check import DEFAULT, Checked
from linnaeus.config.dump import PLAN
from linnaeus.config.files import File, chosen_files, compose_files, read_file
from linnaeus.config.keys import (
    KEYS,
    NODES,
    PRESETS,
    Path,
    available,
    dotted,
    is_open,
    names_in,
    suggest,
)
from linnaeus.config.overrides import CommandLine, Override, parse_command_line, typed_keys
from linnaeus.config.references import missing_references
from linnaeus.config.schema import Config
from linnaeus.config.values import map_texts, own_resolvers, register
from linnaeus.runtime.errors import ConfigError

COMMAND_LINE = "command line"


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration, and the other requests of the command line.

    Attributes:
        config: the resolved configuration.
        print_config: whether to print the configuration and exit.
        typed: the keys that the command line sets.
    """

    config: Config
    print_config: bool
    typed: frozenset[Path]

    def is_on_command_line(self, path: Path) -> bool:
        """Whether the command line sets this key or a node above it."""
        return _has_prefix(self.typed, path)


def load_config(
    argv: Sequence[str],
    base: File | None = None,
    *,
    references: bool = False,
    is_here: bool = True,
    compositions: dict[Any, Any] | None = None,
) -> LoadedConfig:
    """Load the configuration that a command line describes.

    Args:
        argv: the tokens after the program's name.
        base: a file with less precedence than the command line, as `read_run_config` gives.
        references: whether files, folders, classes and names of timm that values name must be there.
        is_here: whether the device must be there too: the run starts on this machine.
        compositions: of earlier calls, for many command lines with the same files and presets.

    Raises:
        ConfigError: lists all problems.
    """
    line = parse_command_line(argv)
    try:
        found = _Sources(line, base, {} if compositions is None else compositions)
        cfg = [name for option, name in line.sources if option != "--config-dir"]
        checked = Checked(found.tree, found.origin, cfg[-1] if cfg else None)
    except RecursionError:
        raise ConfigError("values are nested too deeply to be read") from None
    problems = [*line.problems, *found.problems]
    wanted = references and not line.print_config
    missing = dict(missing_references(checked, is_here=is_here)) if wanted else {}
    groups = {group.partition("/")[0] for group in found.chosen}
    for path, problem in (missing | checked.wrong).items():
        if path[0] in groups and found.origin(path) != COMMAND_LINE:
            node = path[0].upper()
            problem += (
                f"; begin the group's file with # @package {node} where it has the keys of {node}, and with "
                "# @package _global_ where it has whole sections"
            )
        problems.append(f"{dotted(path)}: {problem}")
    if problems or checked.config is None:
        raise ConfigError(problems)
    return LoadedConfig(checked.config, line.print_config, frozenset(found.typed))


def read_run_config(path: FilePath) -> File:
    """Read the `config.yaml` of a run for `load_config`.

    Raises:
        ConfigError: it cannot be read, or has interpolations or a defaults list, which a run does not write.
    """
    file = read_file(str(path), "RUN")
    text = repr(file.tree).replace("\\\\", "\\")
    if file.defaults is not None or re.search(r"(?<!\\)(?:\\\\)*\$\{", text):
        raise ConfigError(
            f"{path}: a run's file has values only, no interpolation and no defaults list"
        )
    return file


class _Composition:
    """Files and presets, without the keys of a command line.

    Attributes:
        tree: nested mappings of values.
        chosen: the name chosen in each group.
        files: those read, lowest precedence first.
        problems: one sentence for each file or choice that cannot be used.
    """

    def __init__(self, line: CommandLine) -> None:
        self.tree: dict[Any, Any] = {}
        self.chosen: dict[str, str] = {}
        self.problems: list[str] = []
        self.files: list[File] = []
        user_folders = [FilePath(name) for option, name in line.sources if option == "--config-dir"]
        self.problems += [
            f"{folder}: no such folder (--config-dir)"
            for folder in user_folders
            if not folder.is_dir()
        ]
        beside = [FilePath(name).parent for option, name in line.sources if option == "--cfg"]
        folders = [folder for folder in (*user_folders, *beside, PRESETS) if folder.is_dir()]
        files: dict[str, File] = {}
        names: list[str] = []
        for option, name in line.sources:
            if option == "--cfg":
                names.append(f"linnaeus_cfg{len(files)}")
                try:
                    files[names[-1]] = read_file(name, option)
                except ConfigError as error:
                    self.problems += error.problems
            elif option == "--config-name":
                names.append(name.removesuffix(".yaml"))
                if not any((folder / f"{names[-1]}.yaml").is_file() for folder in folders):
                    hint = suggest(names.pop(), names_in("", folders))
                    self.problems.append(f"{name}: no such file in --config-dir ({option}){hint}")
        wrong = {
            group: _missing(choice, folders, user_folders) for group, choice in line.groups.items()
        }
        self.problems += filter(None, wrong.values())
        groups = [choice for group, choice in line.groups.items() if not wrong[group]]
        names = [name for name in names if name in files or not name.startswith("linnaeus_cfg")]
        self.tree = _merged(*(file.tree for file in files.values()))
        try:
            if (
                groups
                or len(names) > len(files)
                or any(f.defaults is not None for f in files.values())
            ):
                self.tree, self.chosen = compose_files(files, names, groups, folders)
            self.files += [*chosen_files(files.values(), self.chosen, folders), *files.values()]
        except ConfigError as error:
            self.problems += error.problems


class _Sources:
    """Values set by the files, presets and keys of a command line.

    Attributes:
        tree: nested mappings of values.
        chosen: the name chosen in each group.
        typed: the keys that the command line sets.
        problems: one sentence for each file or choice that cannot be used.
    """

    def __init__(
        self, line: CommandLine, base: File | None, compositions: dict[Any, _Composition]
    ) -> None:
        key = tuple(line.sources), tuple(line.groups.values())
        composed = compositions[key] = compositions.get(key) or _Composition(line)
        self.tree, self.chosen = composed.tree, composed.chosen
        self.problems = [*composed.problems]
        self.typed = typed_keys(line.overrides)
        self._files = [*([base] if base else []), *composed.files]
        if base:
            self.tree = _merged(base.tree, self.tree)
        tree = OmegaConf.create({name: child for name, child in self.tree.items() if name != PLAN})
        for override in line.overrides:
            try:
                _apply(tree, override)
            except (OmegaConfBaseException, TypeError, ValueError) as error:
                reason = str(error).partition("\n")[0]
                self.problems.append(f"{override.key}: {reason} ({COMMAND_LINE})")
        self.tree = map_texts(OmegaConf.to_container(tree), own_resolvers)
        register()

    def origin(self, path: Path) -> str:
        """The place that sets a key, for messages."""
        if _has_prefix(self.typed, path):
            return COMMAND_LINE
        for file in reversed(self._files):
            if _is_in(file.tree, path):
                return file.name
        return "files" if _is_in(self.tree, path) else DEFAULT


def _merged(*trees: Mapping[Any, Any]) -> dict[Any, Any]:
    return OmegaConf.to_container(OmegaConf.merge({}, *trees))  # type: ignore[return-value]


def _has_prefix(paths: Any, path: Path) -> bool:
    return any(path[:size] in paths for size in range(1, len(path) + 1))


def _is_in(tree: Any, path: Path) -> bool:
    for name in path:
        if not isinstance(tree, Mapping) or name not in tree:
            return False
        tree = tree[name]
    return True


def _missing(
    choice: Override, folders: Sequence[FilePath], user_folders: Sequence[FilePath]
) -> str | None:
    """Return the mistake in a choice of a group, or None; `user_folders` come from `--config-dir`."""
    group, text = choice.key.partition("@")[0], choice.text or ""
    there = names_in(group, folders)
    if not there:
        groups = [*available(*user_folders)]  # a `--cfg` file may lie beside anything
        hint = alias(group, text) or f"groups are {', '.join(groups)}{suggest(group, groups)}"
        return f"{group}: no such key or preset group ({COMMAND_LINE}); {hint}"
    names = re.findall(r"[^\s,'\"]+", text[1:-1]) if text.startswith("[") else [text]
    missing = next((name for name in names if name and name not in there), None)
    if missing is None:
        return None
    hint = suggest(missing, there)
    if "," in missing:
        hint = f"; to run with each of them: linnaeus sweep {choice.key}={text}"
    return f"{group}: no preset {missing!r} ({COMMAND_LINE}); there are {', '.join(there)}{hint}"


def _apply(tree: DictConfig, override: Override) -> None:
    """Set or delete one key; raises `ValueError` with the mistake."""
    path = override.path
    if not override.delete:
        is_known = path in KEYS or path in NODES or is_open(path)
        value = override.value() if is_known else override.text  # the check refuses the key
        OmegaConf.update(tree, override.key, value, force_add=True)
        return
    above = OmegaConf.select(tree, dotted(path[:-1])) if path[1:] else tree
    if OmegaConf.is_dict(above) and path[-1] in above:
        del above[path[-1]]
    elif path not in KEYS and path not in NODES:
        raise ValueError("is not set" + ("" if is_open(path) else unknown_key(path, "")))
