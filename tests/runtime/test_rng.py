import os
import random
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from linnaeus.autobatch.state.rng import preserved_generators, rng_state, set_rng_state
from linnaeus.config.schema import ExperimentConfig
from linnaeus.runtime.rng import derive_seed, kernels, seed_all, seed_generators
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
        return super().forward(points)


def draws():
    """Some of everything; an odd number of normal ones, so that a second one lies ready in each generator."""
    normal = torch.randn(3).tolist() + torch.rand(1).tolist()
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), *normal]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_accelerator_takes_the_kernels_asked_for(device):
    """The CPU does not: there the setting may change results."""

    def now():
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark

    assert now() == ("highest", False)
    with kernels(ExperimentConfig(CUDNN_BENCHMARK=True), torch.device(device)):
        assert now() == (("highest", False) if device == "cpu" else ("high", True))
    assert now() == ("highest", False)


def test_generators_go_on_as_if_nothing_had_happened():
    seed_all(2**63 - 1)
    first = draws()
    seed_all(2**63 - 1)
    assert draws() == first
    state = rng_state(CPU)
    expected = draws()
    set_rng_state(state, CPU)
    with suppress(ZeroDivisionError), preserved_generators():
        seed_generators(5)
        assert all(a != b for a, b in zip(draws(), expected, strict=True))
        raise ZeroDivisionError
    assert draws() == expected


@pytest.mark.parametrize("before", [None, ":16:8"])
def test_a_deterministic_run_puts_the_callers_setting_back(run, request, monkeypatch, before):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    if before is None:
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    request.addfinalizer(lambda: torch.set_deterministic_debug_mode(0))
    torch.set_deterministic_debug_mode(1)
    options = (f"MODEL._target_={__name__}.Spy", "TRAIN.EPOCHS=1")
    for is_wanted in (False, True):
        MODES.clear()
        run(*PLAIN, *options, f"TRAIN.DETERMINISTIC={is_wanted}").ok()
        workspace = before or (":4096:8" if is_wanted else None)
        assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == workspace
        assert {*MODES} == {2 if is_wanted else 1}
        assert torch.get_deterministic_debug_mode() == 1


@pytest.mark.e2e
def test_no_rank_has_the_stream_of_another_seed(torchrun, tmp_path):
    spy = (*PLAIN, f"MODEL._target_={__name__}.Spy", f"MODEL.folder={tmp_path}", "TRAIN.EPOCHS=1")
    torchrun(2, *spy, "EXPERIMENT.SEED=5").ok()
    first, second = ((tmp_path / rank).read_text() for rank in "01")
    assert first == "5"
    assert "6" != second == str(derive_seed(5, 1))
