"""The optimizers of a step: those in `state`, those left out of it, and those that cannot be restored."""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from linnaeus import nest
from linnaeus.autobatch.snapshot import Snapshot, is_optimizer
from linnaeus.errors import AutoBatchError

REHEARSED_STEPS = 2
"""Steps after which two runs of an optimizer from the same state are compared."""

logger = logging.getLogger("linnaeus.autobatch")

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def optimizers_in(state: Iterable[Any]) -> list[torch.optim.Optimizer]:
    """All optimizers in `state`, and those inside of them or of their wrappers, the outermost first."""
    found: list[Any] = [part for part in state if is_optimizer(part)]
    for part in found:
        found += [inner for inner in _inside(part) if inner not in found]
    return found


def stepping_optimizers(state: Iterable[Any]) -> list[torch.optim.Optimizer]:
    """The optimizers of `state` that run torch's hooks when they step; of a wrapper, those inside it."""
    found: list[torch.optim.Optimizer] = []
    for part in filter(is_optimizer, state):
        inner = [] if runs_hooks(part) else stepping_optimizers(_inside(part))
        found += [optimizer for optimizer in inner or [part] if optimizer not in found]
    return found


def runs_hooks(optimizer: Any) -> bool:
    """Whether a step is sure to run hooks: not where a wrapper has left out `Optimizer.__init__`."""
    return "_optimizer_load_state_dict_pre_hooks" in vars(optimizer)


def _inside(part: Any) -> Iterator[Any]:
    """The optimizers among the attributes of an optimizer or a wrapper."""
    attributes = [value for name, value in vars(part).items() if name not in ("state", "param_groups")]
    return _optimizers_among(attributes, set())


def _optimizers_among(value: Any, seen: set[int]) -> Iterator[Any]:
    """The optimizers in a nest, which may contain itself."""
    if is_optimizer(value):
        yield value
    elif isinstance(value, dict | list | tuple) and id(value) not in seen:
        seen.add(id(value))
        for part in value.values() if isinstance(value, dict) else value:
            yield from _optimizers_among(part, seen)


@contextlib.contextmanager
def strangers_refused(state: Sequence[Any]) -> Iterator[None]:
    """Inside the context, no optimizer that was left out of `state` can step.

    An optimizer that a step makes for itself, over tensors of its own, is none of the caller's.

    Raises:
        AutoBatchError: from within the step; it names the optimizer.
    """
    known = {id(optimizer) for optimizer in optimizers_in(state)}
    tensors = {id(parameter) for part in state for parameter in parameters_of(part)}
    kinds = {id(kind) for kind in _subclasses(torch.optim.Optimizer)}  # quicker than to ask each object
    existing = weakref.WeakSet(part for part in gc.get_objects() if id(type(part)) in kinds)

    def refuse(optimizer: torch.optim.Optimizer, *_: object) -> None:
        if id(optimizer) in known:
            return
        if optimizer in existing or any(id(parameter) in tensors for parameter in parameters_of(optimizer)):
            name = type(optimizer).__name__
            raise AutoBatchError(
                f"AutoBatch: the step uses an optimizer, {name}, that is not in state, so its state and the "
                f"parameters it changes would not be restored. Add it: state=(model, optimizer, ...)"
            )

    handle = register_optimizer_step_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()


def _subclasses(base: type) -> set[type]:
    found = [base]
    for kind in found:
        found += kind.__subclasses__()
    return set(found)


def parameters_of(part: Any) -> list[Tensor]:
    """The parameters of a module or an optimizer; nothing of anything else."""
    if isinstance(part, nn.Module):
        return list(part.parameters())
    if is_optimizer(part):
        return [parameter for group in getattr(part, "param_groups", ()) for parameter in group["params"]]
    return []


def check_restorable(state: Sequence[Any], snapshot: Snapshot) -> None:
    """Check that the optimizers can be put back, by a few steps from the same state, twice.

    torch's own optimizers are not tried: they keep all that they have where a snapshot looks. Neither is one
    that cannot step on its own, because it needs a closure, sparse gradients or more memory.

    Args:
        state: as for `auto_find_batch_size`.
        snapshot: of this state.

    Raises:
        AutoBatchError: names the optimizer, and what of it is not put back.
    """
    attributes = snapshot.attributes()
    for optimizer, saved in attributes:
        for path, reason in saved.lost.items():
            raise _cannot_restore(type(optimizer).__name__, f"of its attribute `{path}`, {reason}")
    for optimizer in stepping_optimizers(state):
        if type(optimizer).__module__.startswith("torch.optim."):
            continue
        name = type(optimizer).__name__
        pictures: list[list[Any]] = []
        others = next(saved.others for owner, saved in attributes if owner is optimizer)
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
            raise _cannot_restore(name, f"a step changes its attribute `{changed[0]}`, which is not saved")
        if pictures[0] != pictures[1]:
            raise _cannot_restore(name, "put back and stepped again, it gives other parameters than before")


def check_restored(snapshot: Snapshot) -> None:
    """Check, after a trial and `restore_parts`, that objects other than optimizers and modules are as before.

    Raises:
        AutoBatchError: names the object's type.
    """
    for name in snapshot.not_restored():
        raise AutoBatchError(
            f"AutoBatch cannot restore the {name} in state after its trials: its `load_state_dict` does not "
            "put back what its `state_dict` returned before."
        )


def _cannot_restore(name: str, reason: str) -> AutoBatchError:
    return AutoBatchError(
        f"AutoBatch cannot restore the optimizer {name} after its trials: {reason}. Training would not be "
        "what it is without a search. Choose another OPTIMIZER.NAME, or switch DATA.AUTOBATCH.ENABLED off "
        "and set DATA.BATCH_SIZE. An optimizer of your own must keep all that a step changes in `state`, in "
        "`param_groups`, or in attributes that are numbers, tensors, random number generators or containers "
        "of these."
    )


def _rehearse(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Take a few steps with gradients made from the parameters, and describe all that is then there."""
    parameters = [parameter for parameter in parameters_of(optimizer) if parameter.requires_grad]
    with _without_compilation():
        for _ in range(REHEARSED_STEPS):
            for parameter in parameters:
                parameter.grad = parameter.detach() * 0.1 + 0.01
            optimizer.step()
    groups = [
        {name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups
    ]
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
