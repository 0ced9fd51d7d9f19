"""Values as users type them, and the form that OmegaConf's typed nodes take.

Hydra reads the values of the command line, OmegaConf the values of files. Keys of the schema take a little
more: arithmetic in numbers, a list without brackets, `None` for null, and text as typed.

OmegaConf keeps the resolvers of `${...}` for the whole process. Linnaeus registers its resolvers under names
of its own, so that the resolvers of a program around it stay as they are.
"""

from __future__ import annotations

import ast
import functools
import math
import os
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import GrammarParseError

from linnaeus.config.keys import TARGET, strip_optional

COMMAND_LINE = "command line"
MISSING = "???"
"""OmegaConf's mark for a value that another source must give."""
WANTED: Mapping[Any, str] = {
    bool: "true or false",
    str: "text",
    int: "a whole number",
    float: "a number",
    list: "a list such as [a, b]",
    dict: "a mapping such as {name: value}",
}
"""What a key of each type takes."""
SEVERAL = "has several values; quotes make them one text"
UNREADABLE = "cannot be read by Hydra's grammar; quotes make it text"
IMAGE_FILES = ("imagefolder", "manifest")
"""Kinds of datasets that are photographs more often than not."""
NULLS: Mapping[tuple[str, ...], Any] = {
    ("EXPERIMENT", "NAME"): None,
    ("DATA", "AUGMENT", "CROP_SCALE"): ([0.35, 1.0], [0.8, 1.0]),
    ("DATA", "AUGMENT", "HFLIP"): (0.5, 0.0),
}
"""Keys whose null follows the dataset, each with its value for `IMAGE_FILES` and for other data."""
_ARITHMETIC = (
    ast.Expression,
    ast.Constant,
    ast.BinOp,
    ast.UnaryOp,
    ast.Add,
    ast.Sub,
    ast.Mult,
    ast.Div,
    ast.FloorDiv,
    ast.UAdd,
    ast.USub,
)


@dataclass(frozen=True)
class Setting:
    """The value that a source gives to a key.

    Attributes:
        value: the value by the grammar of its source; of a mapping there is one setting for each key.
        origin: where it was typed, for messages; `default` for the schema's default.
        text: a scalar as typed; None where there is no text, or where a file quotes it.
        problem: why the source's grammar gives no value (`SEVERAL`, `UNREADABLE`); else None.
    """

    value: Any
    origin: str
    text: str | None = None
    problem: str | None = None


def parse(text: str) -> Setting:
    """Read a value of the command line by Hydra's grammar."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException  # here, because Hydra takes long to import

    text = own_resolvers(text)
    try:
        override = OverridesParser.create().parse_override(f"value={text}")
        if not override.is_sweep_override():
            return Setting(override.value(), COMMAND_LINE, text.strip())
        problem: str | None = SEVERAL
    except (HydraException, RecursionError):
        is_text = not re.match(r"\s*([\[{'\"]|\w+\()", text)
        problem = None if is_text else UNREADABLE
    return Setting(text, COMMAND_LINE, text, problem)


def own_resolvers(text: str) -> str:
    """Replace `${now:` and `${hydra:` by the names under which Linnaeus registers them."""
    return re.sub(r"(?<!\\)((?:\\\\)*\$\{)\s*(now|hydra)\s*:", r"\1linnaeus.\2:", text)


def tree_of(value: Any, setting: Setting) -> Any:
    """A mapping as a tree of settings, nested ones included; an empty mapping is a value."""
    if isinstance(value, Mapping) and value:
        return {name: tree_of(item, setting) for name, item in value.items()}
    text = setting.text if value is setting.value else None
    return Setting(value, setting.origin, text, setting.problem)


def show(value: Any) -> str:
    """A value for an error message, at most 80 characters long; text is quoted."""
    if isinstance(value, Setting):
        value = value.value if value.text is None else value.text
    shown = repr(value).replace("${linnaeus.", "${")
    return shown if len(shown) <= 80 else f"{shown[:70]}...{shown[-7:]}"


def escape(value: Any) -> Any:
    """A resolved value as OmegaConf takes it: `${` in a text of it is no interpolation."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    if isinstance(value, dict):
        return {key: escape(item) for key, item in value.items()}
    return [escape(item) for item in value] if isinstance(value, list | tuple) else value


def convert(setting: Setting, hint: Any = dict) -> Any:
    """Return what OmegaConf's node with a type hint takes; a `dict` takes any value as it is.

    A number with an interpolation becomes a call of the arithmetic resolver: other keys see its value.

    Raises:
        ValueError: with the predicate of a sentence whose subject is the key.
    """
    hint, is_optional = strip_optional(hint)
    kind = typing.get_origin(hint) or hint
    if kind is list and setting.problem:
        setting = parse(f"[{setting.text}]")
    value, text = setting.value, setting.text
    if setting.problem and not (kind in (int, float) and setting.problem == UNREADABLE):
        raise ValueError(f"{show(text)} {setting.problem}")
    if text == "None" and (is_optional or hint is Any):
        value = None
    if value in (None, MISSING):
        return value
    is_reference = isinstance(value, str) and "${" in value
    if kind is str and isinstance(value, bool | int | float) and "(" not in (text or "("):
        value = text
    elif kind in (int, float):
        value = (
            f"${{linnaeus.number:'{value}',{kind.__name__}}}"
            if is_reference
            else number(value, kind)
        )
    elif kind is list and not is_reference:
        is_read = setting.origin == COMMAND_LINE and text is not None
        if isinstance(value, str) and value and not is_read:  # of a file or the environment
            value = parse(value if value.startswith("[") else f"[{value}]").value
        if value == "" or isinstance(value, dict):
            raise ValueError(f"{show(setting)} is not {WANTED[list]}")
        (element,) = typing.get_args(hint)
        items = value if isinstance(value, list) else [value]
        value = [convert(Setting(item, setting.origin), element) for item in items]
    try:
        OmegaConf.create({"value": value})  # parses it
    except GrammarParseError:
        raise ValueError(
            rf"{show(setting)} is not a valid interpolation; text with ${{ is written \${{"
        ) from None
    return value


def number(value: Any, kind: type) -> int | float:
    """A finite number of a kind, `int` or `float`, from a number, its text or arithmetic."""
    hint = ""
    try:
        found = evaluate(value) if isinstance(value, str) else value
        if (
            type(found) in (int, float)
            and math.isfinite(found)
            and (kind is float or found % 1 == 0)
        ):
            return kind(found)  # type: ignore[no-any-return]
    except ZeroDivisionError:
        raise ValueError(f"{show(value)} divides by zero") from None
    except (ValueError, SyntaxError, OverflowError):
        if re.search(r"[-+*/%^()]|\$\{", str(value)):
            hint = ": arithmetic takes only + - * / //, numbers and parentheses"
    raise ValueError(f"{show(value)} is not {WANTED[kind]}{hint}")


def evaluate(text: str) -> Any:
    """The value of a number or of arithmetic; raises `ValueError` or `SyntaxError` for all else."""
    if re.fullmatch(r"\s*[-+]?[0-9]+\s*", text):  # 007 too, which Python's syntax lacks
        return int(text)
    # The length bounds the depth of the tree, so that no text can exhaust the stack.
    if len(text) > 200 or not re.fullmatch(r"[0-9a-fA-FxX_.+\-*/() \t]+", text):
        raise ValueError(text)
    tree = ast.parse(text.strip(), mode="eval")
    if not all(isinstance(node, _ARITHMETIC) for node in ast.walk(tree)):
        raise ValueError("not arithmetic")
    return eval(compile(tree, "arithmetic", "eval"))  # numbers and operators only


def register(chosen: Mapping[str, str], cfg: str | None) -> None:
    """Register Linnaeus' resolvers with OmegaConf.

    Args:
        chosen: the name chosen in each group.
        cfg: the last file of `--cfg` or `--config-name`, which names a run without a name.
    """

    def resolve_number(text: str, kind: str) -> int | float | None:
        """Arithmetic without interpolations; None where a term is null."""
        is_null = re.search(r"\b(None|null)\b", text)
        return None if is_null else number(text, {"int": int, "float": float}[kind])

    def now(form: str = "") -> str:
        return moment().strftime(form or "%Y-%m-%d_%H-%M-%S")

    def hydra(name: str, *, _root_: DictConfig) -> str:
        experiment = _root_.EXPERIMENT
        if name == "job.name":
            return str(experiment.NAME)
        if name in ("run.dir", "runtime.output_dir"):
            return f"{experiment.OUTPUT_DIR}/{experiment.NAME}"
        known = {f"runtime.choices.{group}": choice for group, choice in chosen.items()}
        known["runtime.cwd"] = str(Path.cwd())
        if name not in known:
            there = "runtime.choices.GROUP, runtime.cwd, job.name, run.dir"
            raise ValueError(f"there is no hydra:{name} here; there are {there}")
        return known[name]

    def null(*path: str, _root_: DictConfig) -> Any:
        dataset = functools.partial(_of_dataset, _root_)
        target = dataset(TARGET)
        is_files = not target and dataset("NAME") in IMAGE_FILES
        if values := NULLS[path]:
            return values[not is_files]
        names = [Path(cfg).stem] if cfg else []
        names += [_folder(dataset("ROOT"), dataset("TRAIN"))] if is_files else []
        names += [str(target or dataset("NAME")).rpartition(".")[2], "run"]
        return next(filter(None, map(_folder_name, names)))

    for resolver in (now, hydra, null):
        OmegaConf.register_new_resolver(f"linnaeus.{resolver.__name__}", resolver, replace=True)
    OmegaConf.register_new_resolver("linnaeus.number", resolve_number, replace=True)


def _of_dataset(root: DictConfig, name: str) -> Any:
    """The value of a key of DATA.DATASET; None where there is none, or where it cannot be resolved."""
    return OmegaConf.select(root, f"DATA.DATASET.{name}", throw_on_resolution_failure=False)


def _folder(root: Any, train: Any) -> str:
    """The name of the folder of the images, of several the first; empty where no key says it."""
    if OmegaConf.is_list(root):
        root = root[0] if root else None
    if root is None and train is not None:
        root = Path(str(train)).parent
    if root is None:
        return ""
    path = Path(str(root))
    return path.name if path.name not in ("", "..") else path.resolve().name


def _folder_name(text: str) -> str:
    """A text as the name of a folder inside another; empty where it cannot be one."""
    name = "".join(letter if letter.isprintable() else "_" for letter in text).strip(" .")
    return "" if name == "null" else name


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
        "these processes were not all started by one torchrun, so each would take another moment; let the "
        "shell put it in: EXPERIMENT.NAME=run-$(date +%F)"
    )
