"""Finds values that name what is not there: files, folders, classes, and models and optimizers of timm.

Imports neither torch nor timm nor a user's code. It reads their sources: a name that stands nowhere in them
does not exist. A name that stands there may still be wrong, and the run says so later.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Iterator
from difflib import get_close_matches
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path as FilePath
from typing import Any

from linnaeus.config.check import Checked
from linnaeus.config.instantiate import targets
from linnaeus.config.keys import Path
from linnaeus.config.values import IMAGE_FILES
from linnaeus.runtime.files import suggest_path


def missing_references(checked: Checked) -> Iterator[tuple[Path, str]]:
    """Each key that names what is not there, with the predicate of a sentence. Wrong keys are left out."""
    for path, setting in checked.settings.items():
        for key, name in targets({path[-1]: setting.value}, path[:-1]):
            problem = _missing_target(str(name))
            if problem and path not in checked.wrong:
                yield key, problem
    if ("DATA", "DATASET") not in checked.free:
        yield from _missing_data(checked)
    if ("MODEL",) not in checked.free:
        yield from _missing_model(checked)
    name = str(checked.value("OPTIMIZER", "NAME") or "").lower()
    if ("OPTIMIZER",) not in checked.free and name:
        yield from _missing_in_timm(
            ("OPTIMIZER", "NAME"), name, "optim", r"name=['\"](\w+)['\"]", "optimizer of timm"
        )
    weights = None if ("LOSS",) in checked.free else checked.value("LOSS", "CLASS_WEIGHTS")
    if weights not in (None, "balanced"):
        yield from _missing_path(("LOSS", "CLASS_WEIGHTS"), weights)


def _missing_data(checked: Checked) -> Iterator[tuple[Path, str]]:
    root, kind = (checked.value("DATA", "DATASET", name) for name in ("ROOT", "NAME"))
    key = ("DATA", "DATASET", "ROOT")
    if kind not in IMAGE_FILES or key in checked.wrong:
        return
    if kind == "imagefolder" and root is None:
        yield key, "name the folder that holds the images"
    roots = [str(item) for item in (root if isinstance(root, list) else [root or ""])]
    lost = [lost for each in roots for lost in _missing_path(key, each)]
    yield from lost
    for split in ("TRAIN", "VAL", "TEST"):
        path = ("DATA", "DATASET", split)
        name = checked.value(*path)
        if name is not None and len(roots) == 1 and not lost:
            yield from _missing_path(path, FilePath(roots[0]).expanduser() / name)


def _missing_model(checked: Checked) -> Iterator[tuple[Path, str]]:
    path, name = ("MODEL", "NAME"), str(checked.value("MODEL", "NAME") or "")
    kind, _, place = name.rpartition(":")
    if kind == "local-dir":
        yield from _missing_path(path, place)
    elif name and not kind:
        registered = r"@register_model\s+def (\w+)"
        yield from _missing_in_timm(path, name, "models", registered, "timm model")
    weights = checked.value("MODEL", "WEIGHTS")
    if weights is not None:
        yield from _missing_path(("MODEL", "WEIGHTS"), weights)


def _missing_path(key: Path, name: Any) -> Iterator[tuple[Path, str]]:
    path = FilePath(name).expanduser()
    if not path.exists():
        yield key, f"there is no {path}{suggest_path(path)}"


def _missing_in_timm(
    path: Path, name: str, folder: str, pattern: str, what: str
) -> Iterator[tuple[Path, str]]:
    text = _source_of_timm(folder)
    names = sorted({*re.findall(pattern, text)})
    word = re.escape(name.partition(".")[0])
    if names and not re.search(rf"['\"]{word}['\"]|def {word}\(", text):
        close = get_close_matches(name, names, n=3)
        hint = f"; did you mean {', '.join(close)}?" if close else ""
        article = "an" if what[0] in "aeiou" else "a"
        yield path, f"{name!r} is not {article} {what}{hint}"


@functools.cache
def _source_of_timm(folder: str) -> str:
    spec = importlib.util.find_spec("timm")
    places = spec.submodule_search_locations if spec else None
    files = (file for place in places or () for file in FilePath(place, folder).glob("*.py"))
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


def _missing_target(name: str) -> str | None:
    """What a dotted path of a class or function names that is not there; None where nothing is amiss."""
    module, *rest = name.split(".")
    try:
        spec: ModuleSpec | None = importlib.util.find_spec(module)
    except (ValueError, ImportError):  # a module without a file, or no name of a module
        return None
    if spec is None:
        return f"there is no module {module}"
    while rest and spec.submodule_search_locations is not None:
        below = PathFinder.find_spec(f"{module}.{rest[0]}", [*spec.submodule_search_locations])
        if below is None:
            break
        module, spec, rest = f"{module}.{rest[0]}", below, rest[1:]
    if not rest or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    source = FilePath(spec.origin).read_text(encoding="utf-8", errors="replace")
    if re.search(rf"\b{rest[0]}\b|import \*|__getattr__|globals\(|setattr\(", source):
        return None
    names = re.findall(r"^(?:class |def |from \S+ import )?(\w+)", source, re.MULTILINE)
    close = get_close_matches(rest[0], names, n=1)
    hint = f"; did you mean {module}.{close[0]}?" if close else ""
    return f"{module} has no {rest[0]!r}{hint}"
