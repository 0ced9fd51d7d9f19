"""Instantiates `_target_` nodes: the user's own model, dataset, loss or optimizer.

The keys of a node are those of Hydra: `_target_`, `_args_`, `_partial_`, `_recursive_` and `_convert_`. Hydra
itself is not called: it would import more than what a node names, and hide the line that raised an error.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from linnaeus.errors import ConfigError

Convert = Callable[[inspect.Parameter, Any], Any]
"""Gives the value that a node sets for a parameter the form that the parameter takes."""

_CONVERSIONS = ("none", "partial", "object", "all")
_SPECIAL = ("_target_", "_args_", "_partial_", "_recursive_", "_convert_")
_OWN_FOLDER = str(Path(__file__).resolve().parents[1])
_LIBRARIES = tuple(
    {sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)


class NodeError(ConfigError):
    """A node that names nothing, or whose special keys have other values than they may have."""


def is_target(node: Any) -> bool:
    """Whether a node names the user's own class or function."""
    return isinstance(node, Mapping) and "_target_" in node


def locate(path: str) -> Any:
    """The object that a dotted path names. Only the modules in the path are imported.

    Raises:
        Exception: whatever importing a module raises; `AttributeError` where a name is missing.
    """
    first, *names = path.split(".")
    found: Any = importlib.import_module(first)
    name_so_far = first
    for name in names:
        name_so_far = f"{name_so_far}.{name}"
        if isinstance(found, ModuleType) and not hasattr(found, name):
            try:
                importlib.import_module(name_so_far)
            except ModuleNotFoundError as error:
                # Where another module is missing, this one exists but cannot be imported.
                if error.name != name_so_far:
                    raise
        found = getattr(found, name)
    return found


def find_target(node: Mapping[str, Any], where: str) -> Callable[..., Any]:
    """The class or function that the node names.

    Args:
        node: with `_target_`, a dotted import path.
        where: the node's key, for the message.

    Raises:
        NodeError: when there is no such module or attribute.
    """
    path = node["_target_"]
    try:
        found = locate(path)
    except Exception as error:
        text = f"{where}._target_: {path!r} cannot be imported: {error}"
        raise NodeError(text + place_of(error)) from error
    if not callable(found):
        raise NodeError(f"{where}._target_: {path!r} is neither a class nor a function")
    return found  # type: ignore[no-any-return]


def instantiate(
    node: Mapping[str, Any],
    *positional: Any,
    where: str = "",
    convert: Convert | None = None,
    offer: Mapping[str, Any] | None = None,
) -> Any:
    """Call what the node names with the node's other keys; nested `_target_` nodes are instantiated first.

    Lists and mappings in the node arrive as plain ones, in copies.

    Args:
        node: `_target_`, keyword arguments, and Hydra's special keys: `_args_` (positional arguments),
            `_partial_: true` (a `functools.partial` instead of a call), `_recursive_: false` (nested nodes
            arrive as they are); `_convert_` is accepted and changes nothing.
        positional: arguments that come before the node's own, passed as they are.
        where: the node's key, for messages.
        convert: applied to each value that a node, nested ones included, sets for a named parameter.
        offer: keyword arguments, passed as they are.

    Raises:
        NodeError: the node or a nested one names nothing, or a special key has another value than these.
        Exception: whatever a call raises.
    """
    _check_special_keys(node, where)
    function = find_target(node, where)
    build = functools.partial(_build, recursive=node.get("_recursive_", True), convert=convert)
    arguments = {n: build(value, f"{where}.{n}") for n, value in node.items() if n not in _SPECIAL}
    rest = build(node.get("_args_") or [], f"{where}._args_")
    if convert is not None:
        known = _parameters(function)
        arguments = {
            name: convert(known[name], value) if name in known else value for name, value in arguments.items()
        }
    arguments |= offer or {}
    if node.get("_partial_", False):
        return functools.partial(function, *positional, *rest, **arguments)
    return function(*positional, *rest, **arguments)


def _build(value: Any, where: str, *, recursive: bool, convert: Convert | None) -> Any:
    """A copy of a value, with the nodes in it instantiated."""
    build = functools.partial(_build, recursive=recursive, convert=convert)
    if recursive and is_target(value):
        return instantiate(value, where=where, convert=convert)
    if isinstance(value, Mapping):
        return {name: build(item, f"{where}.{name}") for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [build(item, f"{where}.{index}") for index, item in enumerate(value)]
    return value


def _check_special_keys(node: Mapping[str, Any], where: str) -> None:
    problems = [
        f"{where}.{name}: {node[name]!r} is not true or false"
        for name in ("_partial_", "_recursive_")
        if not isinstance(node.get(name, False), bool)
    ]
    if not isinstance(node["_target_"], str):
        problems.append(f"{where}._target_: {node['_target_']!r} is not a dotted name")
    if not isinstance(node.get("_args_", []), list | tuple | None):
        problems.append(f"{where}._args_: {node['_args_']!r} is not a list")
    if str(node.get("_convert_", "all")).lower() not in _CONVERSIONS:
        problems.append(f"{where}._convert_: {node['_convert_']!r} is not one of {', '.join(_CONVERSIONS)}")
    if problems:
        raise NodeError(problems)


def call_target(
    node: Mapping[str, Any],
    where: str,
    *positional: Any,
    offer: Mapping[str, Any] | None = None,
    convert: Convert | None = None,
) -> Any:
    """Instantiate a node, offering it values that the framework knows.

    Args:
        node: with `_target_` and keyword arguments; its own `_partial_` has no effect here.
        where: the node's key, for messages.
        positional: arguments that come before the node's own.
        offer: keyword arguments, each passed where the signature names it and the node does not set it.
        convert: see `instantiate`.

    Raises:
        ConfigError: when the call fails; the cause is named, and where in the user's code it was raised.
    """
    _check_special_keys(node, where)
    known = _parameters(find_target(node, where))
    offered = {name: value for name, value in (offer or {}).items() if name in known and name not in node}
    node = {**node, "_partial_": False}
    try:
        return instantiate(node, *positional, where=where, convert=convert, offer=offered)
    except NodeError as error:  # of a nested node: this one has been checked
        reason = "; ".join(error.problems)
        raise ConfigError(f"{where}: {node['_target_']} failed with an argument: {reason}") from error
    except Exception as error:
        text = f"{where}: {node['_target_']} failed with {type(error).__name__}: {error}"
        hint = ""
        if isinstance(error, TypeError) and not _takes_any(known):
            hint = _closest_argument(node, where, known) or _not_taken(node, where, known)
        raise ConfigError(text + hint + place_of(error)) from error


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # some callables in C have no signature
        return {}


def _takes_any(known: Mapping[str, inspect.Parameter]) -> bool:
    """Whether a class takes keyword arguments of any name."""
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())


def _not_taken(node: Mapping[str, Any], where: str, known: Mapping[str, inspect.Parameter]) -> str:
    """How to leave out keys of the framework's own classes, such as the NAME of a built-in model."""
    names = [f"~{where}.{name}" for name in node if name not in known and name.isupper()]
    if not names:
        return ""
    return f"; {' '.join(names)} leaves out what it does not take; --print-config --origin says what sets it"


def _closest_argument(node: Mapping[str, Any], where: str, known: Mapping[str, inspect.Parameter]) -> str:
    """What a misspelled argument most likely means; empty where all are known, or nothing is like it."""
    names = {name.lower(): name for name in known if name != "self"}
    for given in node:
        if given not in known and given not in _SPECIAL:
            for match in get_close_matches(given.lower(), list(names), n=1, cutoff=0.6):
                return f"; did you mean {where}.{names[match]}?"
    return ""


def frame_of(error: BaseException) -> traceback.FrameSummary | None:
    """The line of the user's own code that raised an error.

    That is the last line outside Linnaeus and outside what is installed; where all of it is installed, the
    last line outside Linnaeus and the standard library. None where no such line was reached: a call with a
    wrong argument does not get as far.
    """
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((_OWN_FOLDER + os.sep, "<frozen "))
        and not _is_standard(frame.filename)
    ]
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    return next(reversed(own or frames), None)


def _is_standard(filename: str) -> bool:
    """Whether a file belongs to the standard library; packages are installed in a folder within it."""
    in_packages = any(part in ("site-packages", "dist-packages") for part in Path(filename).parts)
    return filename.startswith(_LIBRARIES) and not in_packages


def place_of(error: BaseException) -> str:
    """Where the user's own code raised an error, such as ` (my_package.py, line 12, in __init__)`.

    Empty where it was not reached, and for a syntax error, whose text says its line.
    """
    frame = None if isinstance(error, SyntaxError) else frame_of(error)
    if frame is None:
        return ""
    return f" ({shown(frame.filename)}, line {frame.lineno}, in {frame.name})"


def shown(filename: str) -> str:
    """A file as its user knows it: relative to the current folder, or to where it was imported from."""
    path = Path(filename).resolve()
    for folder in [str(Path.cwd()), *filter(None, sys.path)]:
        if path.is_relative_to(Path(folder).resolve()):
            return str(path.relative_to(Path(folder).resolve()))
    return filename
