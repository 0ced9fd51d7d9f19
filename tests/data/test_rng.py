from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from linnaeus.data.rng import derive_seed, preserved_generators, seed_generators


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_generators_go_on_as_if_nothing_had_happened() -> None:
    seed_generators(4)
    expected = draw()
    seed_generators(4)
    with preserved_generators():
        seed_generators(5)
        assert all(a != b for a, b in zip(draw(), expected, strict=True))
    assert draw() == expected
    seed_generators(4)
    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert draw() == expected


def fail_inside() -> None:
    with preserved_generators():
        draw()
        raise ZeroDivisionError


def test_seeds_are_spread_out() -> None:
    seeds = {derive_seed(s, e, i) for s in range(10) for e in range(10) for i in range(100)}
    assert len(seeds) == 10_000
    assert len({seed & 0xFFFFFFFF for seed in seeds}) > 9_990
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert derive_seed(0, 1) != derive_seed(1, 0)
