"""Functions on nests of tuples, lists and mappings, as a user's collate function may build them."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor


def leaves(nest: Any) -> Iterator[Any]:
    """Yield everything in a nest that is not a tuple, list or mapping, in order."""
    if isinstance(nest, Mapping):
        for value in nest.values():
            yield from leaves(value)
    elif isinstance(nest, tuple | list):
        for value in nest:
            yield from leaves(value)
    else:
        yield nest


def tensors(nest: Any) -> Iterator[Tensor]:
    """Yield the tensors of a nest, in order."""
    return (leaf for leaf in leaves(nest) if isinstance(leaf, Tensor))


def map_leaves(function: Callable[[Any], Any], nest: Any) -> Any:
    """Return the nest with each leaf replaced by `function(leaf)`.

    Containers keep their types and attributes, such as the `_metadata` of a module's state dict. A container
    that cannot be rebuilt becomes a dict or a list.
    """
    if isinstance(nest, Tensor):  # asked first: most nests are one
        return function(nest)
    if isinstance(nest, Mapping):
        mapped = {name: map_leaves(function, value) for name, value in nest.items()}
        with contextlib.suppress(TypeError):
            if not isinstance(nest, dict):
                return type(nest)(mapped)  # type: ignore[call-arg]
            rebuilt = copy.copy(nest)  # with its default factory and attributes
            for name, value in mapped.items():
                rebuilt[name] = value
            return rebuilt
        return mapped
    if isinstance(nest, tuple | list):
        values = [map_leaves(function, value) for value in nest]
        with contextlib.suppress(TypeError):
            return type(nest)(*values) if hasattr(nest, "_fields") else type(nest)(values)
        return values
    return function(nest)


def is_array(value: Any) -> bool:
    """Return whether it is an array of NumPy, which need not be installed."""
    np = sys.modules.get("numpy")
    return np is not None and isinstance(value, np.ndarray)


def is_mapped(array: Any) -> bool:
    """Return whether an array or its base is a file mapped into memory."""
    while array is not None and not isinstance(array, sys.modules["numpy"].memmap):
        array = getattr(array, "base", None)
    return array is not None


def local(value: Any) -> Any:
    """Return the local part of a DTensor; anything else unchanged."""
    return getattr(value, "_local_tensor", value)


def num_bytes(nest: Any) -> int:
    """Return the bytes of all tensors and arrays in a nest; a DTensor counts with its local part."""
    return sum(int(getattr(local(leaf), "nbytes", 0)) for leaf in leaves(nest))


def structure(nest: Any) -> Any:
    """Return types, lengths and keys of a nest: the leaves of nests with equal ones correspond."""
    if isinstance(nest, Mapping):
        return type(nest), tuple((name, structure(value)) for name, value in nest.items())
    if isinstance(nest, tuple | list):
        return type(nest), tuple(structure(value) for value in nest)
    return type(nest)


def same(a: Any, b: Any) -> bool:
    """Return whether two leaves are equal; NaN equals NaN."""
    a, b = local(a), local(b)
    if (isinstance(a, Tensor) and isinstance(b, Tensor)) or (is_array(a) and is_array(b)):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        return bool(((a == b) | ((a != a) & (b != b))).all())
    is_nan = isinstance(a, float) and a != a and b != b
    return type(a) is type(b) and ((a == b) is True or is_nan)
