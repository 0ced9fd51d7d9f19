"""Find optimizers, schedulers, gradient scalers and buffers that a step changes outside `state`."""

from __future__ import annotations

import contextlib
import gc
import logging
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from linnaeus.autobatch.errors import AutoBatchError
from linnaeus.autobatch.state.sharded import modules_of
from linnaeus.autobatch.state.snapshot import Snapshot, parameters_of

_SMALL = 1 << 12
"""Buffers with more values are not compared."""

logger = logging.getLogger("linnaeus.autobatch")


class UnlistedOptimizerError(AutoBatchError):
    """A step uses an optimizer that is not in `state`.

    Attributes:
        optimizer: the name of its type.
    """

    def __init__(
        self, optimizer: str, remedy: str = "Add it: state=(model, optimizer, ...)"
    ) -> None:
        self.optimizer = optimizer
        super().__init__(
            f"AutoBatch: the step uses an optimizer, {optimizer}, that is not in state, so its state and the "
            f"parameters it changes would not be restored. {remedy}"
        )


@contextlib.contextmanager
def unlisted_state_noticed(state: Sequence[Any], snapshot: Snapshot) -> Iterator[None]:
    """Refuse steps of optimizers that were left out of `state`, and so of its snapshot.

    Optimizers that the step creates over its own tensors are allowed. At the end, a warning names learning
    rate schedulers, gradient scalers and modules with persistent buffers that have changed outside `state`.

    Raises:
        UnlistedOptimizerError: from within the step; it names the optimizer.
    """
    known = set(map(id, snapshot.optimizers))
    tensors = {id(parameter) for part in state for parameter in parameters_of(part)}
    objects = _objects(torch.optim.Optimizer, nn.Module, LRScheduler, torch.amp.GradScaler)
    existing = weakref.WeakSet(part for part in objects if isinstance(part, torch.optim.Optimizer))
    listed = {*map(id, state), *map(id, modules_of(state)), *map(id, existing)}
    values = [(part, _value(part)) for part in objects if id(part) not in listed]
    del objects

    def refuse(optimizer: torch.optim.Optimizer, *_: object) -> None:
        if id(optimizer) in known:
            return
        if optimizer in existing or any(
            id(parameter) in tensors for parameter in parameters_of(optimizer)
        ):
            raise UnlistedOptimizerError(type(optimizer).__name__)

    handle = register_optimizer_step_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()
    if changed := sorted({type(part).__name__ for part, value in values if _value(part) != value}):
        logger.warning(
            "warning: the search has changed %s, which state does not hold. Add it: "
            "state=(model, optimizer, ...)",
            " and ".join(changed),
        )


def _objects(*bases: type) -> list[Any]:
    """Return all objects of these classes and of classes derived from them."""
    kinds = {id(kind) for base in bases for kind in subclasses(base)}  # quicker than isinstance
    return [part for part in gc.get_objects() if id(type(part)) in kinds]


def _value(part: Any) -> str:
    """Return the state of a scheduler or scaler, or the small persistent buffers of a module, as text."""
    if not isinstance(part, nn.Module):
        return repr(part.state_dict())
    held = vars(part)
    buffers = held.get("_buffers", {})  # a module may not be initialized
    names = buffers.keys() - held.get("_non_persistent_buffers_set", ())
    tensors = (buffers[name] for name in sorted(names))
    plain = (x for x in tensors if type(x) is Tensor and x.numel() <= _SMALL and not x.is_meta)
    return repr([x.tolist() for x in plain])


def subclasses(base: type) -> set[type]:
    """Return a class and all classes derived from it."""
    found = [base]
    for kind in found:
        found += kind.__subclasses__()
    return set(found)
