"""Save and restore the states of random number generators."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

_CPU = torch.device("cpu")


def numpy() -> Any:
    """Return NumPy if this process has imported it, as torch does where it is installed; else None."""
    return sys.modules.get("numpy")


def rng_state(device: torch.device) -> dict[str, Any]:
    """Return the state of all global generators that a step on this device may draw from.

    It consists of tensors and plain values, so that a checkpoint with it loads with `weights_only`.
    """
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if np := numpy():
        kind, keys, *rest = np.random.get_state(legacy=True)
        # torch cannot pickle a tensor of uint32, and gathering the states of all ranks pickles them.
        state["numpy"] = (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest)
    if device.type != "cpu":
        state["device"] = torch.get_device_module(device).get_rng_state(device)
    return state


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore the state from `rng_state`; the generator of another kind of device is left alone."""
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    if "numpy" in state and (np := numpy()):
        kind, keys, *rest = state["numpy"]
        np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if "device" in state and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(state["device"], device)


def restore_of_generator(value: Any) -> Callable[[], object] | None:
    """Return a function that restores a random number generator; None for anything else."""
    state: Any
    write: Callable[[Any], object]
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        state, write = value.getstate(), value.setstate
    elif isinstance(value, torch.Generator):
        state, write = value.get_state().clone(), value.set_state
    elif (np := numpy()) and isinstance(value, np.random.RandomState):
        state, write = value.get_state(), value.set_state
    elif np and isinstance(value, np.random.Generator):
        state = copy.deepcopy(value.bit_generator.state)
        write = partial(setattr, value.bit_generator, "state")
    else:
        return None
    return lambda: write(copy.deepcopy(state))


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Restore the global generators of Python, NumPy and torch on the CPU when the context ends."""
    state = rng_state(_CPU)
    try:
        yield
    finally:
        set_rng_state(state, _CPU)
