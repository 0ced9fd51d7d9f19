"""Loads a `Config` from the command line, and writes one to a file."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

import yaml

from linnaeus.config.aliases import renamed
from linnaeus.config.files import read_file
from linnaeus.config.keys import KEYS, PLUGGABLE_PATHS, Path, dotted
from linnaeus.config.overrides import parse_command_line
from linnaeus.config.resolve import Resolver
from linnaeus.config.schema import Config
from linnaeus.config.tree import COMMAND_LINE, PLAN, read_tree
from linnaeus.config.values import Setting, escape, show, tree_of, untyped
from linnaeus.runtime.errors import ConfigError
from linnaeus.runtime.files import write_atomically

_REFERS = re.compile(r"(?<!\\)(?:\\\\)*\$\{")


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
        defaults = {path: Setting(key.default, "default") for path, key in KEYS.items()}
        lines = _with_origins(
            escape(dataclasses.asdict(self.config)), {**defaults, **self.settings}
        )
        return "".join(f"{line}\n" for line in lines)


def load_config(argv: Sequence[str], below: Mapping[Any, Any] | None = None) -> LoadedConfig:
    """Load the configuration that a command line describes.

    Args:
        argv: the tokens after the program's name.
        below: a tree of settings that files and command line win over, as `settings_of` gives.

    Raises:
        ConfigError: lists all problems.
    """
    line = parse_command_line(argv)
    try:
        given = read_tree(line, below or {})
        for warning in given.warnings:
            _warn(warning)
        files = [name for option, name in line.sources if option != "--config-dir"]
        resolved = Resolver(given.tree, given.chosen, files[-1] if files else None)
    except RecursionError:
        raise ConfigError("values are nested too deeply to be read") from None
    problems = [*line.problems, *given.problems]
    for path, problem in resolved.wrong.items():
        # A file that cannot be read may set a `_target_`, so the keys that these nodes take are unknown.
        if given.is_complete or not any(
            path[: len(node)] == node != path for node in PLUGGABLE_PATHS
        ):
            problems.append(f"{dotted(path)}: {problem}")
    if problems or resolved.config is None:
        raise ConfigError(problems)
    return LoadedConfig(resolved.config, line.print_config, resolved.settings, line.show_origins)


def settings_of(nodes: Mapping[str, Any], origin: str) -> Mapping[Any, Any]:
    """The settings of the nodes of a resolved configuration; messages say that they come from `origin`."""
    return {name: tree_of(node, origin) for name, node in escape(dict(nodes)).items()}


def read_run_config(path: FilePath) -> Mapping[Any, Any]:
    """Read the `config.yaml` of a run, also of an older version, as a tree of settings for `load_config`.

    Raises:
        ConfigError: it cannot be read, or has interpolations or a defaults list, which a run does not write.
    """
    file = read_file(str(path), "RUN")
    if file.problem:
        raise ConfigError(file.problem)
    text = repr(untyped(file.tree, check=False)).replace("\\\\", "\\")
    if file.defaults is not None or _REFERS.search(text):
        raise ConfigError(
            f"{path}: a run's file has values only, no interpolation and no defaults list"
        )
    tree: Mapping[Any, Any] = renamed(file.tree)
    return tree


@functools.cache
def _warn(sentence: str) -> None:
    """Print a warning once: a sweep loads many configurations, and torchrun starts many ranks."""
    if os.environ.get("RANK", "0") == "0":
        print(f"warning: {sentence}", file=sys.stderr)


def with_batch_sizes(config: Config, train: int | None = None, val: int | None = None) -> Config:
    """A copy of the configuration with other batch sizes; None keeps a size."""
    sizes = {"BATCH_SIZE": train, "BATCH_SIZE_VAL": val}
    changed: dict[str, Any] = {name: size for name, size in sizes.items() if size is not None}
    return dataclasses.replace(config, DATA=dataclasses.replace(config.DATA, **changed))


_MISREAD = re.compile(r"none|null|[-+]?[\d_.]+e[-+]?\d+", re.IGNORECASE)
"""Texts that are null or a number to OmegaConf, although not to YAML 1.1."""


class _Dumper(yaml.SafeDumper):
    """Writes YAML that OmegaConf reads back as the same values."""


def _represent_str(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    # Line breaks and the like survive only in double quotes.
    needs_quotes = not text.isprintable() or _MISREAD.fullmatch(text)
    return dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style='"' if needs_quotes else None
    )


def _represent_list(dumper: _Dumper, items: list[Any]) -> yaml.SequenceNode:
    is_flat = not any(isinstance(item, (list, dict)) for item in items)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=is_flat)


_Dumper.add_representer(str, _represent_str)
_Dumper.add_representer(list, _represent_list)
_Dumper.ignore_aliases = lambda self, data: True  # type: ignore[method-assign]


def to_yaml(config: Config, plan: Mapping[str, Any] | None = None) -> str:
    """The configuration as YAML, in the schema's order, with every value written out.

    `--cfg` reads the text back to an equal configuration; the plan is written below it for people to read.
    """
    text = _dump(escape(dataclasses.asdict(config)))
    if plan is not None:
        text += "# Worked out for this run. `--cfg` leaves it out, and works it out again.\n"
        text += _dump({PLAN: escape(dict(plan))})
    return text


def with_new_names(text: str) -> str:
    """Return what `to_yaml` of an earlier version wrote under today's names of keys."""
    with suppress(yaml.YAMLError):  # who reads a damaged text says so
        text = _dump(renamed(yaml.safe_load(text)))
    return text


def _dump(plain: Any) -> str:
    text: str = yaml.dump(plain, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=2**31)
    return text


def save_config(
    config: Config, path: str | os.PathLike[str], plan: Mapping[str, Any] | None = None
) -> None:
    """Write the configuration as YAML, atomically; arguments as for `to_yaml`.

    Raises:
        ConfigError: the file cannot be written.
    """
    target = FilePath(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, lambda file: file.write(to_yaml(config, plan).encode()))
    except OSError as error:
        raise ConfigError(
            f"{target}: cannot be written: {error.strerror} (EXPERIMENT.OUTPUT_DIR)"
        ) from error


def _with_origins(
    node: Mapping[str, Any], origins: Mapping[Path, Setting], path: Path = ()
) -> Iterator[str]:
    """The lines of a node as YAML, with a comment that says where each value comes from."""
    for name, value in node.items():
        here = (*path, name)
        if isinstance(value, dict) and value:
            yield _dump({name: {}}).removesuffix(" {}\n")
            yield from (f"  {line}" for line in _with_origins(value, origins, here))
            continue
        first, *rest = _dump({name: value}).splitlines()
        prefixes = (here[:size] for size in range(len(here), 0, -1))
        setting = next((origins[prefix] for prefix in prefixes if prefix in origins), None)
        if setting is not None:
            follows = isinstance(setting.text, str) and _REFERS.search(setting.text)
            first += f"  # {' '.join(setting.origin.split())}"
            first += f", follows {show(setting.text)[1:-1]}" if follows else ""
        yield from (first, *rest)
