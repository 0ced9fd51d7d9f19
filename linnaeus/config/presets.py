"""Presets that ship with the package, `linnaeus/presets/<group>/<name>.yaml`."""

from __future__ import annotations

from pathlib import Path as FilePath

FOLDER = FilePath(__file__).resolve().parent.parent / "presets"


def available(folder: FilePath = FOLDER) -> dict[str, list[str]]:
    """Names of the files of each group in a folder, nested groups (`data/augment`) included."""
    found: dict[str, list[str]] = {}
    for file in sorted(folder.rglob("*.yaml")):
        group = file.parent.relative_to(folder).as_posix()
        if group != ".":
            found.setdefault(group, []).append(file.stem)
    return found
