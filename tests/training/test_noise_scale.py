"""The gradient noise scale, against its exact value where that is known in closed form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from linnaeus.data.batch import Batch
from linnaeus.training.callbacks import CallbackState, MicroBatch
from linnaeus.training.noise_scale import GradientProbe, NoiseScale
from linnaeus.training.precision import Precision
from linnaeus.training.step import TrainStep
from tests.helpers.runs import SMALL, Run
from tests.helpers.small_models import Point, half_square

CPU = torch.device("cpu")
MEAN = torch.tensor([0.6, -0.8, 0.0, 1.0])
SIGMA = torch.tensor([1.0, 2.0, 0.5, 3.0])
EXACT = float(SIGMA.square().sum() / MEAN.square().sum())
"""Samples are N(MEAN, diag(SIGMA²)). With w = 0 and the loss |w - x|²/2, the gradient of one is -x."""


def batches(size: int, seed: int) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = MEAN + SIGMA * torch.randn(size, 4, generator=generator)
        yield Batch(x, torch.zeros(size, dtype=torch.long))


def measured(
    *,
    size: int = 8,
    micro_batches: int = 4,
    num_steps: int = 1500,
    dtype: torch.dtype | None = None,
    clip: float | None = None,
    scaled: bool = False,
) -> NoiseScale:
    """What real training steps at a rate of 0 measure."""
    model = Point()
    scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=1024.0)
    step = TrainStep(
        model,
        half_square,
        torch.optim.SGD(model.parameters(), lr=0.0),
        scaler,
        Precision(CPU, dtype),
        clip_grad_norm=clip,
    )
    probe = step.callbacks["noise scale"] = GradientProbe(step, decay=0.999)
    source = batches(size, seed=3)
    for _ in range(num_steps):
        step(source, micro_batches)
    return probe.scale


def plain_step(model: Point) -> TrainStep:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    return TrainStep(model, half_square, optimizer, scaler, Precision(CPU), clip_grad_norm=1.0)


def by_hand(size: int, micro_batches: int, num_steps: int) -> NoiseScale:
    """From the gradients of the same samples: that of one is -x."""
    scale, source = NoiseScale(0.999), batches(size, seed=3)
    for _ in range(num_steps):
        means = [next(source).inputs.mean(dim=0) for _ in range(micro_batches)]
        whole = torch.stack(means).mean(dim=0)
        norms = [float(mean.square().sum()) for mean in (means[0], whole)]
        scale.add(size, norms[0], size * micro_batches, norms[1])
    return scale


@pytest.mark.parametrize("options", [{}, {"scaled": True, "clip": 0.01}])
def test_it_is_measured_before_clipping_and_without_the_scale_of_the_loss(
    options: dict[str, Any],
) -> None:
    sizes = {"size": 3, "micro_batches": 4, "num_steps": 20}
    found, expected = measured(**sizes, **options), by_hand(**sizes)
    assert found.num == 20
    assert found.gradient_sq == pytest.approx(expected.gradient_sq, rel=1e-4)
    assert found.trace == pytest.approx(expected.trace, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "micro_batches"), [(8, 4), (8, 2), (2, 8)])
def test_it_does_not_depend_on_the_batches_that_measure_it(size: int, micro_batches: int) -> None:
    assert measured(size=size, micro_batches=micro_batches).value == pytest.approx(EXACT, rel=0.15)


def test_a_step_of_one_micro_batch_measures_nothing() -> None:
    scale = measured(micro_batches=1, num_steps=5)
    assert (scale.num, scale.value) == (0, None)


def test_infinite_gradients_are_left_out() -> None:
    """As a gradient scaler leaves them out, after it has tried too large a scale."""
    model = Point()
    step = plain_step(model)
    probe = GradientProbe(step, decay=0.9)
    state = CallbackState(model, step.optimizer)
    probe.on_step_start(state)
    model.w.grad = torch.tensor([1.0, 2.0, 3.0, float("inf")])
    for number in (1, 2):
        probe.on_backward(replace(state, micro_batch=MicroBatch(number, 2, 8, 2)))
    assert probe.scale.num == 0


def test_measuring_changes_no_bit_of_the_training() -> None:
    def weights(decay: float | None) -> Tensor:
        model = Point()
        step = plain_step(model)
        if decay is not None:
            step.callbacks["noise scale"] = GradientProbe(step, decay=decay)
        source = batches(8, seed=1)
        for _ in range(20):
            step(source, 3)
        return model.w.detach()

    assert torch.equal(weights(None), weights(0.9))


def test_a_checkpoint_keeps_the_averages() -> None:
    before = measured(num_steps=50)
    after = NoiseScale(0.999)
    after.load_state_dict(before.state_dict())
    assert after == before


@pytest.mark.e2e
def test_a_run_writes_it_down_and_goes_on_measuring(run: Run, tmp_path: Path) -> None:
    options = (
        *SMALL,
        "TRAIN.NOISE_SCALE.ENABLED=True",
        "TRAIN.NOISE_SCALE.EVERY=1",
        "TRAIN.LOG_EVERY=1",
        "DATA.BATCH_SIZE=4",
        "TRAIN.ACCUMULATION_STEPS=2",
        "MODEL.NAME=test_vit",
        "OPTIMIZER.LR=1e-6",
        "TRAIN.AUTO_RESUME=True",
        "SCHEDULE.NAME=constant",
    )
    assert run(*options, "TRAIN.EPOCHS=1").code == 0
    outcome = run(*options, "TRAIN.EPOCHS=2")
    assert outcome.code == 0, outcome.err
    checkpoint = torch.load(tmp_path / "runs/small/checkpoints/last.pt", weights_only=True)
    assert checkpoint["noise_scale"]["num"] == 2 * 96 // 8
    records = map(json.loads, (tmp_path / "runs/small/metrics.jsonl").read_text().splitlines())
    found = [record["noise_scale"] for record in records if "noise_scale" in record]
    assert len(found) >= 4  # noise hides the gradient now and then
    assert all(value > 0 for value in found)
    assert f"{found[-1]:.0f} samples" in outcome.out
