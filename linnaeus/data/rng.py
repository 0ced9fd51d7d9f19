"""Random numbers that belong to one sample, and the global generators left as they were."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

_MASK = (1 << 64) - 1


def derive_seed(*parts: int) -> int:
    """A 64-bit seed from whole numbers; close inputs give unrelated seeds.

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


def seed_generators(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch on the CPU; devices are not touched."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    # torch.manual_seed would also reset the generators of every accelerator.
    torch.default_generator.manual_seed(seed)


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Whatever happens inside, the three global CPU generators go on afterwards as if it had not."""
    python, numpy, torch_state = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.default_generator.set_state(torch_state)
