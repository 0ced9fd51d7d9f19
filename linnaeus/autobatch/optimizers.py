"""Optimizers that a search refuses: those left out of `state`, and those that cannot be restored."""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from linnaeus.autobatch import nest
from linnaeus.autobatch.attributes import parameters_of, without
from linnaeus.autobatch.errors import AutoBatchError
from linnaeus.autobatch.names import ARGUMENTS, Names
from linnaeus.autobatch.snapshot import Snapshot

REHEARSED_STEPS = 2
"""Steps after which two runs of an optimizer from the same state are compared."""

logger = logging.getLogger("linnaeus.autobatch")


class StrangerError(AutoBatchError):
    """A step uses an optimizer that is not in `state`.

    Attributes:
        optimizer: the name of its type.
    """

    def __init__(self, optimizer: str, remedy: str = "Add it: state=(model, optimizer, ...)") -> None:
        self.optimizer = optimizer
        super().__init__(
            f"AutoBatch: the step uses an optimizer, {optimizer}, that is not in state, so its state and the "
            f"parameters it changes would not be restored. {remedy}"
        )


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@contextlib.contextmanager
def strangers_refused(state: Sequence[Any], snapshot: Snapshot) -> Iterator[None]:
    """Inside the context, no optimizer that was left out of `state`, and so of its snapshot, can step.

    An optimizer that a step makes for itself, over tensors of its own, is none of the caller's.

    Raises:
        StrangerError: from within the step; it names the optimizer.
    """
    known = {id(optimizer) for optimizer, _ in snapshot.attributes()}
    tensors = {id(parameter) for part in state for parameter in parameters_of(part)}
    kinds = {id(kind) for kind in subclasses(torch.optim.Optimizer)}  # quicker than to ask each object
    existing = weakref.WeakSet(part for part in gc.get_objects() if id(type(part)) in kinds)

    def refuse(optimizer: torch.optim.Optimizer, *_: object) -> None:
        if id(optimizer) in known:
            return
        if optimizer in existing or any(id(parameter) in tensors for parameter in parameters_of(optimizer)):
            raise StrangerError(type(optimizer).__name__)

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


def check_restorable(snapshot: Snapshot, names: Names = ARGUMENTS) -> None:
    """Check that its optimizers can be put back, by `REHEARSED_STEPS` steps from the same state, twice.

    torch's own optimizers are not tried: they keep all that they have where a snapshot looks. Neither is one
    that cannot step on its own, because it needs a closure, sparse gradients or more memory.

    Raises:
        AutoBatchError: names the optimizer, and what of it is not put back.
    """
    attributes = snapshot.attributes()
    for optimizer, saved in attributes:
        for path, reason in saved.lost.items():
            raise _cannot_restore(type(optimizer).__name__, f"of its attribute `{path}`, {reason}", names)
    others_of = {id(optimizer): saved.others for optimizer, saved in attributes}
    for optimizer in snapshot.stepping_optimizers():
        if type(optimizer).__module__.startswith("torch.optim."):
            continue
        name = type(optimizer).__name__
        pictures: list[list[Any]] = []
        others = others_of[id(optimizer)]
        before = _plain_values(others)
        try:
            for _ in range(2):
                pictures.append(_rehearse(optimizer))
                snapshot.restore()
        except Exception as error:
            logger.debug("%s cannot be tried on its own: %s", name, error)
            snapshot.restore()
            continue
        changed = [path for path, values in _plain_values(others).items() if values != before[path]]
        if changed:
            reason = f"a step changes its attribute `{changed[0]}`, which is not saved"
            raise _cannot_restore(name, reason, names)
        if pictures[0] != pictures[1]:
            reason = "put back and stepped again, it gives other parameters than before"
            raise _cannot_restore(name, reason, names)


def _cannot_restore(name: str, reason: str, names: Names) -> AutoBatchError:
    return AutoBatchError(
        f"AutoBatch cannot restore the optimizer {name} after its trials: {reason}. Training would not be "
        f"what it is without a search. Choose another {names.optimizer}, or {names.without_search}. "
        "An optimizer of your own must keep all that a step changes in `state`, in "
        "`param_groups`, or in attributes that are numbers, tensors, random number generators or containers "
        "of these."
    )


def _rehearse(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Take `REHEARSED_STEPS` steps with gradients made from the parameters, and describe the outcome."""
    parameters = [parameter for parameter in parameters_of(optimizer) if parameter.requires_grad]
    with _without_compilation():
        for _ in range(REHEARSED_STEPS):
            for parameter in parameters:
                parameter.grad = parameter.detach() * 0.1 + 0.01
            optimizer.step()
    groups = [without(group, "params") for group in optimizer.param_groups]
    content = [parameters, [optimizer.state.get(parameter) for parameter in parameters], groups]
    return [_fingerprint(leaf) for leaf in nest.leaves(content)]


def _without_compilation() -> contextlib.AbstractContextManager[object]:
    if "torch._dynamo" in sys.modules:
        return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]
    return contextlib.nullcontext()


def _fingerprint(leaf: Any) -> Any:
    """A number of a tensor's bits, or a plain value; None for all else."""
    if isinstance(leaf, Tensor):
        dense = leaf.detach().to_dense().contiguous().reshape(-1)
        if dense.is_complex():
            dense = torch.view_as_real(dense)
        bits = dense.view(_INTEGERS[dense.element_size()])
        return leaf.dtype, leaf.shape, int(bits.sum(dtype=torch.int64))
    return leaf if isinstance(leaf, bool | int | float | complex | str | bytes) else None


def _plain_values(others: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """For each object: what its own attributes say that are plain values or tensors."""
    return {
        path: {name: _fingerprint(value) for name, value in getattr(other, "__dict__", {}).items()}
        for path, other in others.items()
    }
