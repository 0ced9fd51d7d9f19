"""Converts what a user typed to the type of its key.

Every function raises `ValueError` with the predicate of a sentence whose subject is the key.
"""

from __future__ import annotations

import ast
import math
import operator
import re
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import GrammarParseError

from linnaeus.config.keys import strip_optional
from linnaeus.config.resolvers import NUMBER, renamed

MISSING = "???"
"""OmegaConf's mark for a value that another source must give."""

_TRUE, _FALSE = ("true", "yes", "on", "y", "1"), ("false", "no", "off", "n", "0")
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
    if isinstance(value, Bare):
        value = None if value.text in ("None", "null") else value.meaning()
    if isinstance(value, dict):
        return {key: untyped(item, check=check) for key, item in value.items()}
    if isinstance(value, list):
        return [untyped(item, check=check) for item in value]
    return _interpolation(value, None) if check and isinstance(value, str) and "${" in value else value


def convert(value: Any, hint: Any, *, resolved: bool = False) -> Any:
    """Give a value the type of its key.

    Args:
        value: a `Bare` scalar, or a Python value; text was then quoted, or comes from an interpolation.
        hint: the key's type hint.
        resolved: whether interpolations have been replaced. If not, text with an interpolation stays text,
            and for a number it becomes a call of the arithmetic resolver.

    Raises:
        ValueError: the value does not fit.
    """
    hint, optional = strip_optional(hint)
    if hint is Any:
        return untyped(value, check=not resolved)
    if isinstance(value, Bare) and optional and value.text in ("null", "None", "none"):
        return None
    if value is None:
        if optional:
            return None
        raise ValueError("must have a value, not null")
    given = value.text if isinstance(value, Bare) else value
    if given == MISSING:
        return given
    if typing.get_origin(hint) is list:
        return _list(given, typing.get_args(hint)[0], resolved)
    if isinstance(given, str) and "${" in given and not resolved:
        return _interpolation(given, hint)
    return _CONVERTERS[hint](given) if hint in _CONVERTERS else _mapping(value)


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


def _text(value: Any) -> str:
    if isinstance(value, (dict, list)):
        raise ValueError(f"{show(value)} is not text")
    return str(value)


def _bool(value: Any) -> bool:
    text = str(value).strip().lower()
    if text not in _TRUE + _FALSE:
        raise ValueError(f"{show(value)} is not true or false")
    return text in _TRUE


def _int(value: Any) -> int:
    number = _number(value, "a whole number")
    if number != int(number):
        is_arithmetic = isinstance(value, str) and not re.fullmatch(r"[\d.eE+-]+", value)
        result = f" = {number}" if is_arithmetic else ""
        raise ValueError(f"{show(value)}{result} is not a whole number")
    return int(number)


def _float(value: Any) -> float:
    return float(_number(value, "a number"))


def _number(value: Any, wanted: str) -> int | float:
    """A finite number, from a number, its text or arithmetic."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(f"{show(value)} is not {wanted}")
    try:
        number = _parse_number(value.strip()) if isinstance(value, str) else value
        finite = math.isfinite(float(number))
    except ZeroDivisionError:
        raise ValueError(f"{show(value)} divides by zero") from None
    except OverflowError:
        finite = False
    except (ValueError, SyntaxError):
        is_arithmetic = re.search(r"[-+*/%^()]|\$\{", str(value))
        hint = ": arithmetic takes only + - * / //, numbers and parentheses" if is_arithmetic else ""
        raise ValueError(f"{show(value)} is not {wanted}{hint}") from None
    if not finite:
        raise ValueError(f"{show(value)} is not a finite number")
    return number


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


def _list(value: Any, element: Any, resolved: bool) -> Any:
    if isinstance(value, str):
        items = split_list(value)
        if items == [value.strip()] and "${" in value and not resolved:
            return _interpolation(value, list)
        value = [from_command_line(item) for item in items]
    if isinstance(value, dict):
        raise ValueError(f"{show(value)} is not a list such as [a, b]")
    items = value if isinstance(value, list) else [value]
    return [convert(item, element, resolved=resolved) for item in items]


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


def _mapping(value: Any) -> dict[str, Any]:
    value = untyped(value)
    if not isinstance(value, dict):
        raise ValueError(f"{show(value)} is not a mapping such as {{name: value}}")
    return value


_CONVERTERS: dict[Any, Callable[[Any], Any]] = {str: _text, bool: _bool, int: _int, float: _float}


def resolve_number(text: str, kind: str) -> int | float | None:
    """The result of arithmetic without interpolations, as `int` or `float`; None where a term is null."""
    if re.search(r"\b(None|null)\b", text):  # what depends on a key without a value has none
        return None
    number: int | float = convert(text, {"int": int, "float": float}[kind], resolved=True)
    return number
