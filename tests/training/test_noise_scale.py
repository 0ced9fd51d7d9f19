"""The gradient noise scale, against its exact value where that is known in closed form."""

from __future__ import annotations

import doctest
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from linnaeus.data.batch import Batch
from linnaeus.training import noise_scale
from linnaeus.training.noise_scale import GradientProbe, NoiseScale, unbiased_moments
from linnaeus.training.step import Precision, TrainStep
from tests.helpers import forks
from tests.helpers.forks import ROOT
from tests.helpers.runs import SMALL, TORCHRUN, Run

CPU = torch.device("cpu")
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
    *, size: int = 8, micro_batches: int = 4, num_steps: int = 1500, dtype: torch.dtype | None = None,
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
    source = batches(size, seed=3)
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


@pytest.mark.slow
def test_micro_batches_of_one_process_measure_the_exact_value() -> None:
    scale = measured()
    assert scale.num == 1500
    assert scale.value == pytest.approx(EXACT, rel=0.1)
    assert scale.trace / (1 - 0.999**1500) == pytest.approx(float(SIGMA.square().sum()), rel=0.1)


def test_neither_clipping_nor_a_gradient_scaler_moves_it() -> None:
    plain = measured(num_steps=200)
    assert measured(num_steps=200, clip=0.01).value == pytest.approx(plain.value, rel=1e-4)
    assert measured(num_steps=200, scaled=True).value == pytest.approx(plain.value, rel=1e-3)


@pytest.mark.parametrize(("size", "micro_batches"), [(8, 2), pytest.param(2, 8, marks=pytest.mark.slow)])
def test_it_does_not_depend_on_the_batches_that_measure_it(size: int, micro_batches: int) -> None:
    assert measured(size=size, micro_batches=micro_batches).value == pytest.approx(EXACT, rel=0.15)


def test_a_step_of_one_micro_batch_measures_nothing() -> None:
    scale = measured(micro_batches=1, num_steps=5)
    assert (scale.num, scale.value) == (0, None)


def test_steps_that_are_not_armed_are_left_alone() -> None:
    model = Point()
    probe = GradientProbe(model, torch.amp.GradScaler("cpu", enabled=False), decay=0.9)
    for number in (1, 2):
        probe.after_backward(number, 2, 8, 2)
    assert probe.scale.num == 0


def test_infinite_gradients_are_left_out() -> None:
    """As a gradient scaler leaves them out, after it has tried too large a scale."""
    model = Point()
    probe = GradientProbe(model, torch.amp.GradScaler("cpu", enabled=False), decay=0.9)
    probe.arm()
    model.w.grad = torch.tensor([1.0, 2.0, 3.0, float("inf")])
    probe.after_backward(1, 2, 8, 2)
    probe.after_backward(2, 2, 8, 2)
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


OPTIONS = (
    "TRAIN.NOISE_SCALE.ENABLED=True",
    "TRAIN.NOISE_SCALE.EVERY=1",
    "TRAIN.LOG_EVERY=1",
    "DATA.BATCH_SIZE=4",
)


def test_a_run_writes_it_down_and_says_what_it_means(run: Run, tmp_path: Path) -> None:
    options = ("TRAIN.ACCUMULATION_STEPS=3", "MODEL.NAME=test_vit", "OPTIMIZER.LR=1e-6")
    outcome = run(*SMALL, *OPTIONS, *options)
    assert outcome.code == 0, outcome.err
    records = map(json.loads, (tmp_path / "runs/small/metrics.jsonl").read_text().splitlines())
    found = [record["noise_scale"] for record in records if "noise_scale" in record]
    assert len(found) >= 4  # noise hides the gradient now and then
    assert all(value > 0 for value in found)
    assert f"below about {found[-1]:.0f} samples per step, doubling the batch almost halves" in outcome.out


def test_a_run_that_goes_on_goes_on_measuring(run: Run, tmp_path: Path) -> None:
    options = (
        *SMALL,
        *OPTIONS,
        "TRAIN.ACCUMULATION_STEPS=2",
        "TRAIN.AUTO_RESUME=True",
        "SCHEDULE.NAME=constant",
    )
    assert run(*options, "TRAIN.EPOCHS=1").code == 0
    assert run(*options, "TRAIN.EPOCHS=2").code == 0
    checkpoint = torch.load(tmp_path / "runs/small/checkpoints/last.pt", weights_only=True)
    assert checkpoint["noise_scale"]["num"] == 2 * 96 // 8


def test_without_two_batch_sizes_the_error_says_what_is_needed(run: Run, tmp_path: Path) -> None:
    for options in ((), ("TRAIN.EFFECTIVE_BATCH_SIZE=4",)):
        outcome = run(*SMALL, *OPTIONS, *options)
        assert outcome.code == 2
        for key in ("TRAIN.NOISE_SCALE.ENABLED", "TRAIN.ACCUMULATION_STEPS", "torchrun"):
            assert key in outcome.err


def torchrun(folder: Path, text: str, *argv: str) -> str:
    """The last line that a program prints in two processes; gloo of torch 2.8 prints others before."""
    program = folder / "ranks.py"
    program.write_text(text)
    command = (*TORCHRUN, "--nproc_per_node=2", program, *argv)
    outcome = forks.python(*command, cwd=folder, env={"PYTHONPATH": str(ROOT)})
    assert outcome.code == 0, outcome.err
    return outcome.out.splitlines()[-1]


RANKS = """
import json, sys, torch
from linnaeus.config.schema import DistConfig
from linnaeus.dist import join, wrap
from linnaeus.training.noise_scale import GradientProbe
from linnaeus.training.step import Precision, TrainStep
from tests.training.test_noise_scale import CPU, Point, batches, half_square


def main():  # nothing of the process group may live on until the interpreter ends
    with join("cpu", DistConfig(TIMEOUT_MINUTES=2)) as world:
        model = wrap(Point(), world)
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        probe = GradientProbe(model, scaler, decay=0.999)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        step = TrainStep(
            model, half_square, optimizer, scaler, Precision(CPU), clip_grad_norm=0.1, probe=probe
        )
        source = batches(4, seed=world.rank)
        for _ in range(1000):
            probe.arm()
            step(source, int(sys.argv[1]))
        if world.is_main:
            print(json.dumps([probe.scale.num, probe.scale.value]))

main()
"""


SAME = """
import json, torch
from torch import nn
from linnaeus.data.batch import Batch
from linnaeus.config.schema import DistConfig
from linnaeus.dist import join, wrap
from linnaeus.training.noise_scale import GradientProbe
from linnaeus.training.step import Precision, TrainStep
from tests.training.test_noise_scale import CPU, batches, half_square

class Sometimes(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.never = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.b(self.a(x)) if x[0, 0] > 0.6 else self.a(x)


def main():  # nothing of the process group may live on until the interpreter ends
    with join("cpu", DistConfig(TIMEOUT_MINUTES=2)) as world:
        found = []
        for probed in (False, True):
            torch.manual_seed(0)
            module = Sometimes()
            model = wrap(module, world, find_unused_parameters=True)
            scaler = torch.amp.GradScaler("cpu", enabled=False)
            probe = GradientProbe(model, scaler, decay=0.9) if probed else None
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            step = TrainStep(
                model, half_square, optimizer, scaler, Precision(CPU), clip_grad_norm=1.0, probe=probe
            )
            source = batches(4, seed=world.rank)
            for number in range(12):
                if probed and number % 3:
                    probe.arm()
                step(source, 2)
            found.append([parameter.flatten().tolist() for parameter in module.parameters()])
        if world.is_main:
            print(json.dumps(found))

main()
"""


@pytest.mark.distributed
def test_ranks_train_the_same_with_and_without_measuring(tmp_path: Path) -> None:
    """Also where a rank leaves some parameters out of a step, and all leave out others."""
    without, with_probe = json.loads(torchrun(tmp_path, SAME))
    for ours, theirs in zip(with_probe, without, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-7)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_several_ranks_measure_the_exact_value(tmp_path: Path, micro_batches: int) -> None:
    num, value = json.loads(torchrun(tmp_path, RANKS, str(micro_batches)))
    assert num == 1000
    assert value == pytest.approx(EXACT, rel=0.12)
