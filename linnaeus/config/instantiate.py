"""Instantiates `_target_` nodes, the user's own model, dataset, loss or optimizer, with Hydra.

Hydra finds the class and builds the arguments. The call is ours: it adds the framework's arguments, and its
error names the node and the user's line.
"""

from __future__ import annotations

import functools
import inspect
import sys
import sysconfig
import textwrap
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from linnaeus.config.keys import TARGET, dotted, suggest
from linnaeus.config.keys import Path as Key
from linnaeus.config.values import escape
from linnaeus.runtime.errors import ConfigError, TrustError

_NOT_THE_USERS = (
    "<frozen ",
    f"{Path(__file__).resolve().parents[1]}/",
    *{f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")},
)

_NEVER = {"linnaeus", "hydra", "omegaconf", *sys.stdlib_module_names}
"""Packages that hold no model, loss or dataset of a user, so no file may name them as one."""
_MODULES = (("MODEL", TARGET), ("LOSS", TARGET))
"""Keys that name an `nn.Module`."""
_USERS = (*_MODULES, ("DATA", "DATASET", TARGET))
"""Keys that name the user's own class or function."""


def is_target(node: Any) -> bool:
    """Return whether a node names the user's own class or function."""
    return isinstance(node, Mapping) and "_target_" in node


def targets(node: Any, key: Key) -> Iterator[tuple[Key, Any]]:
    """Each `_target_` in a node at any depth, with its key."""
    if isinstance(node, Mapping):
        if TARGET in node:
            yield (*key, TARGET), node[TARGET]
        children: Iterable[tuple[Any, Any]] = node.items()
    else:
        children = enumerate(node) if isinstance(node, list | tuple) else ()
    for name, child in children:
        yield from targets(child, (*key, name))


def check_targets(found: Mapping[Key, Any], file: Path, *, trust_code: bool) -> None:
    """Refuse `_target_`s that a file of a run may not call. Without consent nothing is imported.

    Args:
        found: the names that come from the file, by the key of their `_target_`.
        file: the file, for the message.
        trust_code: whether the user has consented to run the code that the file names.

    Raises:
        TrustError: names each `_target_` that is refused.
        ConfigError: one that may be called cannot be found.
    """
    named = {key: f"{dotted(key)} {name!r:.200}" for key, name in found.items()}
    if named and not trust_code:
        raise TrustError(
            f"{file} would run code: {', '.join(named.values())}. If you trust the file, add --trust-code "
            "(in Python: load_run(..., trust_code=True))"
        )
    wrong = [(key, _not_callable_from_files(key, found[key])) for key in _USERS if key in found]
    if problems := [f"{file} names {named[key]}, {reason}" for key, reason in wrong if reason]:
        raise TrustError(problems)


def _not_callable_from_files(key: Key, name: Any) -> str | None:
    """Return why a file may not call this even with consent; None where it may."""
    wrong = (
        "which belongs to Python, Hydra or Linnaeus, and no file may call; train with a class or function "
        "of your own around it"
    )
    if str(name).partition(".")[0] in _NEVER:
        return wrong
    found = prepare({TARGET: name}, dotted(key[:-1])).func
    module = getattr(found, "__module__", None) or name
    if module.partition(".")[0] in _NEVER:  # imported there from elsewhere
        return wrong
    if key in _MODULES and inspect.isclass(found):
        bases = {f"{base.__module__}.{base.__name__}" for base in found.__mro__}
        if "torch.nn.modules.module.Module" not in bases:  # by name: this module loads no torch
            return "a class, but not an nn.Module"
    return None


def prepare(node: Mapping[str, Any], where: str) -> functools.partial[Any]:
    """Callable of a node, with the node's arguments.

    Lists and mappings in the node become plain ones, and nodes with a `_target_` in them are instantiated.

    Args:
        node: `_target_`, keyword arguments, and Hydra's `_args_`, `_recursive_` and `_convert_`, by default
            `all`. A `_partial_` of this node has no effect.
        where: the node's key, for messages.

    Raises:
        ConfigError: the node or one in it names nothing that can be called, or one in it fails.
    """
    from hydra.errors import InstantiationException  # here, because Hydra takes long to import
    from hydra.utils import instantiate

    # Hydra resolves resolved values once more.
    content = escape(escape({"_convert_": "all", **node, "_partial_": True}))
    try:
        return instantiate({where: content})[where]  # type: ignore[no-any-return]
    except (InstantiationException, TypeError) as error:
        text, _, key = str(error).partition("\nfull_key: ")
        if "HYDRA_FULL_ERROR" in text:  # Hydra leaves the reason to the traceback
            root = error.__cause__ and (error.__cause__.__cause__ or error.__cause__)
            key, text = f"{key}._target_", f"{text.partition(',')[0]}: {_near(text) or root}"
        text = textwrap.shorten(text, 300, placeholder=" ...")
        raise ConfigError(f"{key or where}: {text}{place_of(error)}") from error


def _near(text: str) -> str | None:
    """The name that a misspelled one in Hydra's error most likely means; None where its module is missing."""
    module, _, name = text.split("'")[1].rpartition(".")
    if module not in sys.modules:  # Hydra imports it
        return None
    hint = suggest(name, dir(sys.modules[module]), f"{module}.", cutoff=0.6)
    return f"{module} has no {name}{hint}"


def call_target(
    node: Mapping[str, Any],
    where: str,
    *positional: Any,
    offer: Mapping[str, Any] | None = None,
    convert: Callable[[inspect.Parameter, Any], Any] | None = None,
) -> Any:
    """Instantiate a node, offering it values that the framework knows.

    Args:
        node: see `prepare`.
        where: the node's key, for messages.
        positional: arguments that come before the node's own.
        offer: keyword arguments, each passed where the signature names it and the node does not set it.
        convert: gives a value that the node sets the form that its parameter takes.

    Raises:
        ConfigError: when the call fails; the cause is named, and where in the user's code it was raised.
    """
    call = prepare(node, where)
    known = _parameters(call.func)
    offered = {name: value for name, value in (offer or {}).items() if name in known}
    try:
        named = {
            name: convert(known[name], value) if convert and name in known else value
            for name, value in call.keywords.items()
        }
        return call.func(*positional, *call.args, **{**offered, **named})
    except Exception as error:
        text = f"{where}: {node['_target_']} failed with {type(error).__name__}: {error}"
        hint = _hint(call.keywords, where, known) if isinstance(error, TypeError) else ""
        raise ConfigError(text + hint + place_of(error)) from error


def check_arguments(call: functools.partial[Any], where: str, more: Mapping[str, Any]) -> None:
    """Refuse a call that lacks an argument, or has one that the callable does not take.

    Args:
        call: result of `prepare`.
        where: the node's key, for messages.
        more: further keyword arguments of the call.

    Raises:
        ConfigError: the arguments do not fit.
    """
    try:
        signature = inspect.signature(call.func)
    except ValueError:  # some callables in C have none
        return
    try:
        signature.bind(*call.args, **call.keywords, **more)
    except TypeError as error:
        free = {name: each for name, each in signature.parameters.items() if name not in more}
        hint = _hint(call.keywords, where, free)
        raise ConfigError(f"{where}: {call.func.__name__}: {error}{hint}") from error


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # some callables in C have no signature
        return {}


def _hint(given: Mapping[str, Any], where: str, known: Mapping[str, inspect.Parameter]) -> str:
    """Suggest the closest argument, or how to leave out keys of the built-in node."""
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        return ""
    unknown = [name for name in given if name not in known]
    for name in unknown:
        if hint := suggest(name.lower(), known.keys(), f"{where}.", cutoff=0.6):
            return hint
    left_out = " ".join(f"~{where}.{name}" for name in unknown if name.isupper())
    if not left_out:
        return ""
    return f"; {left_out} removes the arguments that it does not take"


def place_of(error: BaseException | None) -> str:
    """Return the last line that led to an error in a file that is neither Linnaeus' nor installed.

    It reads ` (my_model.py, line 12, in forward)`; empty if there is none.
    """
    while error is not None and not isinstance(error, SyntaxError):  # whose text says its line
        frames = traceback.extract_tb(error.__traceback__)
        for frame in reversed(frames):
            if not frame.filename.startswith(_NOT_THE_USERS):
                file, here = Path(frame.filename), Path.cwd()
                shown = file.relative_to(here) if file.is_relative_to(here) else file
                return f" ({shown}, line {frame.lineno}, in {frame.name})"
        error = error.__cause__
    return ""
