"""From the OPTIMIZER node to an optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from linnaeus.config.schema import OptimizerConfig
from linnaeus.errors import ConfigError
from linnaeus.training.optim import build_optimizer


def make_model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.LayerNorm(4), nn.Linear(4, 2))


class Unusual(torch.optim.SGD):
    """A user's optimizer."""

    def __init__(self, params: list[nn.Parameter], lr: float, betas: list[float]) -> None:
        super().__init__(params, lr=lr)
        self.betas = betas


def not_an_optimizer(params: list[nn.Parameter]) -> str:
    return "adam"


@pytest.mark.parametrize(
    ("name", "kind"),
    [("adamw", torch.optim.AdamW), ("AdamW", torch.optim.AdamW), ("sgd", torch.optim.SGD), ("lamb", object)],
)
def test_optimizers_by_the_names_of_timm(name: str, kind: type) -> None:
    optimizer = build_optimizer(OptimizerConfig(NAME=name, LR=0.25), make_model())
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert isinstance(optimizer, kind)
    assert {group["lr"] for group in optimizer.param_groups} == {0.25}


def test_no_decay_on_biases_and_norms() -> None:
    model = make_model()
    optimizer = build_optimizer(OptimizerConfig(WEIGHT_DECAY=0.125), model)
    decay = {
        parameter: group["weight_decay"] for group in optimizer.param_groups for parameter in group["params"]
    }
    names = {name: decay[parameter] for name, parameter in model.named_parameters()}
    assert {name for name, value in names.items() if value == 0.125} == {"0.weight", "3.weight"}
    assert {value for name, value in names.items() if name not in ("0.weight", "3.weight")} == {0}


def test_further_arguments_reach_the_optimizer() -> None:
    optimizer = build_optimizer(OptimizerConfig(NAME="sgd", KWARGS={"momentum": 0.3}), make_model())
    assert optimizer.param_groups[0]["momentum"] == 0.3


def test_frozen_parameters_are_left_out() -> None:
    model = make_model()
    model[0].requires_grad_(False)  # type: ignore[index]
    for node in (OptimizerConfig(), {"_target_": "torch.optim.SGD", "lr": 0.1}):
        optimizer = build_optimizer(node, model)
        found = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        assert found == {parameter for parameter in model.parameters() if parameter.requires_grad}


def test_a_users_optimizer_gets_the_parameters_and_plain_values() -> None:
    model = make_model()
    node = {"_target_": f"{__name__}.Unusual", "lr": 0.5, "betas": [0.9, 0.95]}
    optimizer = build_optimizer(node, model)
    assert isinstance(optimizer, Unusual)
    assert type(optimizer.betas) is list
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True))


def test_an_optimizer_written_as_partial_works_too() -> None:
    node = {"_target_": "torch.optim.SGD", "_partial_": True, "lr": 0.5}
    assert isinstance(build_optimizer(node, make_model()), torch.optim.SGD)


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (OptimizerConfig(NAME="adamww"), "OPTIMIZER.NAME: 'adamww' is not .* of timm; did you mean .*adamw"),
        (OptimizerConfig(NAME="qqqqqq"), "OPTIMIZER.NAME: 'qqqqqq' is not an optimizer of timm$"),
        (OptimizerConfig(KWARGS={"moment": 1}), "OPTIMIZER: 'adamw' with KWARGS {'moment': 1}: .*moment"),
        ({"_target_": "torch.optim.SGDD"}, "OPTIMIZER._target_: 'torch.optim.SGDD' cannot be imported"),
        ({"_target_": "torch.optim.SGD", "moment": 1}, "OPTIMIZER: torch.optim.SGD failed with TypeError"),
        ({"_target_": f"{__name__}.not_an_optimizer"}, "is not a torch.optim.Optimizer"),
    ],
)  # fmt: skip
def test_nodes_that_cannot_be_used_say_why(node: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_optimizer(node, make_model())


def test_a_model_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(ConfigError, match="MODEL: it has no trainable parameter"):
        build_optimizer(OptimizerConfig(), make_model().requires_grad_(False))
