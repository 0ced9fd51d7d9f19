"""Functions on nests of tuples, lists and mappings, as a user's collate function may build them."""

from __future__ import annotations

import copy
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor


def leaves(nest: Any) -> Iterator[Any]:
    """Everything in a nest that is not a tuple, list or mapping, in order."""
    if isinstance(nest, Mapping):
        for value in nest.values():
            yield from leaves(value)
    elif isinstance(nest, tuple | list):
        for value in nest:
            yield from leaves(value)
    else:
        yield nest


def tensors(nest: Any) -> Iterator[Tensor]:
    """The tensors of a nest, in order."""
    return (leaf for leaf in leaves(nest) if isinstance(leaf, Tensor))


def map_leaves(function: Callable[[Any], Any], nest: Any) -> Any:
    """The same nest with each leaf replaced by `function(leaf)`; containers keep their types if possible."""
    if isinstance(nest, Mapping):
        mapped = {name: map_leaves(function, value) for name, value in nest.items()}
        return mapped if type(nest) is dict else _rebuilt(nest, mapped)
    if isinstance(nest, tuple | list):
        values = [map_leaves(function, value) for value in nest]
        if isinstance(nest, tuple) and hasattr(nest, "_fields"):
            return type(nest)(*values)
        return _rebuilt(nest, values)
    return function(nest)


def is_array(value: Any) -> bool:
    """Whether it is an array of NumPy, which need not be installed."""
    np = sys.modules.get("numpy")
    return np is not None and isinstance(value, np.ndarray)


def is_mapped(array: Any) -> bool:
    """Whether an array, or the one that it is a view of, is a file mapped into memory."""
    while array is not None and not isinstance(array, sys.modules["numpy"].memmap):
        array = getattr(array, "base", None)
    return array is not None


def local(value: Any) -> Any:
    """What this process holds of a DTensor; anything else as it is."""
    return getattr(value, "_local_tensor", value)


def num_bytes(nest: Any) -> int:
    """Bytes of all tensors and arrays in a nest; of a DTensor, those of this process."""
    return sum(int(getattr(local(leaf), "nbytes", 0)) for leaf in leaves(nest))


def structure(nest: Any) -> Any:
    """Types, lengths and keys of a nest; where two nests agree in them, their leaves correspond."""
    if isinstance(nest, Mapping):
        return type(nest), tuple((name, structure(value)) for name, value in nest.items())
    if isinstance(nest, tuple | list):
        return type(nest), tuple(structure(value) for value in nest)
    return type(nest)


def same(a: Any, b: Any) -> bool:
    """Whether two leaves are equal; in tensors, NaN equals NaN."""
    a, b = local(a), local(b)
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        return bool(((a == b) | ((a != a) & (b != b))).all())
    # `is True`: an array compares element by element, which tells nothing here.
    return type(a) is type(b) and (a == b) is True


def _rebuilt(original: Any, values: Any) -> Any:
    """The values in a container of the original's type, or as they are where that cannot be made."""
    try:
        rebuilt = type(original)(values)
    except TypeError:
        if not isinstance(original, defaultdict):
            return values
        rebuilt = copy.copy(original)
        rebuilt.update(values)
    if isinstance(rebuilt, dict) and hasattr(rebuilt, "__dict__"):
        vars(rebuilt).update(
            vars(original)
        )  # a module's state dict has versions in its `_metadata`
    return rebuilt
