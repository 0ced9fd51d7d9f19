"""Instantiates `_target_` nodes: the user's own model, dataset, loss or optimizer."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import hydra.utils
from hydra.errors import HydraException

from linnaeus.errors import ConfigError


def is_target(node: Any) -> bool:
    """Whether a node names the user's own class or function."""
    return isinstance(node, Mapping) and "_target_" in node


def locate(path: str) -> Any:
    """The object that a dotted path names. Unlike Hydra's `get_object`, it logs nothing.

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
        ConfigError: when there is no such module or attribute.
    """
    path = node["_target_"]
    try:
        found = locate(path)
    except Exception as error:
        raise ConfigError(f"{where}._target_: {path!r} cannot be imported: {error}") from error
    if not callable(found):
        raise ConfigError(f"{where}._target_: {path!r} is neither a class nor a function")
    return found  # type: ignore[no-any-return]


def instantiate(node: Mapping[str, Any], *positional: Any, **arguments: Any) -> Any:
    """Call what the node names with the node's other keys; nested `_target_` nodes are instantiated too.

    Lists and mappings in the node arrive as plain ones. `positional` and `arguments` are passed as they are.

    Raises:
        Exception: whatever a call raises, without Hydra's wrapper.
    """
    try:
        # Given to Hydra, the arguments would become containers of its own, or be refused.
        call = hydra.utils.instantiate({"_convert_": "all", **node, "_partial_": True})
    except HydraException as error:
        cause = error.__cause__ or error
        raise cause from cause.__cause__
    return call(*positional, **arguments)


def call_target(
    node: Mapping[str, Any], where: str, *positional: Any, offer: Mapping[str, Any] | None = None
) -> Any:
    """Instantiate a node, offering it values that the framework knows.

    Args:
        node: with `_target_` and keyword arguments.
        where: the node's key, for messages.
        positional: arguments that come before the node's own.
        offer: keyword arguments, each passed where the signature names it and the node does not set it.

    Raises:
        ConfigError: when the call fails; the cause is named.
    """
    try:
        parameters = set(inspect.signature(find_target(node, where)).parameters)
    except (TypeError, ValueError):  # some callables in C have no signature
        parameters = set()
    offered = {name: value for name, value in (offer or {}).items() if name in parameters - set(node)}
    try:
        return instantiate(node, *positional, **offered)
    except Exception as error:
        raise ConfigError(
            f"{where}: {node['_target_']} failed with {type(error).__name__}: {error}"
        ) from error
