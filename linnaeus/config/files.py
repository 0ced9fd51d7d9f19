"""Reads YAML files, and lets Hydra compose them with the groups that a command line chooses."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

from linnaeus.config.aliases import alias
from linnaeus.config.keys import NODES, PRESETS, names_in, suggest
from linnaeus.config.overrides import Override
from linnaeus.config.values import escape
from linnaeus.runtime.errors import ConfigError
from linnaeus.runtime.files import suggest_path

_PACKAGE = re.compile(r"^\s*#\s*@package\s+(\w+(?:\.\w+)*)\s*$", re.MULTILINE)
_PRIMARY = "linnaeus_command_line"
"""Name of the configuration whose defaults list the command line makes."""
_LOCK = threading.Lock()
"""Hydra has one composition at a time in a process."""


@dataclass(frozen=True)
class File:
    """Content of one file.

    Attributes:
        name: the path as messages show it.
        tree: nested mappings, below the package of a `# @package` line.
        defaults: its defaults list as YAML has it, for Hydra; None without one.
    """

    name: str
    tree: dict[Any, Any]
    defaults: Any = None


def read_file(name: str, asked_by: str, package: str = "") -> File:
    """Read a YAML file; without a `# @package` line its keys belong to `package`.

    Raises:
        ConfigError: it cannot be read.
    """
    path = FilePath(name)
    try:
        text = path.read_text(encoding="utf-8-sig")
        content = OmegaConf.to_container(OmegaConf.load(path)) if text.strip() else {}
    except OSError as error:
        if error.errno is None:  # OmegaConf's word for a lone text or number
            raise ConfigError(f"{name}: must hold keys with values (KEY: value)") from None
        hint = suggest_path(path) if isinstance(error, FileNotFoundError) else ""
        raise ConfigError(f"{name}: {str(error.strerror).lower()} ({asked_by}){hint}") from None
    except Exception as error:  # PyYAML and OmegaConf raise errors of many kinds
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        reason = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise ConfigError(f"{name}{line}: broken YAML: {reason}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{name}: must hold keys with values (KEY: value)")
    if "hydra" in content:
        raise ConfigError(f"{name}: hydra: {alias('hydra')}")
    defaults = content.pop("defaults", None)
    header = _PACKAGE.search(text)
    package = header[1] if header else package
    for part in filter(None, reversed(package.removeprefix("_global_").split("."))):
        content = {part: content}
    return File(name, content, defaults)


def compose_files(
    own: Mapping[str, File],
    names: Sequence[str],
    groups: Iterable[Override],
    folders: Sequence[FilePath],
) -> tuple[dict[Any, Any], dict[str, str]]:
    """Let Hydra compose files and groups.

    A choice in a group that no defaults list has comes first, so that files win over it. In a group that
    sets no node, such as `experiment`, it comes last, as Hydra's `+group=name` does.

    Args:
        own: the files of `--cfg`, by a name of their own.
        names: the files to compose, lowest precedence first: names in `own` and in the folders.
        groups: choices of the command line.
        folders: where groups and files are looked up; the first that has a file counts.

    Returns:
        The tree of values, and the name chosen in each group.

    Raises:
        ConfigError: Hydra refuses a file or a defaults list.
    """
    lowest: list[str] = []
    overrides = {
        ("~" if choice.delete else "") + choice.key: f"={choice.text}" if choice.text else ""
        for choice in groups
    }
    store = ConfigStore.instance()
    first, *others = (folder.resolve() for folder in folders)
    search_path = [escape(f"file://{folder}") for folder in others]
    with _LOCK:
        for name, file in own.items():
            defaults = {} if file.defaults is None else {"defaults": file.defaults}
            store.store(name, {**file.tree, **defaults})
        while True:
            primary = [*({group: None} for group in lowest), *names, "_self_"]
            store.store(_PRIMARY, {"defaults": primary, "hydra": {"searchpath": search_path}})
            around = GlobalHydra.instance().hydra  # of a program that uses Hydra
            GlobalHydra.instance().clear()
            try:
                with initialize_config_dir(str(first), version_base="1.3"):
                    words = [f"{key}{choice}" for key, choice in overrides.items()]
                    config: Any = compose(_PRIMARY, words, return_hydra_config=True)
                break
            except ConfigCompositionException as error:
                unlisted = re.search(r"Could not \w+ '([^'=]+).*No match", str(error))
                group = unlisted[1] if unlisted else ""
                if f"~{group}" in overrides:  # there is nothing to leave out
                    del overrides[f"~{group}"]
                elif group in overrides and not _sets_node(group):
                    overrides[f"+{group}"] = overrides.pop(group)
                elif _sets_node(group) and group not in lowest:
                    lowest.append(group)
                else:
                    raise ConfigError(_sentence(error, own, folders)) from None
            except Exception as error:  # Hydra raises errors of many kinds for a broken list
                raise ConfigError(_sentence(error, own, folders)) from None
            finally:
                GlobalHydra.instance().hydra = around
    chosen = config.hydra.runtime.choices
    tree: Any = OmegaConf.to_container(config)
    del tree["hydra"]
    return tree, {group: str(name) for group, name in chosen.items() if name}


def _sets_node(group: str) -> bool:
    """Return whether a group is named like a node; files of `experiment` set any node."""
    top = group.partition("@")[0].partition("/")[0]
    return (top.upper(),) in NODES and top != "experiment"


def chosen_files(
    own: Iterable[File], chosen: Mapping[str, str], folders: Sequence[FilePath]
) -> list[File]:
    """Return the files of groups, and all that defaults lists name, as far as they lie in the folders."""
    found: list[File] = []
    names = [("", name) for file in own for name in _listed(file)]
    names += [(key.partition("@")[0], name) for key, name in chosen.items()]
    for group, name in names:  # a list that grows
        places = (folder / group / f"{name}.yaml" for folder in folders)
        if path := next(filter(FilePath.is_file, places), None):
            file = read_file(str(path), "defaults", group.replace("/", "."))
            names += [(group, each) for each in _listed(file)]
            found.append(
                replace(file, name=f"preset {group}={name}") if PRESETS in path.parents else file
            )
    return found[::-1]  # a file wins over those that its list names


def _listed(file: File) -> list[str]:
    """Return the files that a defaults list names beside groups."""
    entries = file.defaults if isinstance(file.defaults, list) else []
    return [name for name in entries if isinstance(name, str) and name != "_self_"]


def _sentence(error: Exception, own: Mapping[str, File], folders: Sequence[FilePath]) -> str:
    """Return Hydra's error as one sentence, with the closest name for a file that is not there."""
    if isinstance(error, RecursionError):
        return "defaults: the files lead back to themselves, or are nested too deeply"
    text = re.split(r"Config search path:| : Override\(", str(error))[0]
    text = " ".join(text.strip().replace("\n\n", "; ").split()) or type(error).__name__
    text = text.replace(f"In '{_PRIMARY}': ", "")
    for name, file in own.items():
        text = text.replace(f"'{name}'", file.name).replace(name, file.name)
    group, _, name = (getattr(error, "missing_cfg_file", None) or "").rpartition("/")
    return f"defaults: {text.rstrip('.')}{suggest(name, names_in(group, folders)) if name else ''}"
