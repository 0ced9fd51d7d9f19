"""The gradient noise scale, against its exact value where that is known in closed form."""

from __future__ import annotations

import doctest
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from linnaeus import noise_scale
from linnaeus.data.batch import Batch
from linnaeus.noise_scale import GradientProbe, NoiseScale, unbiased_moments
from linnaeus.step import Precision, TrainStep

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[1]
MEAN = torch.tensor([0.6, -0.8, 0.0, 1.0])
SIGMA = torch.tensor([1.0, 2.0, 0.5, 3.0])
EXACT = float(SIGMA.square().sum() / MEAN.square().sum())
"""Samples are N(MEAN, diag(SIGMA²)). With w = 0 and the loss |w - x|²/2, the gradient of one is -x."""


class Point(nn.Module):
    """The distance of a parameter at 0 to each sample, [B, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.w - x


def half_square(outputs: Tensor, _: Tensor) -> Tensor:
    return outputs.square().sum(dim=1).mean() / 2


def batches(size: int, seed: int) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = MEAN + SIGMA * torch.randn(size, 4, generator=generator)
        yield Batch(x, torch.zeros(size, dtype=torch.long))


def measured(
    *, size: int = 8, micro_batches: int = 4, num_steps: int = 4000, dtype: torch.dtype | None = None,
    clip: float | None = None, scaled: bool = False,
) -> NoiseScale:  # fmt: skip
    """What real training steps at a rate of 0 measure."""
    model = Point()
    scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=1024.0)
    probe = GradientProbe(model, scaler, decay=0.999)
    step = TrainStep(
        model, half_square, torch.optim.SGD(model.parameters(), lr=0.0), scaler, Precision(CPU, dtype),
        clip_grad_norm=clip, probe=probe,
    )  # fmt: skip
    source = batches(size, seed=0)
    for _ in range(num_steps):
        probe.arm()
        step(source, micro_batches)
    return probe.scale


def test_the_examples_in_the_docstrings() -> None:
    assert doctest.testmod(noise_scale).failed == 0


@given(st.floats(0.01, 100), st.floats(0.01, 100), st.integers(1, 500), st.integers(1, 500))
def test_expected_norms_give_the_exact_moments(
    gradient_sq: float, trace: float, small: int, more: int
) -> None:
    large = small + more
    found = unbiased_moments(small, gradient_sq + trace / small, large, gradient_sq + trace / large)
    assert found == pytest.approx((gradient_sq, trace), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(("small", "large"), [(8, 8), (8, 4), (0, 4)])
def test_equal_batches_are_refused(small: int, large: int) -> None:
    with pytest.raises(ValueError, match="must be larger"):
        unbiased_moments(small, 1.0, large, 1.0)


def test_micro_batches_of_one_process_measure_the_exact_value() -> None:
    scale = measured()
    assert scale.num == 4000
    assert scale.value == pytest.approx(EXACT, rel=0.1)
    assert scale.trace / (1 - 0.999**4000) == pytest.approx(float(SIGMA.square().sum()), rel=0.1)


def test_neither_clipping_nor_a_gradient_scaler_moves_it() -> None:
    plain = measured(num_steps=200)
    assert measured(num_steps=200, clip=0.01).value == pytest.approx(plain.value, rel=1e-4)
    assert measured(num_steps=200, scaled=True).value == pytest.approx(plain.value, rel=1e-3)


def test_it_does_not_depend_on_the_batches_that_measure_it() -> None:
    assert measured(size=2, micro_batches=8).value == pytest.approx(EXACT, rel=0.15)
    assert measured(size=8, micro_batches=2).value == pytest.approx(EXACT, rel=0.15)


def test_a_step_of_one_micro_batch_measures_nothing() -> None:
    scale = measured(micro_batches=1, num_steps=5)
    assert (scale.num, scale.value) == (0, None)


def test_steps_that_are_not_armed_are_left_alone() -> None:
    model = Point()
    probe = GradientProbe(model, torch.amp.GradScaler("cpu", enabled=False), decay=0.9)
    for number in (1, 2):
        probe.after_backward(number, 2, 8)
    assert probe.scale.num == 0


def test_infinite_gradients_are_left_out() -> None:
    """As a gradient scaler leaves them out, after it has tried too large a scale."""
    model = Point()
    probe = GradientProbe(model, torch.amp.GradScaler("cpu", enabled=False), decay=0.9)
    probe.arm()
    model.w.grad = torch.tensor([1.0, 2.0, 3.0, float("inf")])
    probe.after_backward(1, 2, 8)
    probe.after_backward(2, 2, 8)
    assert probe.scale.num == 0


def test_measuring_changes_no_bit_of_the_training() -> None:
    def weights(decay: float | None) -> Tensor:
        model = Point()
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        probe = None if decay is None else GradientProbe(model, scaler, decay=decay)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        step = TrainStep(
            model, half_square, optimizer, scaler, Precision(CPU), clip_grad_norm=1.0, probe=probe
        )
        source = batches(8, seed=1)
        for _ in range(20):
            if probe is not None:
                probe.arm()
            step(source, 3)
        return model.w.detach()

    assert torch.equal(weights(None), weights(0.9))


def test_a_checkpoint_keeps_the_averages() -> None:
    before = measured(num_steps=50)
    after = NoiseScale(0.999)
    after.load_state_dict(before.state_dict())
    assert after == before


RANKS = """
import json, sys, torch
from datetime import timedelta
from linnaeus.dist import join, wrap
from linnaeus.noise_scale import GradientProbe
from linnaeus.step import Precision, TrainStep
from tests.test_noise_scale import CPU, Point, batches, half_square

with join("cpu", "gloo", timedelta(minutes=2)) as world:
    model = wrap(Point(), world)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    probe = GradientProbe(model, scaler, decay=0.999)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step = TrainStep(model, half_square, optimizer, scaler, Precision(CPU), clip_grad_norm=0.1, probe=probe)
    source = batches(4, seed=world.rank)
    for _ in range(3000):
        probe.arm()
        step(source, int(sys.argv[1]))
    if world.is_main:
        print(json.dumps([probe.scale.num, probe.scale.value]))
"""


@pytest.mark.distributed
@pytest.mark.parametrize("micro_batches", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_several_ranks_measure_the_exact_value(tmp_path: Path, micro_batches: int) -> None:
    program = tmp_path / "ranks.py"
    program.write_text(RANKS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*command, str(program), str(micro_batches)],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=200, check=True,
    )  # fmt: skip
    num, value = json.loads(done.stdout)
    assert num == 3000
    assert value == pytest.approx(EXACT, rel=0.12)
