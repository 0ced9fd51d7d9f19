"""Optimizers that a search refuses: those left out of `state`, and those that cannot be restored."""

from __future__ import annotations

import contextlib
import gc
import logging
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from linnaeus.autobatch import nest
from linnaeus.autobatch.errors import AutoBatchError
from linnaeus.autobatch.state.snapshot import Snapshot, parameters_of

REHEARSED_STEPS = 2
"""Steps after which two runs of an optimizer from the same state are compared."""

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
def unlisted_optimizers_refused(state: Sequence[Any], snapshot: Snapshot) -> Iterator[None]:
    """Inside the context, no optimizer that was left out of `state`, and so of its snapshot, can step.

    An optimizer that a step makes for itself, over tensors of its own, is none of the caller's.

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
    """A class and all classes derived from it."""
    found = [base]
    for kind in found:
        found += kind.__subclasses__()
    return set(found)


def check_restorable(snapshot: Snapshot) -> None:
    """Check that its optimizers can be put back: from the same state, two runs must give the same.

    torch's own optimizers are not tried: they keep all that they have where a snapshot looks. Neither is one
    that cannot step on its own, because it needs a closure, sparse gradients or more memory.

    Raises:
        AutoBatchError: names the optimizer.
    """
    for optimizer in snapshot.stepping_optimizers():
        if type(optimizer).__module__.startswith("torch.optim."):
            continue
        try:
            first, second = (_rehearse(optimizer, snapshot) for _ in range(2))
        except Exception as error:
            logger.debug("%s cannot be tried on its own: %s", type(optimizer).__name__, error)
            continue
        if first != second:
            raise AutoBatchError(
                f"AutoBatch cannot restore the optimizer {type(optimizer).__name__} after its trials: put "
                "back and stepped again, it does not do the same. Training would not be what it is without a "
                f"search. Choose another optimizer, or train with a batch size of your own. "
                "An optimizer of your own must keep all that a step changes in `state`, in "
                "`param_groups`, or in attributes that are numbers, tensors, random number generators or "
                "containers of these."
            )


def _rehearse(optimizer: torch.optim.Optimizer, snapshot: Snapshot) -> list[Any]:
    """Take `REHEARSED_STEPS` steps with gradients made from the parameters; describe what they leave."""
    parameters = [parameter for parameter in parameters_of(optimizer) if parameter.requires_grad]
    try:
        for _ in range(REHEARSED_STEPS):
            for parameter in parameters:
                parameter.grad = parameter.detach() * 0.1 + 0.01
            optimizer.step()
        return [_fingerprint(leaf) for leaf in nest.leaves([parameters, vars(optimizer)])]
    finally:
        snapshot.restore()


def _fingerprint(leaf: Any) -> Any:
    """A number of a tensor's bits, or a plain value; of an object how it shows itself, and what it holds."""
    if isinstance(leaf, Tensor):
        bits = leaf.detach().to_dense().reshape(-1).view(torch.uint8)
        return leaf.dtype, leaf.shape, int(bits.sum(dtype=torch.int64))
    if isinstance(leaf, bool | int | float | complex | str | bytes | None):
        return leaf
    held = [
        part for part in nest.leaves(getattr(leaf, "__dict__", ())) if not hasattr(part, "__dict__")
    ]
    return repr(leaf), [
        part if isinstance(part, int | float | str) else repr(part) for part in held
    ]
