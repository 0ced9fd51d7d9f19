"""The parts of the memory at a batch size: tensors counted while a step holds them, and the remainder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from linnaeus import nest
from linnaeus.autobatch.result import Mode
from linnaeus.training.build import Assembly


@dataclass
class StateBytes:
    """Bytes of the tensors that training keeps. Storage that tensors share counts once, for the first one.

    Attributes:
        parameters, buffers: those of the model and the loss.
        average: the EMA copy of the model.
        gradients: those of all parameters; 0 in validation.
        optimizer_state: such as Adam's moments; training's stay resident during validation.
    """

    parameters: int = 0
    buffers: int = 0
    average: int = 0
    gradients: int = 0
    optimizer_state: int = 0


@dataclass
class Breakdown(StateBytes):
    """The parts of a peak, in bytes; they add up to it.

    Attributes:
        activations: the peak less all other parts: activations, the batch, workspaces of kernels.
        rest: all else that the process holds between steps: runtime and libraries on the CPU, workspaces and
            rounding of the caching allocator on an accelerator.
    """

    activations: int = 0
    rest: int = 0

    def parts(self) -> dict[str, int]:
        """The parts by name, in order."""
        return asdict(self)


def break_down(mode: Mode, state: StateBytes, *, peak_bytes: int, held_bytes: int) -> Breakdown:
    """Split a peak.

    >>> parts = break_down("train", StateBytes(100, 4, 0, 100, 200), peak_bytes=1500, held_bytes=600)
    >>> parts.activations, parts.rest, sum(parts.parts().values())
    (600, 496, 1500)

    Args:
        mode: a training trial allocates the optimizer state; in validation it is there from the start.
        state: counted on the same model.
        peak_bytes: peak of a trial.
        held_bytes: bytes that the process held between the trials.
    """
    resident = state.parameters + state.buffers + state.average
    gradients = state.gradients if mode == "train" else 0
    allocated = gradients + (state.optimizer_state if mode == "train" else 0)
    if mode == "val":
        resident += state.optimizer_state
    return Breakdown(
        **asdict(replace(state, gradients=gradients)),
        activations=peak_bytes - held_bytes - allocated,
        rest=held_bytes - resident,
    )


@contextmanager
def counting(assembly: Assembly, device: torch.device) -> Iterator[StateBytes]:
    """Count bytes after each optimizer step inside the context, before the gradients are cleared."""
    state = StateBytes()
    modules = nn.ModuleList([assembly.model, assembly.criterion])
    average = nn.ModuleList([] if assembly.ema is None else [assembly.ema.module])

    def count(*_: object) -> None:
        seen: set[int] = set()
        total = partial(_new_bytes, device=device, seen=seen)
        state.parameters = total(modules.parameters())
        state.buffers = total(modules.buffers())
        state.average = total([*average.parameters(), *average.buffers()])
        state.gradients = total(parameter.grad for parameter in modules.parameters())
        state.optimizer_state = total(nest.tensors(list(assembly.optimizer.state.values())))

    handle = assembly.optimizer.register_step_post_hook(count)
    try:
        yield state
    finally:
        handle.remove()


def _new_bytes(tensors: Iterable[Tensor | None], device: torch.device, seen: set[int]) -> int:
    """Bytes of the storages on the device that are not in `seen` yet; they are added to it."""
    num_bytes = 0
    for tensor in tensors:
        if tensor is not None and tensor.device == device and tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                num_bytes += storage.nbytes()
    return num_bytes
