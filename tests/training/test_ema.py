"""The average of the weights."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from linnaeus.training.ema import Ema


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def train(model: nn.Module) -> None:
    """Move weights and buffers, as a training step would."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter)
        model.train()(torch.randn(8, 3))


def weight(model: nn.Module) -> Tensor:
    tensor: Tensor = model.get_parameter("0.weight")
    return tensor.detach().clone()


@pytest.mark.parametrize("decay", [0.3, 0.9])
def test_the_average_against_the_recursion_by_hand(decay: float) -> None:
    """After n updates the decay is 1 - n^(-2/3), up to the one that was asked for; counters are copied."""
    model = make_model().train()
    ema = Ema(model, decay)
    assert not ema.module.training
    expected = weight(model)
    for n in range(1, 8):
        train(model)
        assert not torch.equal(weight(ema.module), weight(model))
        ema.on_update()
        now = min(decay, 1 - n ** (-2 / 3))
        expected = now * expected + (1 - now) * weight(model)
        torch.testing.assert_close(weight(ema.module), expected)
    assert ema.module.get_buffer("1.num_batches_tracked") == 7
    assert not torch.equal(
        ema.module.get_buffer("1.running_mean"), model.get_buffer("1.running_mean")
    )
    assert ema.module.get_buffer("1.running_mean").any()


def test_a_restored_average_goes_on_as_if_nothing_had_been() -> None:
    model = make_model()
    ema = Ema(model, 0.9)
    for _ in range(3):
        train(model)
        ema.on_update()
    twin_model = copy.deepcopy(model)
    twin = Ema(twin_model, 0.9)
    twin.load_state_dict(copy.deepcopy(ema.state_dict()))
    for source, average in ((model, ema), (twin_model, twin)):
        torch.manual_seed(5)
        train(source)
        average.on_update()
    assert twin.num_updates == ema.num_updates == 4
    for a, b in zip(
        ema.module.state_dict().values(), twin.module.state_dict().values(), strict=True
    ):
        assert torch.equal(a, b)
