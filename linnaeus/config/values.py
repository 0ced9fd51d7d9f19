"""What a user typed, in the form that OmegaConf's typed nodes take: numbers, arithmetic, lists, null.

Every function raises `ValueError` with the predicate of a sentence whose subject is the key.

OmegaConf keeps the resolvers of `${...}` for the whole process. Ours have names of their own, so that those
of a program around Linnaeus that uses Hydra stay as they are.
"""

from __future__ import annotations

import ast
import functools
import math
import operator
import os
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import GrammarParseError

from linnaeus.config.keys import strip_optional

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
_BOOLS = ("true", "false", "yes", "no", "on", "off", "y", "n", "1", "0")
_OPERATORS: Mapping[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


@dataclass(frozen=True)
class Bare:
    """A scalar typed without quotes.

    Attributes:
        text: the text as typed.
        meaning: gives the value of the text where the key has no type.
    """

    text: str
    meaning: Callable[[], Any]


@dataclass(frozen=True)
class Setting:
    """The value that a source gives to a key.

    Attributes:
        value: as typed; of a mapping there is one setting for each key.
        origin: where it was typed, for messages; `default` for the schema's default.
        preset: the group and name of the preset of the package that sets it, such as `model=resnet50`.
    """

    value: Any
    origin: str
    preset: str | None = None

    @property
    def text(self) -> Any:
        """The value, of an unquoted scalar its text."""
        return self.value.text if isinstance(self.value, Bare) else self.value


def tree_of(value: Any, origin: str) -> Any:
    """A mapping as a tree of settings, nested ones included; an empty mapping is a value."""
    if isinstance(value, Mapping) and value:
        return {name: tree_of(item, origin) for name, item in value.items()}
    return Setting(value, origin)


def from_command_line(text: str) -> Bare | str:
    """A value of the command line; where the whole text is quoted, the text without its quotes."""
    quoted = re.fullmatch(r"""(['"])((?:(?!\1)[^\\]|\\.)*)\1""", text, re.DOTALL)
    if quoted:
        return quoted[2].replace("\\" + quoted[1], quoted[1])
    return Bare(text, lambda: _hydra_value(text))


def _hydra_value(text: str) -> Any:
    """Parse a value by Hydra's grammar; text, sweeps and what the grammar rejects stay as typed."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        override = OverridesParser.create().parse_override(f"value={text}")
        value = text if override.is_sweep_override() else override.value()
    except (HydraException, RecursionError):
        return text
    return text if isinstance(value, str) else value


def show(value: Any) -> str:
    """A value for an error message, at most 80 characters long; text is quoted."""
    shown = repr(value.text if isinstance(value, Bare) else untyped(value, check=False))
    return shown if len(shown) <= 80 else f"{shown[:70]}...{shown[-7:]}"


def escape(value: Any) -> Any:
    """A resolved value as OmegaConf takes it: `${` in a text of it is no interpolation."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    if isinstance(value, dict):
        return {key: escape(item) for key, item in value.items()}
    return [escape(item) for item in value] if isinstance(value, list | tuple) else value


def untyped(value: Any, *, check: bool = True) -> Any:
    """The value where the key has no type; with `check`, malformed interpolations are errors."""
    if isinstance(value, Setting):
        value = value.value
    if isinstance(value, Bare):
        value = None if value.text in ("None", "null") else value.meaning()
    if isinstance(value, dict):
        return {key: untyped(item, check=check) for key, item in value.items()}
    if isinstance(value, list):
        return [untyped(item, check=check) for item in value]
    return (
        _interpolation(value, None) if check and isinstance(value, str) and "${" in value else value
    )


def convert(value: Any, hint: Any) -> Any:
    """What OmegaConf's typed node takes for a value; text with an interpolation stays text.

    Args:
        value: a `Bare` scalar, or a Python value; text was then quoted.
        hint: the key's type hint. A number with an interpolation becomes a call of the arithmetic resolver.
    """
    hint, is_optional = strip_optional(hint)
    if hint is Any or typing.get_origin(hint) is dict:
        return untyped(value)
    if isinstance(value, Bare):
        value = None if is_optional and value.text in ("null", "None", "none") else value.text
    if value is None or value == MISSING:
        return value
    if typing.get_origin(hint) is list:
        return _list(value, typing.get_args(hint)[0])
    if isinstance(value, str) and "${" in value:
        return _interpolation(value, hint)
    if hint is bool and not isinstance(value, bool) and str(value).lower() not in _BOOLS:
        raise ValueError(f"{show(value)} is not {WANTED[bool]}")
    return number(value, hint) if hint in (int, float) else value


def _list(value: Any, element: Any) -> Any:
    if isinstance(value, str):
        text = value.strip()
        if re.fullmatch(r"\$\{[^{}]*\}", text):
            return _interpolation(text, list)
        value = _hydra_value(text if text.startswith("[") else f"[{text}]")
        if isinstance(value, str):
            raise ValueError(f"{show(text)} is not {WANTED[list]}")
    return [convert(item, element) for item in (value if isinstance(value, list) else [value])]


def _interpolation(given: str, hint: Any) -> str:
    """Check the syntax. A number becomes a call of the resolver, so that other keys see its value."""
    text = re.sub(r"(?<!\\)((?:\\\\)*\$\{)\s*(now|hydra)\s*:", r"\1linnaeus.\2:", given)
    wrapped = f"${{linnaeus.number:'{text}',{hint.__name__}}}" if hint in (int, float) else text
    try:
        OmegaConf.create({"value": wrapped})  # parses it
    except GrammarParseError:
        raise ValueError(
            rf"{show(given)} is not a valid interpolation; text with ${{ is written \${{"
        ) from None
    return wrapped


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


def evaluate(text: str) -> int | float:
    """The value of a number or of arithmetic; raises `ValueError` or `SyntaxError` for all else."""
    if re.fullmatch(r"\s*[-+]?[0-9]+\s*", text):  # 007 too, which Python's syntax lacks
        return int(text)
    # The length bounds the depth of the tree, so that no text can exhaust the stack.
    if len(text) > 200 or not re.fullmatch(r"[0-9a-fA-FxX_.+\-*/() \t]+", text):
        raise ValueError(text)
    return typing.cast("int | float", _evaluate(ast.parse(text.strip(), mode="eval").body))


def _evaluate(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_evaluate(node.operand))
    raise ValueError("not arithmetic")


def register(chosen: Mapping[str, str]) -> None:
    """Register arithmetic, `${now:...}` and `${hydra:...}` with OmegaConf; `chosen` has a name by group."""

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

    for name, resolver in (("number", resolve_number), ("now", now), ("hydra", hydra)):
        OmegaConf.register_new_resolver(f"linnaeus.{name}", resolver, replace=True)


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
