"""Presets that ship with the package, `linnaeus/presets/<group>/<name>.yaml`."""

from __future__ import annotations

from pathlib import Path as FilePath

FOLDER = FilePath(__file__).resolve().parent.parent / "presets"
SUFFIXES = (".yaml", ".yml")
"""Endings of files; where both are there, the first counts."""


def available(folder: FilePath = FOLDER) -> dict[str, list[str]]:
    """Names of the files of each group in a folder, nested groups (`data/augment`) included."""
    return {group: [file.stem for file in files] for group, files in files_of(folder).items()}


def files_of(folder: FilePath, *, is_top: bool = False) -> dict[str, list[FilePath]]:
    """The files of each group in a folder, one for each name; with `is_top` those at its top, in `.`."""
    found: dict[str, dict[str, FilePath]] = {}
    for suffix in SUFFIXES:
        for file in folder.glob(f"*{suffix}") if is_top else folder.rglob(f"*{suffix}"):
            group = file.parent.relative_to(folder).as_posix()
            if (is_top or group != ".") and _is_file(file):
                found.setdefault(group, {}).setdefault(file.stem, file)
    return {group: [found[group][name] for name in sorted(found[group])] for group in sorted(found)}


def _is_file(path: FilePath) -> bool:
    """Whether a name leads to a file: not to a folder, to nothing, or in a circle of links."""
    try:
        return path.is_file()
    except OSError:
        return False


def expanded(name: str) -> FilePath:
    """The path of a name, with `~` replaced where there is such a home."""
    try:
        return FilePath(name).expanduser()
    except RuntimeError:
        return FilePath(name)
