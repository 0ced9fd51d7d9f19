import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from linnaeus.autobatch.state.rng import preserved_generators, rng_state, set_rng_state
from linnaeus.config.schema import ExperimentConfig
from linnaeus.runtime.rng import derive_seed, deterministic, kernels, seed_all, seed_generators
from tests.helpers.small_runs import PLAIN, Layers

CPU = torch.device("cpu")
MODES = []
"""torch's setting at each forward pass of `Spy`."""


class Spy(Layers):
    """Notes torch's setting, and in a file the seed of this process."""

    def __init__(self, num_classes, folder=""):
        super().__init__(num_classes)
        self.folder = folder

    def forward(self, points):
        MODES.append(torch.get_deterministic_debug_mode())
        if self.folder:
            Path(self.folder, os.environ.get("RANK", "0")).write_text(str(torch.initial_seed()))
        outputs = super().forward(points)
        return outputs


def draws():
    """Some of everything; an odd number of normal ones, so that a second one lies ready in each generator."""
    normal = torch.randn(3).tolist() + torch.rand(1).tolist()
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), *normal]


def kernels_now():
    return torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_accelerator_takes_the_kernels_asked_for(device):
    """The CPU does not: there the setting may change results."""
    before, config = kernels_now(), ExperimentConfig(CUDNN_BENCHMARK=True)
    assert before == ("highest", False)
    with kernels(config, torch.device(device)):
        assert kernels_now() == (before if device == "cpu" else ("high", True))
    assert kernels_now() == before


def test_a_seed_fixes_all_generators():
    seed_all(3)
    first = draws()
    seed_all(3)
    assert draws() == first
    seed_all(4)
    assert all(a != b for a, b in zip(draws(), first, strict=True))


def test_draws_go_on_where_the_state_was_taken():
    seed_all(2**63 - 1)
    draws()
    state = rng_state(CPU)
    expected = [draws() for _ in range(3)]
    for seed in (0, 2**32 + 5):  # later draws do not change the state
        seed_all(seed)
        set_rng_state(state, CPU)
        assert [draws() for _ in range(3)] == expected


def test_generators_go_on_as_if_nothing_had_happened():
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


def fail_inside():
    with preserved_generators():
        draws()
        raise ZeroDivisionError


def test_seeds_are_spread_out():
    seeds = {derive_seed(s, e, i) for s in range(10) for e in range(10) for i in range(100)}
    assert len(seeds) == 10_000
    assert len({seed & 0xFFFFFFFF for seed in seeds}) > 9_990
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert derive_seed(0, 1) != derive_seed(1, 0)


def test_deterministic_kernels_set_up_cublas(monkeypatch, request):
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    for before, after in ((None, ":4096:8"), (":16:8", ":16:8")):
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
        with deterministic(False):
            assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
        if before is not None:
            monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", before)
        with deterministic(True):
            assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == after
            assert torch.are_deterministic_algorithms_enabled()
        assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("enabled", [False, True])
def test_the_callers_setting_is_put_back(request, monkeypatch, mode, enabled):
    """And it is left alone if nothing is enabled."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    request.addfinalizer(lambda: torch.set_deterministic_debug_mode(0))
    torch.set_deterministic_debug_mode(mode)
    with deterministic(enabled):
        assert torch.get_deterministic_debug_mode() == (2 if enabled else mode)
    assert torch.get_deterministic_debug_mode() == mode


def test_a_run_puts_the_callers_setting_back(run, request, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    request.addfinalizer(lambda: torch.set_deterministic_debug_mode(0))
    torch.set_deterministic_debug_mode(1)
    MODES.clear()
    options = (f"MODEL._target_={__name__}.Spy", "TRAIN.DETERMINISTIC=True", "TRAIN.EPOCHS=1")
    assert run(*PLAIN, *options).code == 0
    assert {*MODES} == {2}
    assert torch.get_deterministic_debug_mode() == 1


@pytest.mark.e2e
@pytest.mark.distributed
def test_no_rank_has_the_stream_of_another_seed(torchrun, tmp_path):
    spy = (*PLAIN, f"MODEL._target_={__name__}.Spy", f"MODEL.folder={tmp_path}", "TRAIN.EPOCHS=1")
    assert torchrun(2, *spy, "EXPERIMENT.SEED=5").code == 0
    first, second = ((tmp_path / rank).read_text() for rank in "01")
    assert first == "5"
    assert "6" != second == str(derive_seed(5, 1))
