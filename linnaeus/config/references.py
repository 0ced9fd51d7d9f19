"""Finds missing files, folders, classes and devices, and names that timm does not know.

Imports neither timm nor a user's code, and torch only for a named GPU. It reads their sources: a name that
stands nowhere in them does not exist. A name that stands there may still be wrong, and the run says so later.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path as FilePath
from typing import Any

from linnaeus.config.check import Checked
from linnaeus.config.instantiate import targets
from linnaeus.config.keys import Path, suggest
from linnaeus.config.schema import WEIGHTINGS
from linnaeus.runtime.errors import ConfigError
from linnaeus.runtime.files import suggest_path

_SPLITS = ("TRAIN", "VAL", "TEST")
_TIMM = {
    ("MODEL", "NAME"): ("models", r"@register_model\s+def (\w+)", "a timm model"),
    ("OPTIMIZER", "NAME"): ("optim", r"name=['\"](\w+)['\"]", "an optimizer of timm"),
}
"""Keys that name something of timm: where, the pattern of the names there, and a noun."""


def missing_references(checked: Checked, *, is_here: bool) -> Iterator[tuple[Path, str]]:
    """Yield each key that names a missing thing, with the predicate of a sentence. Wrong keys are left out.

    The device must be there if the run `is_here`, on this machine.
    """
    for path, value in checked.values.items():
        for key, name in targets({path[-1]: value}, path[:-1]):
            if problem := _missing_target(str(name)):
                yield key, problem
    for key in _TIMM:
        name = str(checked.values.get(key) or "")
        if ":" not in name and (problem := _missing_in_timm(name, *_TIMM[key])):
            yield key, problem
    for key, place in _paths(checked):
        if not place.expanduser().exists():
            yield key, f"there is no {place}{suggest_path(place)}"
    key, device = ("EXPERIMENT", "DEVICE"), checked.values.get(("EXPERIMENT", "DEVICE"))
    if is_here and device not in (None, "auto", "cpu"):
        from linnaeus.runtime.distributed import resolve_device  # loads torch, which knows devices

        try:
            resolve_device(device, int(os.environ.get("LOCAL_RANK", "0")))
        except ConfigError as error:
            yield key, error.problems[0].removeprefix("EXPERIMENT.DEVICE: ")


def _paths(checked: Checked) -> Iterator[tuple[Path, FilePath]]:
    """The files and folders that must be there, by key."""
    dataset: dict[str, Any] = {
        name: checked.values.get(("DATA", "DATASET", name)) for name in ("NAME", "ROOT", *_SPLITS)
    }
    root = FilePath(dataset["ROOT"] or "")  # "" is always there
    if dataset["NAME"] in ("imagefolder", "manifest"):
        yield ("DATA", "DATASET", "ROOT"), root
        if root.expanduser().exists():
            for name in filter(dataset.get, _SPLITS):
                yield (
                    ("DATA", "DATASET", name),
                    root.expanduser() / FilePath(dataset[name]).expanduser(),
                )
    files = [("LOSS", "CLASS_WEIGHTS")]
    if not checked.values.get(("TRAIN", "AUTO_RESUME")):  # a resumed run does not read them
        files.append(("MODEL", "WEIGHTS"))
    for key in files:
        if (file := checked.values.get(key)) and file not in WEIGHTINGS:
            yield key, FilePath(file)


@functools.cache
def _missing_in_timm(name: str, folder: str, pattern: str, noun: str) -> str | None:
    text = _source_of_timm(folder)
    names, word = re.findall(pattern, text), re.escape(name.partition(".")[0])
    if not names or re.search(rf"['\"]{word}['\"]|def {word}\(", text, re.IGNORECASE):
        return None
    return f"{name!r} is not {noun}{suggest(name.lower(), sorted({*names}), most=3, cutoff=0.6)}"


@functools.cache
def _source_of_timm(folder: str) -> str:
    spec = importlib.util.find_spec("timm")
    places = spec.submodule_search_locations if spec else None
    files = (file for place in places or () for file in FilePath(place, folder).glob("*.py"))
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


def _missing_target(name: str) -> str | None:
    """Return the missing part of a dotted path of a class or function; None if it exists."""
    module, *rest = name.split(".")
    try:
        spec: ModuleSpec | None = importlib.util.find_spec(module)
    except (ValueError, ImportError):  # a module without a file, or no name of a module
        return None
    if spec is None:
        return f"there is no module {module}"
    while rest and spec.submodule_search_locations is not None:
        inner = PathFinder.find_spec(f"{module}.{rest[0]}", [*spec.submodule_search_locations])
        if inner is None:
            break
        module, spec, rest = f"{module}.{rest[0]}", inner, rest[1:]
    if not rest or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    source = FilePath(spec.origin).read_text(encoding="utf-8", errors="replace")
    if re.search(rf"\b{rest[0]}\b|import \*|__getattr__|globals\(|setattr\(", source):
        return None
    names = re.findall(r"^(?:class |def |from \S+ import )?(\w+)", source, re.MULTILINE)
    return f"{module} has no {rest[0]!r}{suggest(rest[0], names, f'{module}.', cutoff=0.6)}"
