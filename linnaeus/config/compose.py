"""Orders files and groups by Hydra's rules (https://hydra.cc/docs/advanced/defaults_list).

Hydra 1.3 computes its defaults list over the files read here: which count, in which order and in which
package. Its functions for this are private. The public `hydra.compose` would add a configuration of its own,
and lose the file and line of each value.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from hydra._internal.config_repository import ConfigRepository
from hydra._internal.defaults_list import DefaultsList, create_defaults_list
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.version import Version, getbase, setbase
from omegaconf import OmegaConf

from linnaeus.config.aliases import alias
from linnaeus.config.files import File, Files
from linnaeus.config.keys import EXPERIMENT, available, names_in, node_of, suggest
from linnaeus.config.overrides import Override
from linnaeus.config.tree import COMMAND_LINE, sweep_hint

_PRIMARY = "__command_line__"
"""Path of the configuration whose defaults list is that of the command line."""
if not isinstance(getbase(), Version):  # else a program around has chosen
    setbase("1.3")


class _Repository(ConfigRepository):  # type: ignore[misc]
    """Shows Hydra the defaults lists and packages of files, without their keys."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self.sources: list[ConfigSource] = []

    def load_config(self, config_path: str) -> ConfigResult | None:
        file = self.files.get(config_path)
        if file is None:
            return None
        content = OmegaConf.create({} if file.defaults is None else {"defaults": file.defaults})
        package = file.package or node_of(config_path.rpartition("/")[0])
        result = ConfigResult("linnaeus", config_path, content, {"package": package})
        entries = self._extract_defaults_list(config_path, content)
        result.defaults_list = self._create_defaults_list(config_path, entries)
        return result

    def group_exists(self, config_path: str) -> bool:
        return any((folder / config_path).is_dir() for folder in self.files.folders)

    def config_exists(self, config_path: str) -> bool:
        return self.files.get(config_path) is not None

    def get_group_options(
        self, group_name: str, results_filter: ObjectType | None = None
    ) -> list[str]:
        return names_in(group_name, self.files.folders)


def order_files(
    files: Files, names: Sequence[str], choices: Iterable[Override]
) -> tuple[list[tuple[str, str]], dict[str, str]]:
    """Find the files that count.

    Args:
        files: reads them.
        names: paths of files, lowest precedence first.
        choices: what the command line chooses in groups such as `model` or `encoder@MODEL.x`.

    Returns:
        The path and package of each file, lowest precedence first, and the name chosen in each group.

    Raises:
        Exception: whatever Hydra finds wrong; for lists that it cannot read it raises errors of many kinds.
    """
    lowest: list[str] = []  # groups that no list chooses: files win over what is chosen there
    overrides: list[str] = []

    def ask(*, skip_missing: bool) -> DefaultsList:
        defaults = [*({group: None} for group in lowest), *names, "_self_"]
        files.read[_PRIMARY] = File("command line", defaults=defaults)
        parsed = OverridesParser.create().parse_overrides(overrides)
        return create_defaults_list(_Repository(files), _PRIMARY, parsed, False, skip_missing)

    for choice in sorted(choices, key=_depth):
        found = ask(skip_missing=True)
        known = {*found.overrides.known_choices}
        listed = {
            file.config_path.rpartition("/")[0] for file in found.defaults
        }  # also by a list of names
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
        overrides.append(f"{sign}{key}" if choice.text is None else f"{sign}{key}={choice.text}")
    found = ask(skip_missing=False)
    chosen = {group: str(name) for group, name in found.overrides.known_choices.items() if name}
    return [(file.config_path, file.package) for file in found.defaults], chosen


def _depth(choice: Override) -> float:
    """How deep a group of a node lies, since files choose in groups below theirs; others come last."""
    group = choice.key.partition("@")[0]
    return math.inf if node_of(group) in (None, "_global_") else group.count("/")


def problem_of(choice: Override, files: Files, own: Sequence[Path]) -> str | None:
    """What is wrong with a choice in a group, where there are no such files; `own` are the folders typed."""
    group = choice.key.partition("@")[0]
    there = names_in(group, files.folders)
    if not there:
        groups = [*available(*own)]  # a `--cfg` file may lie beside anything
        hint = None if group == EXPERIMENT else alias(group, choice.text)
        hint = hint or f"groups are {', '.join(groups)}{suggest(group, groups)}"
        return f"{group}: no such key or preset group ({COMMAND_LINE}); {hint}"
    text = choice.text or ""
    names = re.findall(r"[^\s,'\"]+", text[1:-1]) if text.startswith("[") else [text]
    missing = next((name for name in names if name not in there), None)
    if missing is None or choice.text is None:
        return None
    hint = sweep_hint(choice.key, text) or suggest(missing, there)
    return f"{group}: no preset {missing!r} ({COMMAND_LINE}); there are {', '.join(there)}{hint}"


def sentence(error: Exception, files: Files) -> str:
    """What Hydra finds wrong, in one sentence."""
    if isinstance(error, RecursionError):
        return "defaults: the files lead back to themselves, or are nested too deeply"
    text = re.split(r"Config search path:| : Override\(", str(error))[0]
    text = " ".join(text.strip().replace("\n\n", "; ").split()) or type(error).__name__
    for path, file in files.read.items():
        text = text.replace(path, file.name) if path.startswith("__cfg") else text
    return f"defaults: {text}"
