"""Presets that ship with the package, `linnaeus/presets/<group>/<name>.yaml`, composed by Hydra."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path as FilePath

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.singleton import Singleton
from hydra.version import VersionBase
from omegaconf import OmegaConf

from linnaeus.config.keys import suggest
from linnaeus.config.settings import Setting, flatten

FOLDER = FilePath(__file__).resolve().parent.parent / "presets"


def available() -> dict[str, list[str]]:
    """Names of the presets of each group."""
    groups = sorted(group for group in FOLDER.iterdir() if group.is_dir())
    found = {group.name: sorted(file.stem for file in group.glob("*.yaml")) for group in groups}
    return {group: names for group, names in found.items() if names}


def read_presets(selected: Mapping[str, str]) -> tuple[list[Setting], list[str]]:
    """Compose the selected presets.

    Args:
        selected: the preset of each group; later ones override earlier ones.

    Returns:
        Their settings, and the problems.
    """
    problems = [problem for group, name in selected.items() if (problem := _check(group, name))]
    if problems or not selected:
        return [], problems
    settings: list[Setting] = []
    with _own_hydra(), initialize_config_dir(str(FOLDER), job_name="linnaeus", version_base="1.3"):
        for group, name in selected.items():
            composed = compose(overrides=[f"+{group}={name}"])
            values = OmegaConf.to_container(composed, resolve=False)
            settings += flatten((), values, f"preset {group}={name}")
    return settings, []


def _check(group: str, name: str) -> str | None:
    presets = available()
    if group not in presets:
        hint = f"groups are {', '.join(presets)}{suggest(group, presets)}"
        return f"{group}: no such key or preset group (command line); {hint}"
    if name not in presets[group]:
        hint = f"there are {', '.join(presets[group])}{suggest(name, presets[group])}"
        return f"{group}: no preset {name!r} (command line); {hint}"
    return None


@contextmanager
def _own_hydra() -> Iterator[None]:
    """Put Hydra's global state aside, so that a program that uses Hydra can load a configuration."""
    instances = Singleton._instances
    classes = (GlobalHydra, VersionBase)
    hidden = {cls: instances.pop(cls) for cls in classes if cls in instances}
    try:
        yield
    finally:
        for cls in classes:
            instances.pop(cls, None)
        instances.update(hidden)
