"""Parameters that do not train: which ones, and what their modules do meanwhile."""

from copy import deepcopy
from fnmatch import fnmatchcase

import pytest
import torch
from torch import nn

from linnaeus.config.schema import ModelConfig
from linnaeus.models.build import batchnorm_kind
from linnaeus.models.freeze import build_freezing
from linnaeus.models.hierarchical import HierarchicalClassifier


def make_model():
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    backbone = nn.Sequential(layer, nn.Linear(4, 4), nn.BatchNorm1d(4))
    return HierarchicalClassifier(backbone, 4, [2, 3], drop_rate=0.5)


def frozen(model, freeze, unfreeze_epoch=None):
    freezing = build_freezing(ModelConfig(FREEZE=freeze), model, unfreeze_epoch)
    freezing.freeze()
    return freezing


BACKBONE = {"backbone"} | {f"backbone.{name}" for name in ("0", "0.0", "0.1", "0.2", "1", "2")}


def trainable(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def in_eval(model):
    return {name for name, module in model.named_modules() if not module.training}


@pytest.mark.parametrize(
    ("freeze", "names", "modules"),
    [
        ("none", set(), set()),
        ("backbone", {"backbone.*"}, BACKBONE),
        (
            ["backbone.0.0.*", "backbone.2.weight"],
            {"backbone.0.0.*", "backbone.2.weight"},
            {"backbone.0.0"},
        ),
        ("*.bias", {"*.bias"}, set()),
    ],
)
def test_patterns_choose_parameters_and_modules_stay_in_eval(freeze, names, modules):
    model = make_model()
    everything = trainable(model)
    freezing = frozen(model, freeze)
    expected = {name for name in everything if not any(fnmatchcase(name, glob) for glob in names)}
    assert trainable(model) == expected
    for mode in (True, False, True):
        model.train(mode)
        assert in_eval(model) >= modules
    assert in_eval(model) == modules  # the dropout before the heads drops
    assert in_eval(deepcopy(model).train()) == modules  # such as an average's copy
    assert batchnorm_kind(model) == ("none" if freeze == "backbone" else "local")
    with freezing.unfrozen():
        assert (trainable(model), in_eval(model)) == (everything, set())
    assert (trainable(model), in_eval(model)) == (expected, modules)
    freezing.freeze(False)
    assert (trainable(model), in_eval(model)) == (everything, set())


def test_epochs_are_counted_from_one():
    freezing = frozen(make_model(), "backbone", 3)
    assert [freezing.ends_within(epochs) for epochs in (1, 2, 3, 4)] == [False, False, True, True]
    assert not frozen(make_model(), "backbone").ends_within(99)
