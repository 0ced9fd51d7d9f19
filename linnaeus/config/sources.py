"""The settings of all files that a command line names, in order.

Precedence, lowest first: presets and other files of a node's group selected on the command line
(`model=resnet50`), the files of `--cfg` and `--config-name` in their order, files of other groups selected on
the command line (`experiment=birds`). A selected group that a defaults list has chosen already is replaced
there. Within a file its defaults list decides.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path as FilePath

from linnaeus.config.defaults_list import COMMAND_LINE, Choice, order_files
from linnaeus.config.hydra_equivalents import CFG_VALUES, hydra_option_hint
from linnaeus.config.keys import suggest
from linnaeus.config.overrides import CommandLine
from linnaeus.config.presets import expanded
from linnaeus.config.search_path import SearchPath, default_package, is_file, is_folder
from linnaeus.config.settings import Setting
from linnaeus.config.values import untyped


@dataclass
class Sources:
    """Settings and choices of all files.

    Attributes:
        settings: of all files, lowest precedence first.
        chosen: the name chosen in each group.
        problems: one sentence each.
        warnings: one sentence for each choice of the command line that a file beats.
        is_complete: whether every file was found and could be read.
    """

    settings: list[Setting]
    chosen: dict[str, str]
    problems: list[str]
    warnings: list[str]
    is_complete: bool


def read_sources(line: CommandLine) -> Sources:
    """Read the files that a command line names, and those that their defaults lists name."""
    problems: list[str] = []
    path = _search_path(line, problems)
    roots = [root for option, name in line.sources if (root := _root(path, option, name, line, problems))]
    roots = list(dict.fromkeys(reversed(roots)))[::-1]  # of a file named twice, the later one counts
    choices = [choice for choice in _choices(line) if _exists(choice, path, problems, line)]
    order = order_files(path, roots, choices)
    for name, package in [*order.files]:
        if package and path.is_preset(name):  # a preset begins with its node, so it stands nowhere else
            group, _, preset = name.rpartition("/")
            order.files.remove((name, package))
            problems.append(
                f"{group}@{package}: the preset {preset!r} sets {group.upper()} and takes no package; a file "
                f"of your own does ({group}/NAME.yaml)"
            )
    settings = [
        replace(setting, path=(*filter(None, package.split(".")), *setting.path))
        for name, package in order.files
        for setting in path.files[name].settings
    ]
    files = path.files.values()
    problems += [problem for file in files for problem in file.problems] + order.problems
    is_complete = not order.problems and not any(file.is_broken for file in files)
    typed = {override.key for override in line.overrides}
    warnings = [text for choice in choices if (text := _beaten(choice, path, order.files, roots, typed))]
    return Sources(settings, order.chosen, problems, warnings, is_complete)


def _beaten(
    choice: Choice, path: SearchPath, files: Sequence[tuple[str, str]], roots: Sequence[str], typed: Set[str]
) -> str | None:
    """What to tell where `--cfg` files set keys that a choice of the command line sets otherwise."""
    chosen = {f"{choice.group}/{name}" for name in choice.names}
    values: dict[str, object] = {}
    beaten: dict[str, str] = {}
    for name, package in files:
        for setting in path.files[name].settings:
            key = ".".join([*filter(None, package.split(".")), *map(str, setting.path)])
            if name in chosen and not choice.is_left_out:
                values[key] = untyped(setting.value, check=False)
                beaten.pop(key, None)
            elif name in roots and key in values and untyped(setting.value, check=False) != values[key]:
                beaten[key] = f"{key} of {setting.origin}"
    beaten = {key: text for key, text in beaten.items() if key not in typed}
    if not beaten:
        return None
    return (
        f"{', '.join(beaten.values())} wins over {choice.key}={','.join(choice.names)}: files win over "
        "groups of the command line; keys there win over both"
    )


def _search_path(line: CommandLine, problems: list[str]) -> SearchPath:
    folders = []
    for name in line.named("--config-dir"):
        folder = expanded(name)
        if is_folder(folder):
            folders.append(folder)
        else:
            what = "is a file, not a" if is_file(folder) else "no such"
            problems.append(f"{name}: {what} folder (--config-dir)")
    return SearchPath(folders, [expanded(name).parent for name in line.named("--cfg")])


def _root(path: SearchPath, option: str, name: str, line: CommandLine, problems: list[str]) -> str | None:
    """The file that an option names, by its path in the search path."""
    if option == "--cfg":
        if name in CFG_VALUES and not is_file(FilePath(name)):
            problems.append(f"--cfg {name}: {hydra_option_hint('-c')}; --cfg takes a file")
            return None
        return path.add_root(name, option)
    if option == "--config-name":
        if path.read(name) is not None:
            return name
        names = path.names("")
        there = f"there are {', '.join(names)}{suggest(name, names)}" if names else "there are none"
        hint = there if line.named("--config-dir") else "--config-dir DIR says where it is"
        problems.append(f"{name}: no such file (--config-name); {hint}")
    return None


def _choices(line: CommandLine) -> list[Choice]:
    left_out = [_choice(key, name or "", is_left_out=True) for key, name in line.left_out.items()]
    return [_choice(key, text) for key, text in line.presets.items()] + left_out


def _choice(key: str, text: str, *, is_left_out: bool = False) -> Choice:
    """The choice in a group from the text of its value: a name, or several in brackets."""
    group, _, package = key.partition("@")
    is_default = package in ("", default_package(group))
    is_list = text.startswith("[") and text.endswith("]")
    names = [name.strip().strip("'\"") for name in text[1:-1].split(",")] if is_list else [text]
    found = tuple(name for name in names if name) if is_list or is_left_out else (text,)
    return Choice(group, found, None if is_default else package, is_left_out)


def _exists(choice: Choice, path: SearchPath, problems: list[str], line: CommandLine) -> bool:
    there = path.names(choice.group)
    missing = [name for name in choice.names if name not in there]
    if not there and choice.group not in path.groups():
        missing = missing or [""]  # any name: the group is unknown
    hint = sweep_hint(choice.key, line.presets.get(choice.key, ""))
    problems += [f"{path.why_missing(choice.group, name, COMMAND_LINE)}{hint}" for name in missing]
    return not missing


def sweep_hint(key: str, typed: str) -> str:
    """The command that takes several values, where such were typed for a key or group; else empty."""
    if "," not in typed:
        return ""
    from linnaeus.config.sweep_values import sweep_values  # here, because Hydra's parser takes long to import

    try:
        is_sweep = len(sweep_values(typed)) > 1
    except ValueError:
        return ""
    return f"; to run with each of them: linnaeus sweep {key}={typed}" if is_sweep else ""
