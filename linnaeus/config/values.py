"""What a user typed, in the form that OmegaConf's typed nodes take: numbers, arithmetic, lists, null.

Every function raises `ValueError` with the predicate of a sentence whose subject is the key.
"""

from __future__ import annotations

import ast
import math
import operator
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import GrammarParseError

from linnaeus.config.keys import strip_optional
from linnaeus.config.resolvers import NUMBER, renamed

MISSING = "???"
"""OmegaConf's mark for a value that another source must give."""
_BOOLS = ("true", "false", "yes", "no", "on", "off", "y", "n", "1", "0")
_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
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
    return _interpolation(value, None) if check and isinstance(value, str) and "${" in value else value


def convert(value: Any, hint: Any) -> Any:
    """What a typed node takes for a value; text with an interpolation stays text, checked for its syntax.

    Args:
        value: a `Bare` scalar, or a Python value; text was then quoted.
        hint: the key's type hint. A number with an interpolation becomes a call of the arithmetic resolver.
    """
    hint, optional = strip_optional(hint)
    if hint is Any:
        return untyped(value)
    if value is None or (isinstance(value, Bare) and optional and value.text in ("null", "None", "none")):
        if optional:
            return None
        raise ValueError("must have a value, not null")
    given = value.text if isinstance(value, Bare) else value
    if given == MISSING:
        return given
    if typing.get_origin(hint) is list:
        return _list(given, typing.get_args(hint)[0])
    if isinstance(given, str) and "${" in given:
        return _interpolation(given, hint)
    if hint in (int, float):
        return number(given, hint)
    if hint is bool and str(given).lower() not in _BOOLS:
        raise ValueError(f"{show(given)} is not {WANTED[bool]}")
    if isinstance(given, (list, dict)) and hint is str:
        raise ValueError(f"{show(given)} is not {WANTED[hint]}")
    return untyped(value) if typing.get_origin(hint) is dict else given


WANTED: Mapping[Any, str] = {
    bool: "true or false", str: "text", int: "a whole number", float: "a number",
    list: "a list such as [a, b]", dict: "a mapping such as {name: value}",
}  # fmt: skip
"""What a key of each type takes."""


def _interpolation(given: str, hint: Any) -> str:
    """Check the syntax. A number becomes a call of the resolver, so that other keys see its value."""
    text = renamed(given)
    wrapped = f"${{{NUMBER}:'{text}',{hint.__name__}}}" if hint in (int, float) else text
    try:
        OmegaConf.create({"value": wrapped})  # parses it
    except GrammarParseError:
        raise ValueError(
            rf"{show(given)} is not a valid interpolation; text with ${{ is written \${{"
        ) from None
    return wrapped


def number(value: Any, kind: type) -> int | float:
    """A finite number of a kind, `int` or `float`, from a number, its text or arithmetic."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(f"{show(value)} is not {WANTED[kind]}")
    try:
        found = _parse_number(value.strip()) if isinstance(value, str) else value
        finite = math.isfinite(float(found))
    except ZeroDivisionError:
        raise ValueError(f"{show(value)} divides by zero") from None
    except OverflowError:
        finite = False
    except (ValueError, SyntaxError):
        is_arithmetic = re.search(r"[-+*/%^()]|\$\{", str(value))
        hint = ": arithmetic takes only + - * / //, numbers and parentheses" if is_arithmetic else ""
        raise ValueError(f"{show(value)} is not {WANTED[kind]}{hint}") from None
    if not finite:
        raise ValueError(f"{show(value)} is not a finite number")
    if kind is int and found != int(found):
        result = "" if re.fullmatch(r"[\d.eE+-]+", str(value)) else f" = {found}"
        raise ValueError(f"{show(value)}{result} is not a whole number")
    return kind(found)  # type: ignore[no-any-return]


def resolve_number(text: str, kind: str) -> int | float | None:
    """The result of arithmetic without interpolations, as `int` or `float`; None where a term is null."""
    return None if re.search(r"\b(None|null)\b", text) else number(text, {"int": int, "float": float}[kind])


def _parse_number(text: str) -> int | float:
    for parse in (int, lambda text: int(text, 0), float):
        try:
            return parse(text)
        except ValueError:
            continue
    return evaluate(text)


def evaluate(text: str) -> int | float:
    """Evaluate arithmetic, without `eval`.

    >>> evaluate("2 * (3 + 4) // 4")
    3

    Raises:
        ValueError, SyntaxError: the text is something else.
        ZeroDivisionError: as in Python.
    """
    # The length bounds the depth of the tree, so that no text can exhaust the stack.
    if len(text) > 200 or not re.fullmatch(r"[0-9eE_.+\-*/() \t]+", text):
        raise ValueError(text)
    return _evaluate(ast.parse(text, mode="eval").body)


def _evaluate(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return typing.cast("int | float", node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        result = _OPERATORS[type(node.op)](_evaluate(node.left), _evaluate(node.right))
        return typing.cast("int | float", result)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return typing.cast("int | float", _OPERATORS[type(node.op)](_evaluate(node.operand)))
    raise ValueError("not arithmetic")


def _list(value: Any, element: Any) -> Any:
    if isinstance(value, str):
        items = split_list(value)
        if items == [value.strip()] and "${" in value:
            return _interpolation(value, list)
        value = [from_command_line(item) for item in items]
    if isinstance(value, dict):
        raise ValueError(f"{show(value)} is not {WANTED[list]}")
    return [convert(item, element) for item in (value if isinstance(value, list) else [value])]


def split_list(text: str) -> list[str]:
    """Split `[a, b]` or `a,b` at the commas outside quotes and brackets; each part is stripped.

    >>> split_list("[0.5, 1.0]"), split_list("a,'b,c',${f:1,2}"), split_list("[]")
    (['0.5', '1.0'], ['a', "'b,c'", '${f:1,2}'], [])
    """
    text = text.strip()
    if text.startswith("[") and text.endswith("]"):
        text = text[1:-1].strip()
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"" and not parts[-1].strip():
            quote = character
        elif character in "[{(":
            depth += 1
        elif character in "]})":
            depth = max(0, depth - 1)
        elif character == "," and depth == 0:
            parts.append("")
            continue
        parts[-1] += character
    return [part.strip() for part in parts] if text else []
