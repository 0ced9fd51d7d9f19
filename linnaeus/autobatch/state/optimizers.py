"""Refuse optimizers that a step uses and that were left out of `state`."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from linnaeus.autobatch.errors import AutoBatchError
from linnaeus.autobatch.state.snapshot import Snapshot, parameters_of


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
def unlisted_optimizers_refused(state: Sequence[Any], snapshot: Snapshot) -> Iterator[None]:
    """Refuse steps of optimizers that were left out of `state`, and so of its snapshot.

    Optimizers that the step creates over its own tensors are allowed.

    Raises:
        UnlistedOptimizerError: from within the step; it names the optimizer.
    """
    known = set(map(id, snapshot.optimizers))
    tensors = {id(parameter) for part in state for parameter in parameters_of(part)}
    kinds = {
        id(kind) for kind in subclasses(torch.optim.Optimizer)
    }  # quicker than to ask each object
    existing = weakref.WeakSet(part for part in gc.get_objects() if id(type(part)) in kinds)

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


def subclasses(base: type) -> set[type]:
    """Return a class and all classes derived from it."""
    found = [base]
    for kind in found:
        found += kind.__subclasses__()
    return set(found)
