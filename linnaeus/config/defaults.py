"""Values of keys whose null follows the data and the command line: augmentation, and the name of the run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import Any

from omegaconf import OmegaConf

from linnaeus.config.keys import TARGET, Path, dotted
from linnaeus.config.values import escape

IMAGE_FILES = ("imagefolder", "manifest")
"""Kinds of datasets that are photographs more often than not."""

_AUGMENT = {"CROP_SCALE": ([0.35, 1.0], [0.8, 1.0]), "HFLIP": (0.5, 0.0)}
"""Keys of DATA.AUGMENT, each with its value for `IMAGE_FILES` and that for other data."""


def values_of_nulls(typed: Any, cfg: str | None) -> Iterator[tuple[Path, Any]]:
    """Each key that is null, with the value that it gets; assign one before asking for the next.

    Args:
        typed: the configuration, interpolations included.
        cfg: the last file of `--cfg` or `--config-name`; None without one.
    """
    target, kind = (_read(typed, f"DATA.DATASET.{name}") for name in (TARGET, "NAME"))
    kind = str(target).rpartition(".")[2] if target else kind
    for name, (of_files, of_others) in _AUGMENT.items():
        if _is_null(typed.DATA.AUGMENT, name):
            is_files = not target and kind in IMAGE_FILES
            yield ("DATA", "AUGMENT", name), of_files if is_files else of_others
    if _is_null(typed.EXPERIMENT, "NAME"):
        path = ("EXPERIMENT", "NAME")
        yield path, escape(_folder_name(str(kind)) or "run")  # the folder may follow it
        folder = "" if target or kind not in IMAGE_FILES else _data_folder(typed)
        if name := _folder_name(FilePath(cfg).stem if cfg else "") or _folder_name(folder):
            yield path, escape(name)


def _read(typed: Any, key: str) -> Any:
    """The value of a key; None where there is none, or where it cannot be resolved."""
    return OmegaConf.select(typed, key, throw_on_resolution_failure=False)


def _is_null(node: Any, name: str) -> bool:
    if OmegaConf.is_interpolation(node, name) or OmegaConf.is_missing(node, name):
        return False
    return node[name] is None


def _data_folder(typed: Any) -> str:
    """The name of the folder of the files, of several the first; empty where no key says it."""
    root, train = (_read(typed, dotted(("DATA", "DATASET", name))) for name in ("ROOT", "TRAIN"))
    if OmegaConf.is_list(root):
        root = root[0] if root else None
    if root is None and train is not None:
        root = FilePath(str(train)).parent
    if root is None:
        return ""
    name = FilePath(str(root)).name
    return name if name not in ("", "..") else FilePath(str(root)).resolve().name


def _folder_name(text: str) -> str:
    """A text as the name of a folder inside another; empty where it cannot be one."""
    name = "".join(letter if letter.isprintable() else "_" for letter in text).strip(" .")
    return "" if name == "null" else name
