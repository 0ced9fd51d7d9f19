"""What a training run does on the host and what on the device, for the stand-in on CPU tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

import linnaeus.autobatch.sizes
import linnaeus.training.checkpoint
import linnaeus.training.step
import linnaeus.training.trainer
from linnaeus import nest
from linnaeus.data.batch import Batch, BatchSpec, to_device
from linnaeus.data.loader import BatchLoader, _Batches
from linnaeus.memory.device import CudaMemory, empty_cache
from linnaeus.training.build import Assembly
from tests.helpers.fake_cuda import DEVICE, FakeCuda

_ON_THE_HOST = (
    (BatchLoader, "__iter__"),
    (_Batches, "__next__"),
    (BatchSpec, "__init__"),
    (linnaeus.training.checkpoint, "_host_copy"),
    (linnaeus.training.checkpoint, "load_checkpoint"),
    (linnaeus.training.trainer, "rng_state"),
)
"""What works in the memory of the host when the device is a card: loading, samples of trials, checkpoints."""


@contextmanager
def holding(cuda: FakeCuda, assembly: Assembly) -> Iterator[None]:
    """Inside the context, a run takes the memory of the stand-in that it would take of a card.

    The loader's batches are on the host, and each is copied to the device where the step places it. So is
    the optimizer's state when a checkpoint is loaded.

    Args:
        cuda: the device.
        assembly: what is trained; its parameters, buffers and optimizer state are on the device already.
    """
    average = () if assembly.ema is None else (assembly.ema.module,)
    on_device = assembly.model, *average, assembly.criterion, assembly.metrics, assembly.optimizer
    with pytest.MonkeyPatch.context() as patch, cuda.installed(*on_device):
        for owner, name in _ON_THE_HOST:
            patch.setattr(owner, name, _on_the_host(getattr(owner, name)))
        patch.setattr(_Batches, "__next__", _marked(_Batches.__next__))
        patch.setattr(linnaeus.training.step, "to_device", _copied_to_device)
        patch.setattr(linnaeus.training.checkpoint, "empty_cache", lambda device: empty_cache(DEVICE))
        patch.setattr(linnaeus.autobatch.sizes, "device_memory", lambda device: CudaMemory(DEVICE))
        load = torch.optim.Optimizer._process_value_according_to_param_policy
        policy = staticmethod(_copied_unless_a_count(load))
        patch.setattr(torch.optim.Optimizer, "_process_value_according_to_param_policy", policy)
        yield


@contextmanager
def on_the_host() -> Iterator[None]:
    """Inside the context, nothing is allocated on the device."""
    with _disable_current_modes():
        yield


def _on_the_host(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def work(*args: Any, **kwargs: Any) -> Any:
        with on_the_host():
            return function(*args, **kwargs)

    return work


def _marked(function: Callable[[_Batches], Batch]) -> Callable[[_Batches], Batch]:
    """Mark the tensors that are on the host; a trial's are not."""

    def mark(batches: _Batches) -> Batch:
        batch = function(batches)
        for tensor in nest.tensors(batch):
            tensor.is_on_the_host = True  # type: ignore[attr-defined]
        return batch

    return mark


def _copied_to_device(batch: Batch, device: torch.device, **options: Any) -> Batch:
    def copy(leaf: Any) -> Any:
        return leaf.clone() if getattr(leaf, "is_on_the_host", False) else leaf

    return to_device(nest.map_leaves(copy, batch), device, **options)


def _copied_unless_a_count(policy: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def load(parameter: Tensor, value: Tensor, number: int, groups: Any, key: str | None = None) -> Tensor:
        loaded = policy(parameter, value, number, groups, key)
        return loaded if key == "step" else loaded.clone()

    return load
