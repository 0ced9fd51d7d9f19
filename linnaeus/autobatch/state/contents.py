"""Copies of containers and of the tensors inside them, put back in place."""

from __future__ import annotations

import operator
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from linnaeus.autobatch import nest
from linnaeus.autobatch.state.rng import restore_of_generator

PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})
_MAPPINGS = frozenset({dict, OrderedDict, defaultdict, Counter})
_CONTAINERS = _MAPPINGS | {list, set, deque}
"""Containers that can be emptied and filled. Subclasses may refuse that, and are left alone."""


class Contents:
    """Copies of nested containers and of the tensors, arrays and generators in them.

    Anything else stays in its place and is not looked into: it may be the whole program.

    Args:
        roots: the containers, and other objects to save.
        held: ids of objects that others put back.
        inside: the containers that belong to an object of another kind.
        without_tensors: leave tensors and arrays alone.

    Attributes:
        tensors: the copies of tensors.
        seen: ids of all objects that this or others put back.
    """

    def __init__(
        self,
        roots: Iterable[Any],
        held: Iterable[int] = (),
        inside: Callable[[Any], Iterable[Any]] = lambda value: (),
        *,
        without_tensors: bool = False,
    ) -> None:
        self.tensors: list[_TensorCopy] = []
        self.seen = set(held)
        self._containers: list[tuple[Any, Any]] = []
        self._writes: list[Callable[[], object]] = []
        waiting = deque(roots)
        while waiting:
            value = waiting.popleft()
            kind = type(value)
            if kind in PLAIN or id(value) in self.seen:
                continue
            if without_tensors and (isinstance(value, Tensor) or nest.is_array(value)):
                continue
            self.seen.add(id(value))
            if kind in _CONTAINERS:
                self._containers.append((value, value.copy()))
                waiting.extend(value.values() if kind in _MAPPINGS else value)
            elif isinstance(value, tuple):
                waiting.extend(value)
            elif isinstance(value, Tensor):
                if not value.is_meta:
                    is_parameter = isinstance(value, nn.Parameter)
                    is_trainable = is_parameter or (value.is_leaf and value.requires_grad)
                    copy = _ParameterCopy if is_trainable else _TensorCopy
                    self.tensors.append(copy(value))
            elif nest.is_array(value) and value.flags.writeable and not nest.is_mapped(value):
                self._writes.append(partial(operator.setitem, value, ..., value.copy()))
            elif write := restore_of_generator(value):
                self._writes.append(write)
            else:
                waiting.extend(inside(value))

    def restore(self) -> None:
        """Undo all changes."""
        for container, content in self._containers:
            if not _holds(container, content):
                container.clear()
                container.update(content) if hasattr(container, "update") else container.extend(
                    content
                )
        for tensor in self.tensors:
            tensor.restore()
        for write in self._writes:
            write()


def _holds(container: Any, content: Any) -> bool:
    """Return whether a container holds the same objects as its copy, in the same order."""
    if not content or len(container) != len(content):
        return not container and not content
    if isinstance(content, set):
        return bool(container == content)
    if isinstance(content, dict) and not all(
        map(operator.is_, container.values(), content.values())
    ):
        return False
    return all(map(operator.is_, container, content))


class TensorValue:
    """The value of a tensor on the host.

    Attributes:
        on_host: the copy.
        nbytes: bytes of the copy.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.on_host = tensor.detach().to("cpu", copy=True)
        self._device = tensor.device
        copied = nest.local(self.on_host)
        parts = (copied._indices(), copied._values()) if copied.is_sparse else (copied,)
        self.nbytes = sum(part.nbytes for part in parts)

    def on_device(self) -> Tensor:
        """Return a new tensor with the value, on the device of the original."""
        return self.on_host.to(self._device, copy=True)


_HOOKS_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Attributes of a tensor: None, or a dictionary of the hooks registered on it."""


class _TensorCopy(TensorValue):
    """A tensor and its value."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor)
        self.tensor = tensor

    def restore(self) -> None:
        """Put the value back; into new memory where shape, dtype or device have changed."""
        tensor, value = self.tensor, self.on_host
        has_changed = (tensor.shape, tensor.dtype, tensor.device) != (
            value.shape,
            value.dtype,
            self._device,
        )
        if has_changed or tensor.is_sparse:
            tensor.data = self.on_device()
        else:
            if 0 in tensor.stride():  # expanded: several elements share memory
                once = tuple(slice(None if stride else 1) for stride in tensor.stride())
                tensor, value = tensor[once], value[once]
            with torch.inference_mode(tensor.is_inference()):
                tensor.detach().copy_(value)


class _ParameterCopy(_TensorCopy):
    """A parameter and its value, its gradient, `requires_grad` and hooks."""

    def __init__(self, parameter: Tensor) -> None:
        super().__init__(parameter)
        self._gradient = None if parameter.grad is None else _TensorCopy(parameter.grad)
        self._requires_grad = parameter.requires_grad
        self._hooks = [dict(getattr(parameter, name) or {}) for name in _HOOKS_OF_TENSORS]
        if self._gradient is not None:
            self.nbytes += self._gradient.nbytes

    def restore(self) -> None:
        self.tensor.grad = None  # torch checks it against the value that is put back
        super().restore()
        if self._gradient is not None:
            self._gradient.restore()
            self.tensor.grad = self._gradient.tensor
        self.tensor.requires_grad_(self._requires_grad)
        for name, hooks in zip(_HOOKS_OF_TENSORS, self._hooks, strict=True):
            present = getattr(self.tensor, name) or {}
            if present != hooks:  # the dictionary stays: autograd refers to it
                present.clear()
                present.update(hooks)
