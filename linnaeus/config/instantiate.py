"""Objects of `_target_` nodes: the user's own model, dataset, loss or optimizer."""

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
    """The object that a dotted path names; unlike Hydra's function for it, this one logs nothing.

    Raises:
        Exception: whatever importing a module on the way raises; `AttributeError` where a name is missing.
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
                # Only when this very module is missing is there nothing of that name.
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


def call_target(
    node: Mapping[str, Any], where: str, *positional: Any, offer: Mapping[str, Any] | None = None
) -> Any:
    """Call what the node names with the node's other keys, lists and mappings among them as plain ones.

    Args:
        node: with `_target_` and keyword arguments; nested `_target_` nodes are instantiated too.
        where: the node's key, for messages.
        positional: arguments that come before the node's own.
        offer: values that the framework knows; passed where the signature names them and the node does not.

    Raises:
        ConfigError: when the call fails; the cause is named.
    """
    target = find_target(node, where)
    parameters = accepted_parameters(target)
    offered = {
        name: value for name, value in (offer or {}).items() if name in parameters and name not in node
    }
    try:
        # What is offered goes to the call itself: Hydra would make containers of its own of it, or refuse it.
        call = hydra.utils.instantiate({"_convert_": "all", **node, "_partial_": True})
        return call(*positional, **offered)
    except Exception as error:
        cause = (error.__cause__ or error) if isinstance(error, HydraException) else error
        raise ConfigError(
            f"{where}: {node['_target_']} failed with {type(cause).__name__}: {cause}"
        ) from error


def accepted_parameters(target: Callable[..., Any]) -> set[str]:
    """Names of the parameters in a callable's signature; empty when it has none to be read."""
    try:
        return set(inspect.signature(target).parameters)
    except (TypeError, ValueError):
        return set()
