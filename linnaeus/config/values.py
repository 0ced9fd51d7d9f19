"""Values of the schema's types, and the resolvers of `${...}`.

OmegaConf keeps the resolvers of `${...}` for the whole process. Linnaeus registers its resolvers under names
of its own, so that the resolvers of a program around it stay as they are.
"""

from __future__ import annotations

import functools
import math
import os
import re
import typing
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from linnaeus.config.keys import KEYS, TARGET, Key, strip_optional
from linnaeus.config.schema import IMAGE_FILES

MISSING = "???"
"""OmegaConf's mark for a value that another source must give."""
WANTED: Mapping[Any, str] = {
    bool: "true or false",
    str: "text",
    int: "a whole number",
    float: "a number",
    list: "a list such as [a, b]",
    list[str]: "a list of text such as [a, b]",
    list[list[int]]: "a list of pairs such as [[1, 128], [20, 176]]",
    dict: "a mapping such as {name: value}",
    Any: "text, a number, a list or a mapping",
}
"""Values that a key of each type takes; a list without its own entry is described as `list`."""
_OF_DATA: Mapping[str, Any] = {
    "CROP_SCALE": ([0.35, 1.0], [0.8, 1.0]),
    "HFLIP": (0.5, 0.0),
}
"""Keys of DATA.AUGMENT whose null follows the data: the value for `IMAGE_FILES`, and for other data."""


def wanted(hint: Any) -> str:
    """Return a description of the values of a type."""
    return WANTED.get(hint) or WANTED[typing.get_origin(hint) or hint]


def map_texts(value: Any, function: Callable[[str], str]) -> Any:
    """Apply a function to each text in nested lists and mappings."""
    if isinstance(value, str):
        return function(value)
    if isinstance(value, Mapping):
        return {key: map_texts(item, function) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [map_texts(item, function) for item in value]
    return value


def own_resolvers(text: str) -> str:
    """Replace `${now:` and `${hydra:` by names of Linnaeus; there is no resolver for the second."""
    return re.sub(r"(?<!\\)((?:\\\\)*\$\{)\s*(now|hydra)\s*:", r"\1linnaeus.\2:", text)


def show(value: Any) -> str:
    """A value for an error message, at most 80 characters long; text is quoted."""
    shown = repr(value).replace("${linnaeus.", "${")
    return shown if len(shown) <= 80 else f"{shown[:70]}...{shown[-7:]}"


def escape(value: Any) -> Any:
    """A resolved value as OmegaConf takes it: `${` in a text of it is no interpolation."""
    return map_texts(value, lambda text: re.sub(r"(\\*)\$\{", r"\1\1\\${", text))


def convert(value: Any, key: Key, *, is_reference: bool) -> Any:
    """Return a resolved value as OmegaConf's node of the key takes it; raises `ValueError`."""
    hint, is_optional = strip_optional(key.hint)
    if value == "None" and (is_optional or hint is Any):
        return None
    if value is False and "off" in (key.choices or ()):
        return "off"  # in YAML `off` is false
    if hint is str and isinstance(value, bool | float) and not is_reference:
        raise ValueError(f"{value} is not text; quotes make it text")
    if typing.get_origin(hint) is list and value is not None:
        is_text = isinstance(value, str) and (is_reference or value[:1] in ("", "[", "{"))
        if isinstance(value, dict) or is_text:
            remedy = "; ${oc.decode:...} reads a list from text" if is_reference else ""
            raise ValueError(f"{show(value)} is not {wanted(hint)}{remedy}")
        (element,) = typing.get_args(hint)
        items = value if isinstance(value, list) else [value]
        return [number(item, element) if element in (int, float) else item for item in items]
    return number(value, hint) if hint in (int, float) and value is not None else value


def with_arithmetic(value: Any, hint: Any) -> Any:
    """A number with an interpolation as a call of the resolver for arithmetic: other keys see its value."""
    hint = strip_optional(hint)[0]
    is_number = hint in (int, float) and isinstance(value, str) and "${" in value
    if is_number and not re.search(r"['\\]", value):
        return f"${{linnaeus.number:'{value}',{hint.__name__}}}"
    return value


def number(value: Any, kind: type) -> int | float:
    """A finite number of a kind, `int` or `float`, from a number, its text or arithmetic."""
    found = _evaluate(value) if isinstance(value, str) else value
    is_number = type(found) in (int, float) and math.isfinite(found)
    if is_number and (kind is float or found % 1 == 0):
        return kind(found)  # type: ignore[no-any-return]
    is_arithmetic = found is None and re.search(r"[-+*/%^()]|\$\{", str(value))
    hint = ": arithmetic takes only + - * / //, numbers and parentheses" if is_arithmetic else ""
    raise ValueError(f"{show(value)} is not {WANTED[kind]}{hint}")


def _evaluate(text: str) -> Any:
    """The value of a number or of arithmetic; None for all else."""
    text = re.sub(r"^([-+]?)0+(?=\d+$)", r"\1", text.strip())  # 007, which Python's syntax lacks
    is_arithmetic = re.fullmatch(r"[\d_.eE+\-*/() \t]{1,200}", text)
    if not is_arithmetic or re.search(r"\*\*|[\w.)]\s*\(", text):  # no powers, no calls
        return None
    try:
        return eval(text, {"__builtins__": {}})  # numbers and operators only
    except (SyntaxError, ArithmeticError, NameError, TypeError, AttributeError):
        return None


def _resolve_number(text: str, kind: str) -> int | float | None:
    """Arithmetic without interpolations; None where a term is null."""
    is_null = re.search(r"\b(None|null)\b", text)
    return None if is_null else number(text, {"int": int, "float": float}[kind])


def _resolve_now(form: str = "%Y-%m-%d_%H-%M-%S") -> str:
    return moment().strftime(form)


def register() -> None:
    """Register Linnaeus' resolvers with OmegaConf, from which a program around may have cleared them."""
    OmegaConf.register_new_resolver("linnaeus.number", _resolve_number, replace=True)
    OmegaConf.register_new_resolver("linnaeus.now", _resolve_now, replace=True)


def fill_nulls(root: DictConfig, cfg: str | None) -> set[tuple[str, ...]]:
    """Fill the keys whose null follows the dataset: some of augmentation, and the name of the run.

    Args:
        root: the unresolved configuration.
        cfg: the last file of `--cfg` or `--config-name`, which names a run without a name.

    Returns:
        The keys filled.
    """

    def of_dataset(name: str) -> Any:
        """Return the value of a key; None if there is none or it cannot be resolved."""
        key = f"DATA.DATASET.{name}"
        return OmegaConf.select(root, key, throw_on_resolution_failure=False)

    raw: Any = OmegaConf.to_container(root)
    is_named = raw["EXPERIMENT"]["NAME"] is not None
    if not is_named:  # a key in the run's name cannot refer to the name
        root.EXPERIMENT.NAME = MISSING
    target = of_dataset(TARGET)
    is_files = not target and of_dataset("NAME") in IMAGE_FILES
    filled: set[tuple[str, ...]] = set()
    for name, values in _OF_DATA.items():
        if raw["DATA"]["AUGMENT"][name] is None:
            root.DATA.AUGMENT[name] = values[not is_files]
            filled.add(("DATA", "AUGMENT", name))
    if is_named:
        return filled
    folder = of_dataset("ROOT")
    names = [
        Path(cfg).stem if cfg else "",
        _name_of(of_dataset("TRAIN")) if is_files else "",
        Path(str(folder)).resolve().name if is_files and folder else "",
        str(target or of_dataset("NAME")).rpartition(".")[2],
        "run",
    ]
    check = KEYS["EXPERIMENT", "NAME"].check
    root.EXPERIMENT.NAME = escape(
        next(name for name in names if name and check and not check(name))
    )
    return filled | {("EXPERIMENT", "NAME")}


def _name_of(manifest: Any) -> str:
    """The name of a run for a manifest such as `birds.csv`; empty for the default name and for a folder."""
    path = Path(str(manifest or ""))
    return path.stem if path.suffix and path.stem != "train" else ""


@functools.cache
def moment() -> datetime:
    """The moment of this process, the same in all ranks of one machine: the one at which torchrun started.

    Raises:
        ValueError: the ranks are started by several programs, which know of no common moment.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return datetime.now()
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("GROUP_WORLD_SIZE") == "1":
        import psutil

        return datetime.fromtimestamp(psutil.Process(os.getppid()).create_time())
    raise ValueError(
        "these ranks were not all started by one torchrun, so each would take another moment; let the "
        "shell put it in: EXPERIMENT.NAME=run-$(date +%F)"
    )
