"""What the memory at a batch size consists of: tensors counted while a step has them, and what is left."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields

import torch
from torch import Tensor, nn

from linnaeus import nest
from linnaeus.commands.analyze.options import Mode
from linnaeus.training.build import Assembly


@dataclass
class StateBytes:
    """Bytes of the tensors that training keeps. Memory that tensors share counts once, for the first."""

    parameters: int = 0
    buffers: int = 0
    average: int = 0
    gradients: int = 0
    optimizer_state: int = 0


@dataclass(frozen=True)
class Breakdown:
    """The parts of a peak, in bytes; they add up to it.

    Attributes:
        parameters, buffers: of the model and the loss.
        average: the EMA copy of the model.
        gradients: all of them; none in validation.
        optimizer_state: such as Adam's moments. Training's stay resident in validation.
        activations: what the peak has beyond all else: activations, the batch, workspaces of kernels.
        rest: what the process holds between steps without the tensors above: runtime and libraries on the
            CPU, workspaces and rounding of the caching allocator on an accelerator.
    """

    parameters: int
    buffers: int
    average: int
    gradients: int
    optimizer_state: int
    activations: int
    rest: int

    def parts(self) -> dict[str, int]:
        """The parts by name, in order."""
        return dict(zip((field.name for field in fields(self)), astuple(self), strict=True))


def break_down(mode: Mode, state: StateBytes, *, peak_bytes: int, floor_bytes: int) -> Breakdown:
    """Split a peak.

    >>> parts = break_down("train", StateBytes(100, 4, 0, 100, 200), peak_bytes=1500, floor_bytes=600)
    >>> parts.activations, parts.rest, sum(parts.parts().values())
    (600, 496, 1500)

    Args:
        mode: a training trial starts without optimizer state and allocates it; in validation it is there
            before and after.
        state: of the same model.
        peak_bytes: of a trial.
        floor_bytes: what the process held between the trials.
    """
    resident = state.parameters + state.buffers + state.average
    gradients = state.gradients if mode == "train" else 0
    allocated = gradients + (state.optimizer_state if mode == "train" else 0)
    if mode == "val":
        resident += state.optimizer_state
    return Breakdown(
        parameters=state.parameters,
        buffers=state.buffers,
        average=state.average,
        gradients=gradients,
        optimizer_state=state.optimizer_state,
        activations=peak_bytes - floor_bytes - allocated,
        rest=floor_bytes - resident,
    )


@contextmanager
def counting(assembly: Assembly, device: torch.device) -> Iterator[StateBytes]:
    """Bytes that are counted after each step of the optimizer inside, before the gradients are cleared."""
    state = StateBytes()

    def count(*_: object) -> None:
        _count(assembly, device, state)

    handle = assembly.optimizer.register_step_post_hook(count)
    try:
        yield state
    finally:
        handle.remove()


def _count(assembly: Assembly, device: torch.device, state: StateBytes) -> None:
    seen: set[int] = set()
    modules = [assembly.model, assembly.criterion]
    average = [assembly.ema.module] if assembly.ema is not None else []
    parameters = list(_parameters(modules))

    def total(tensors: Iterable[Tensor | None]) -> int:
        return _new_bytes((tensor for tensor in tensors if tensor is not None), device, seen)

    state.parameters = total(parameters)
    state.buffers = total(_buffers(modules))
    state.average = total([*_parameters(average), *_buffers(average)])
    state.gradients = total(parameter.grad for parameter in parameters)
    state.optimizer_state = total(nest.tensors(list(assembly.optimizer.state.values())))


def _parameters(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    for module in modules:
        yield from module.parameters()


def _buffers(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    for module in modules:
        yield from module.buffers()


def _new_bytes(tensors: Iterable[Tensor], device: torch.device, seen: set[int]) -> int:
    """Bytes of the storages on the device that have not been seen yet."""
    num_bytes = 0
    for tensor in tensors:
        if tensor.device == device and tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                num_bytes += storage.nbytes()
    return num_bytes
