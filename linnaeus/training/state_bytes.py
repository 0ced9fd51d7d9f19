"""Bytes of the tensors that training keeps from step to step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from linnaeus.autobatch import nest
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


def state_bytes(assembly: Assembly, device: torch.device) -> StateBytes:
    """Count what a run's objects hold on a device now."""
    modules = nn.ModuleList([assembly.model, assembly.criterion])
    average = nn.ModuleList([] if assembly.ema is None else [assembly.ema.module])
    total = partial(_new_bytes, device=device, seen=set())
    return StateBytes(
        parameters=total(modules.parameters()),
        buffers=total(modules.buffers()),
        average=total([*average.parameters(), *average.buffers()]),
        gradients=total(parameter.grad for parameter in modules.parameters()),
        optimizer_state=total(nest.tensors(list(assembly.optimizer.state.values()))),
    )


def _new_bytes(tensors: Iterable[Tensor | None], device: torch.device, seen: set[int]) -> int:
    """Bytes of the storages on the device that are not in `seen` yet; they are added to it."""
    num_bytes = 0
    for tensor in tensors:
        if tensor is not None and tensor.device == device and tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            place = storage._cdata if tensor.is_meta else storage.data_ptr()  # on `meta` there are no places
            if place not in seen:
                seen.add(place)
                num_bytes += storage.nbytes()
    return num_bytes
