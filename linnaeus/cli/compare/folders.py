"""From what was typed to the folders of runs."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path

from linnaeus.errors import ConfigError
from linnaeus.files import ASKED, CHECKPOINTS, LOGS, METRICS, RESULT

RUN_MARKERS = (METRICS, RESULT, ASKED, CHECKPOINTS)
"""A run has at least one of these; a folder with a `config.yaml` that somebody wrote has none."""
_NOT_ENTERED = (LOGS, CHECKPOINTS, "wandb", "__pycache__", "node_modules")
MOVED_ASIDE = re.compile(r"\.earlier-\d+$")
"""Runs that a sweep has moved aside."""
_NUMBER = re.compile(r"(\d+(?:\.\d+)?(?:e[-+]\d+)?)", re.ASCII)


def find_runs(names: Sequence[str]) -> list[Path]:
    """The folders of runs, in the order in which they were named; those inside one folder by name.

    Args:
        names: folders of runs, folders with runs below them, and patterns such as `runs/lr*`.

    Raises:
        ConfigError: for each name that gives no run.
    """
    found: dict[Path, Path] = {}
    problems: list[str] = []
    for name in names:
        runs = _runs_of(name, problems)
        found |= {run.resolve(): run for run in runs if run.resolve() not in found}
    if problems:
        raise ConfigError(problems)
    return list(found.values())


def _runs_of(name: str, problems: list[str]) -> list[Path]:
    path = Path(name).expanduser()
    if not os.path.lexists(path) and glob.has_magic(name):
        matches = map(Path, glob.glob(str(path), recursive=True))  # noqa: PTH207 - Path.glob has no `/*`
        folders = sorted((match for match in matches if match.is_dir()), key=natural)
        runs = [run for folder in folders for run in _within(folder)]
        if not runs:
            problems.append(f"{name}: no folder of this pattern holds a run")
        return runs
    if not path.is_dir():
        what = f"is a file; name the folder of the run, {path.parent}" if path.exists() else "no such folder"
        problems.append(f"{name}: {what}{_hint(path)}")
        return []
    runs = list(_within(path))
    if not runs:
        problems.append(f"{name}: holds no run (a folder with metrics.jsonl, result.json or checkpoints)")
    return runs


def _is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in RUN_MARKERS)


def _within(folder: Path) -> Iterator[Path]:
    """The folder itself where it is that of a run, else all runs below it."""
    if _is_run(folder):
        yield folder
    else:
        yield from _below(folder)


def _below(folder: Path) -> Iterator[Path]:
    try:
        inner = [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]
    except OSError:  # not ours to read
        return
    for path in sorted(inner, key=natural):
        if path.name in _NOT_ENTERED or path.name.startswith(".") or MOVED_ASIDE.search(path.name):
            continue
        if _is_run(path):
            yield path
        yield from _below(path)


def natural(text: object) -> tuple[list[tuple[float, str]], str]:
    """A key that sorts numbers within texts by their value: `LR=0.05`, `LR=2`, `LR=10`."""
    parts = _NUMBER.split(str(text))  # every second one is a number
    return [(float(part), "") if n % 2 else (-1.0, part) for n, part in enumerate(parts)], str(text)


def _hint(path: Path) -> str:
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.is_dir()]
    except OSError:
        return ""
    close = [] if path.exists() else get_close_matches(path.name, names, 1)
    return f"; did you mean {path.parent / close[0]}?" if close else ""


def run_names(folders: Sequence[Path]) -> list[str]:
    """Names that tell runs apart: their paths below the folder that all have in common."""
    if len(folders) == 1:
        return [folders[0].resolve().name]
    paths = [folder.resolve() for folder in folders]
    common = os.path.commonpath([path.parent for path in paths])
    return [str(path.relative_to(common)) for path in paths]
