"""The average of the weights."""

import pytest
import torch
from torch import nn

from linnaeus.main import cli
from linnaeus.metrics import larger_is_better
from linnaeus.training.ema import Ema
from tests.helpers.runs import checkpoint_of
from tests.helpers.small_runs import assert_same_states, curve, lines_of
from tests.test_resume import RESUMABLE, interrupted


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def train(model):
    """Move weights and buffers, as a training step would."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter)
        model.train()(torch.randn(8, 3))


def weight(model):
    tensor = model.get_parameter("0.weight")
    return tensor.detach().clone()


def test_the_average_against_the_recursion_by_hand():
    """After n updates the decay is 1 - n^(-2/3), up to the one that was asked for; counters are copied."""
    model = make_model().train()
    ema = Ema(model, decay=0.5)
    assert not ema.module.training
    expected = weight(model)
    for n in range(1, 8):
        train(model)
        assert not torch.equal(weight(ema.module), weight(model))
        ema.on_update()
        now = min(0.5, 1 - n ** (-2 / 3))
        expected = now * expected + (1 - now) * weight(model)
        torch.testing.assert_close(weight(ema.module), expected)
    assert ema.module.get_buffer("1.num_batches_tracked") == 7
    average, own = (each.get_buffer("1.running_mean") for each in (ema.module, model))
    assert average.any()
    assert not torch.equal(average, own)


AVERAGED = (
    *RESUMABLE,
    "TRAIN.EMA.SWA_EPOCHS=2",
    "TRAIN.EMA.VALIDATE_RAW=True",
    "TRAIN.CHECKPOINT_EVERY_STEPS=1",
    "TRAIN.KEEP_CHECKPOINTS=50",
)


@pytest.fixture(scope="module")
def averaged(tmp_path_factory):
    folder = tmp_path_factory.mktemp("averaged")
    assert cli([*AVERAGED, f"EXPERIMENT.OUTPUT_DIR={folder}"]) == 0
    return folder / "plain"


def test_the_steps_of_the_last_epochs_are_averaged_equally(averaged):
    """Of three epochs of 12 steps."""
    steps = [
        checkpoint_of(averaged, f"step_{step:08d}.pt")["state"]["model"] for step in range(13, 37)
    ]
    average = checkpoint_of(averaged)["state"]["ema"]["module"]
    for name, value in average.items():
        torch.testing.assert_close(value, torch.stack([each[name] for each in steps]).mean(0))
    rates = curve(averaged)[1]
    assert rates[11] > rates[12] == pytest.approx(0.001), "the schedule ends before these epochs"
    assert set(rates[12:]) == {rates[12]}


def test_the_weights_are_validated_beside_their_average(averaged):
    lines = lines_of(averaged, "val")
    same = [line["raw/loss"] == line["loss"] for line in lines]
    assert same == [True, False, False], "the average is a copy before its first epoch"
    assert "raw/top1/class" in lines[0]
    assert not larger_is_better("raw/loss")


@pytest.mark.parametrize("after", [50, 230])
def test_an_average_of_last_epochs_is_resumed_exactly(run, tmp_path, averaged, after):
    assert run(*AVERAGED, interrupted(after)).code == 130
    run(*AVERAGED).ok()
    assert_same_states(tmp_path / "runs/plain", averaged)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ("TRAIN.EMA.SWA_EPOCHS=3", "TRAIN.EMA.SWA_EPOCHS"),
        ("TRAIN.EMA.SWA_EPOCHS=1 TRAIN.MAX_STEPS=30", "TRAIN.EMA.SWA_EPOCHS"),
        ("TRAIN.EMA.SWA_EPOCHS=1 TRAIN.EMA.ENABLED=False", "TRAIN.EMA.ENABLED"),
    ],
)
def test_an_average_that_cannot_be_is_an_error(run, options, key):
    outcome = run(*RESUMABLE, *options.split())
    assert (outcome.code, key in outcome.err) == (2, True), outcome.err
