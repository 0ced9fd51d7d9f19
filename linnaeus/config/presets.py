"""Presets that ship with the package, `linnaeus/presets/<group>/<name>.yaml`."""

from __future__ import annotations

from pathlib import Path as FilePath

FOLDER = FilePath(__file__).resolve().parent.parent / "presets"
SUFFIXES = (".yaml", ".yml")
"""Endings of files; where both are there, the first counts."""


def available(folder: FilePath = FOLDER) -> dict[str, list[str]]:
    """Names of the files of each group in a folder, nested groups (`data/augment`) included."""
    found: dict[str, set[str]] = {}
    for file in (file for suffix in SUFFIXES for file in folder.rglob(f"*{suffix}")):
        group = file.parent.relative_to(folder).as_posix()
        if group != ".":
            found.setdefault(group, set()).add(file.stem)
    return {group: sorted(found[group]) for group in sorted(found)}
