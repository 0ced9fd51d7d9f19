"""Random number generators: seeding, saving and restoring the global ones; seeds of single samples."""

from __future__ import annotations

import copy
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

_CPU = torch.device("cpu")
_MASK = (1 << 64) - 1


def numpy() -> Any:
    """NumPy, if anything in this process has imported it: torch does where it is installed. Else None."""
    return sys.modules.get("numpy")


def seed_all(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch on every device."""
    seed_generators(seed)
    torch.manual_seed(seed)


def seed_generators(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch on the CPU; other devices are not touched."""
    random.seed(seed)
    if np := numpy():
        np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)


def set_deterministic(enabled: bool) -> None:
    """Let torch use deterministic kernels only, or any. Call it before CUDA is used.

    cuBLAS reads the size of its workspace from the environment when it starts; a value that is there is kept.
    """
    if enabled:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(enabled)


def rng_state(device: torch.device) -> dict[str, Any]:
    """The state of all global generators that a step on this device may draw from.

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
    """Restore what `rng_state` returned; the generator of another kind of device is left alone."""
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    if "numpy" in state and (np := numpy()):
        kind, keys, *rest = state["numpy"]
        np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if "device" in state and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(state["device"], device)


def restore_of_generator(value: Any) -> Callable[[], object] | None:
    """Puts the state of a random number generator back; None for anything else."""
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


def derive_seed(*parts: int) -> int:
    """A 64-bit seed from integers; similar inputs give unrelated seeds.

    The mixing is the finaliser of SplitMix64 (Steele, Lea and Flood, 2014).

    >>> derive_seed(0, 1, 2) == derive_seed(0, 1, 2), derive_seed(0, 1, 2) == derive_seed(0, 2, 1)
    (True, False)
    """
    state = 0
    for part in parts:
        state = (state + part + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Restore the global generators of Python, NumPy and torch on the CPU when the context ends."""
    state = rng_state(_CPU)
    try:
        yield
    finally:
        set_rng_state(state, _CPU)
