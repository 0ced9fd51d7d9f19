"""What the attributes of modules hold, to any depth, saved and put back in place.

A step may count its calls in an attribute, keep a tensor there, register hooks or replace a layer. Modules
keep all of this in their `__dict__` and in dictionaries in it, so that a copy of each container undoes it.
"""

from __future__ import annotations

import operator
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

from torch import Tensor

from linnaeus.autobatch.attributes import Restore, is_array, restore_of_generator

_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})
_MAPPINGS = frozenset({dict, OrderedDict, defaultdict, Counter})
_CONTAINERS = _MAPPINGS | {list, set, deque}
"""Containers that can be emptied and filled. Subclasses of these may refuse that, and are left alone."""


class Contents:
    """Copies of containers, of those inside them, and of the tensors, arrays and generators in all of these.

    Anything else stays in its place and is not looked into: it may be the whole program.

    Args:
        roots: the containers. Where one is of another type than `_CONTAINERS`, it is left alone.
        held: ids of what is put back by others.
        save_tensor: makes the snapshot of a tensor: an object with `restore`.

    Attributes:
        tensors: what `save_tensor` has made.
    """

    def __init__(
        self, roots: Iterable[Any], held: Collection[int], save_tensor: Callable[[Tensor], Any]
    ) -> None:
        self.tensors: list[Any] = []
        self._empty: list[Any] = []  # most dictionaries of hooks
        self._containers: list[tuple[Any, Any]] = []
        self._others: list[Restore] = []
        seen, waiting = set(held), list(roots)
        while waiting:
            value = waiting.pop()
            kind = type(value)
            if kind in _PLAIN or id(value) in seen:
                continue
            seen.add(id(value))
            if kind in _CONTAINERS and not value:
                self._empty.append(value)
            elif kind in _CONTAINERS:
                self._containers.append((value, value.copy()))
                waiting.extend(value.values() if kind in _MAPPINGS else value)
            elif isinstance(value, tuple):
                waiting.extend(value)
            elif isinstance(value, Tensor):
                if not value.is_meta:
                    self.tensors.append(save_tensor(value))
            elif restore := _restore_of_array(value) or restore_of_generator(value):
                self._others.append(restore)

    def restore(self) -> None:
        """Put back what differs: what was added goes, what was removed or replaced is the same again."""
        for container in filter(None, self._empty):
            container.clear()
        for container, content in self._containers:
            if not _holds(container, content):
                container.clear()
                container.update(content) if hasattr(container, "update") else container.extend(content)
        for tensor in self.tensors:
            tensor.restore()
        for restore in self._others:
            restore()


def _holds(container: Any, content: Any) -> bool:
    """Whether a container holds the very objects that its copy holds, in the same order."""
    if len(container) != len(content):
        return False
    if isinstance(content, set):
        return bool(container == content)
    if isinstance(content, dict) and not all(map(operator.is_, container.values(), content.values())):
        return False
    return all(map(operator.is_, container, content))


def _restore_of_array(value: Any) -> Restore | None:
    if is_array(value) and value.flags.writeable:
        return partial(operator.setitem, value, ..., value.copy())
    return None
