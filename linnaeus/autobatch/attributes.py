"""The attributes of an optimizer, saved and put back in place.

Besides `state` and `param_groups`, optimizers keep counters, random number generators, slow weights or whole
optimizers inside them as plain attributes, in their `state_dict` or not.
"""

from __future__ import annotations

import copy
import io
import operator
import random
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from linnaeus.autobatch.arguments import kind_of
from linnaeus.autobatch.rng import numpy

Restore = Callable[[], Any]
"""Puts an object back and returns it; where that needs a new object, returns the new one."""

_HOOKS = "_optimizer_"  # the prefix of torch's own dictionaries of hooks


def is_optimizer(part: Any) -> bool:
    """Whether it is an optimizer, or looks like one and has an optimizer inside."""
    if isinstance(part, torch.optim.Optimizer | nn.Module):
        return not isinstance(part, nn.Module)
    has_inside = isinstance(getattr(part, "optimizer", None), torch.optim.Optimizer)
    return has_inside and hasattr(part, "step") and hasattr(part, "zero_grad")  # a scheduler lacks the latter


def parameters_of(part: Any) -> list[Tensor]:
    """The parameters of a module or an optimizer; nothing of anything else."""
    if isinstance(part, nn.Module):
        return list(part.parameters())
    groups = getattr(part, "param_groups", ()) if is_optimizer(part) else ()
    return [parameter for group in groups for parameter in group["params"]]


def without(content: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """A copy of a dictionary without some of its keys."""
    return {name: value for name, value in content.items() if name not in names}


class Attributes:
    """Copies of an object's attributes.

    Put back are plain values, tensors, arrays, random number generators, iterators that can be copied, and
    lists, dictionaries, sets, deques and tuples of all these; optimizers, modules and scalers by snapshots of
    their own. Any other object stays in its place and is not looked into: it may be the whole program.

    Args:
        owner: the object.
        held: ids of the tensors and optimizers that another snapshot puts back.
        save_part: makes the snapshot of an optimizer, a module, a scaler or a tensor: an object with
            `restore`.

    Attributes:
        parts: what `save_part` has made.
        lost: the attributes that cannot be put back, each with the reason.
        others: the objects that are not looked into, by the path of their attribute.
    """

    def __init__(self, owner: Any, held: Collection[int], save_part: Callable[[Any], Any]) -> None:
        self.parts: list[Any] = []
        self.lost: dict[str, str] = {}
        self.others: dict[str, Any] = {}
        self._owner = owner
        self._held = held
        self._save_part = save_part
        self._seen: dict[int, Restore] = {id(owner): lambda: owner}
        self._saved = {name: self._save(value, name) for name, value in self._attributes().items()}

    def restore(self) -> None:
        """Put all attributes back, and remove those that were added."""
        for name in self._attributes().keys() - self._saved.keys():
            del vars(self._owner)[name]
        for name, restore in self._saved.items():
            vars(self._owner)[name] = restore()

    def _attributes(self) -> dict[str, Any]:
        attributes = vars(self._owner)
        hooks = [name for name in attributes if name.startswith(_HOOKS) and name.endswith("_hooks")]
        return without(attributes, "state", "param_groups", *hooks)

    def _save(self, value: Any, path: str) -> Restore:
        """A function that puts the value back. What refers to itself is saved once."""
        if id(value) not in self._seen:
            self._seen[id(value)] = lambda: value
            self._seen[id(value)] = self._restore_of(value, path)
        return self._seen[id(value)]

    def _restore_of(self, value: Any, path: str) -> Restore:
        if isinstance(value, Tensor | nn.Module | torch.amp.GradScaler) or is_optimizer(value):
            return self._restore_of_part(value)
        if isinstance(value, dict | list | tuple | set | deque):
            return self._restore_of_container(value, path)
        if is_array(value):
            return _after(partial(operator.setitem, value, ..., value.copy()), value)
        generator = restore_of_generator(value)
        if generator is not None:
            return generator
        if hasattr(type(value), "__next__") and not isinstance(value, io.IOBase):
            return self._restore_of_iterator(value, path)
        if not isinstance(value, bool | int | float | complex | str | bytes | None):
            self.others[path] = value
        return lambda: value

    def _restore_of_part(self, value: Any) -> Restore:
        things = value.parameters() if isinstance(value, nn.Module) else [value]
        if all(id(thing) in self._held for thing in things):
            return lambda: value
        part = self._save_part(value)
        self.parts.append(part)
        return _after(part.restore, value)

    def _restore_of_container(self, value: Any, path: str) -> Restore:
        if isinstance(value, dict):
            items = {key: self._save(item, f"{path}[{key!r:.20}]") for key, item in value.items()}
            return lambda: _refilled(value, {key: restore() for key, restore in items.items()}.items())
        if isinstance(value, set):
            return _after(partial(_refilled, value, set(value)), value)
        parts = [self._save(item, f"{path}[{index}]") for index, item in enumerate(value)]
        if isinstance(value, tuple):  # what it refers to is put back in place
            return _after(lambda: [restore() for restore in parts], value)
        return lambda: _refilled(value, [restore() for restore in parts])

    def _restore_of_iterator(self, value: Iterator[Any], path: str) -> Restore:
        try:
            saved = copy.copy(value)
        except TypeError:
            self.lost[path] = f"it is {kind_of(value)}, which cannot be copied"
            return lambda: value
        return lambda: copy.copy(saved)


def is_array(value: Any) -> bool:
    """Whether it is an array of NumPy, which need not be installed."""
    np = numpy()
    return np is not None and isinstance(value, np.ndarray)


def restore_of_generator(value: Any) -> Restore | None:
    """Puts the state of a random number generator back; None for anything else."""
    state: Any
    write: Callable[[Any], object]
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        state, write = value.getstate(), value.setstate
    elif isinstance(value, torch.Generator):
        state, write = value.get_state().clone(), value.set_state
    elif (np := numpy()) and isinstance(value, np.random.RandomState):
        state, write = value.get_state(), value.set_state
    elif np and isinstance(value, np.random.Generator):
        state = copy.deepcopy(value.bit_generator.state)
        write = partial(setattr, value.bit_generator, "state")
    else:
        return None
    return _after(lambda: write(copy.deepcopy(state)), value)


def _after(restore: Callable[[], object], value: Any) -> Restore:
    def run() -> Any:
        restore()
        return value

    return run


def _refilled(container: Any, content: Any) -> Any:
    container.clear()
    container.update(content) if hasattr(container, "update") else container.extend(content)
    return container
