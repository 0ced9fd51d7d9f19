"""Reproducible numbers: seeds of generators and of single samples, and the kernels that torch may use."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

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


def next_numbers() -> tuple[float, float, int]:
    """Draw a number from each generator that `seed_generators` seeds."""
    np = numpy()
    return (
        random.random(),
        np.random.random_sample() if np else 0.0,
        int(torch.randint(1 << 62, (), device="cpu")),
    )


@contextmanager
def lent_generators() -> Iterator[None]:
    """Context that reads samples: the global generators may be seeded, and are restored at its end.

    One thing is lost: the second of two normal numbers that NumPy draws at a time. In exchange NumPy's
    generator is swapped, which is cheap, and not copied. Contexts must not be nested.
    """
    np, python, torch_state = numpy(), random.getstate(), torch.get_rng_state()
    bits = np.random.get_bit_generator() if np else None
    if np:
        np.random.set_bit_generator(_sample_bits())
    try:
        yield
    finally:
        random.setstate(python)
        torch.set_rng_state(torch_state)
        if np:
            np.random.set_bit_generator(bits)


@cache
def _sample_bits() -> Any:
    return numpy().random.MT19937(0)


@contextmanager
def deterministic(enabled: bool) -> Iterator[None]:
    """Context in which torch uses deterministic kernels only, if enabled. Enter it before CUDA is used.

    Otherwise the setting stays that of the caller, and it is put back at the end. cuBLAS reads the size of
    its workspace from the environment when it starts; a value that is there is kept.
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

    The CPU keeps the caller's: there torch's setting may change results too.
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
