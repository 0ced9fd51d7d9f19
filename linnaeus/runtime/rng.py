"""Reproducibility: seeds of generators and samples, and the kernels that torch may use."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from linnaeus.autobatch.state.rng import numpy

_MASK = (1 << 64) - 1


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


class LentGenerators:
    """Context that reads samples: the global generators are in a fixed state, and are restored at its end.

    NumPy's generator is swapped, which is cheaper than a copy. This loses the second of two normal numbers
    that NumPy draws at a time. Contexts must not be nested.
    """

    def __init__(self) -> None:
        first = random.Random(0)
        self._python, self._first_number = first.getstate(), first.random()
        self._torch = torch.Generator().manual_seed(0).get_state()
        np = numpy()
        self._numpy = [np.random.MT19937(0) for _ in range(2)] if np else []

    def __enter__(self) -> LentGenerators:
        self._before = random.getstate(), torch.get_rng_state()
        random.setstate(self._python)
        torch.set_rng_state(self._torch)
        if self._numpy:
            np = numpy()
            self._bits_before = np.random.get_bit_generator()
            np.random.set_bit_generator(self._numpy[0])
        return self

    def __exit__(self, *_: object) -> None:
        random.setstate(self._before[0])
        torch.set_rng_state(self._before[1])
        if self._numpy:
            numpy().random.set_bit_generator(self._bits_before)

    def are_untouched(self) -> bool:
        """Return whether no number was drawn since the context began. Valid only until it returns False."""
        return (
            random.random() == self._first_number
            and torch.equal(torch.get_rng_state(), self._torch)
            and len({bits.random_raw() for bits in self._numpy}) < 2  # of one sequence
        )


@contextmanager
def deterministic(enabled: bool) -> Iterator[None]:
    """Context in which torch uses deterministic kernels only, if enabled. Enter it before CUDA is used.

    The caller's setting is restored at the end. cuBLAS reads its workspace size from the environment when it
    starts; an existing value is kept.
    """
    before = torch.get_deterministic_debug_mode()
    if enabled:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


class DeviceSettings(Protocol):
    """The keys of `EXPERIMENT` that choose device and kernels."""

    DEVICE: str
    MATMUL_PRECISION: str
    CUDNN_BENCHMARK: bool


@contextmanager
def kernels(config: DeviceSettings, device: torch.device) -> Iterator[None]:
    """Context in which an accelerator uses the kernels of the configuration.

    The CPU keeps the caller's settings, because they may change its results too.
    """
    if device.type == "cpu":
        yield
        return
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    torch.set_float32_matmul_precision(config.MATMUL_PRECISION)
    torch.backends.cudnn.benchmark = config.CUDNN_BENCHMARK
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.benchmark = before[1]


def derive_seed(*parts: int) -> int:
    """Return a 64-bit seed from integers; similar inputs give unrelated seeds.

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
