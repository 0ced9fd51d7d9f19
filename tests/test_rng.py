from __future__ import annotations

import os
import random

import numpy as np
import pytest
import torch

from linnaeus.autobatch.rng import preserved_generators, rng_state, set_rng_state
from linnaeus.rng import derive_seed, seed_all, seed_generators, set_deterministic

CPU = torch.device("cpu")


def draws() -> list[float]:
    """Some of everything; an odd number of normal ones, so that a second one lies ready in each generator."""
    normal = torch.randn(3).tolist() + torch.rand(1).tolist()
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), *normal]


def test_a_seed_fixes_all_generators() -> None:
    seed_all(3)
    first = draws()
    seed_all(3)
    assert draws() == first
    seed_all(4)
    assert all(a != b for a, b in zip(draws(), first, strict=True))


def test_draws_go_on_where_the_state_was_taken() -> None:
    seed_all(2**63 - 1)
    draws()
    state = rng_state(CPU)
    expected = [draws() for _ in range(3)]
    for seed in (0, 2**32 + 5):  # later draws do not change the state
        seed_all(seed)
        set_rng_state(state, CPU)
        assert [draws() for _ in range(3)] == expected


def test_generators_go_on_as_if_nothing_had_happened() -> None:
    seed_generators(4)
    expected = draws()
    seed_generators(4)
    with preserved_generators():
        seed_generators(5)
        assert all(a != b for a, b in zip(draws(), expected, strict=True))
    assert draws() == expected
    seed_generators(4)
    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert draws() == expected


def fail_inside() -> None:
    with preserved_generators():
        draws()
        raise ZeroDivisionError


def test_seeds_are_spread_out() -> None:
    seeds = {derive_seed(s, e, i) for s in range(10) for e in range(10) for i in range(100)}
    assert len(seeds) == 10_000
    assert len({seed & 0xFFFFFFFF for seed in seeds}) > 9_990
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert derive_seed(0, 1) != derive_seed(1, 0)


def test_deterministic_kernels_set_up_cublas(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    for before, after in ((None, ":4096:8"), (":16:8", ":16:8")):
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
        set_deterministic(False)
        assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
        if before is not None:
            monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", before)
        set_deterministic(True)
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == after
    assert torch.are_deterministic_algorithms_enabled()
