"""From the OPTIMIZER node to an optimizer."""

from copy import deepcopy
from itertools import pairwise

import pytest
import timm
import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from torch import nn

from linnaeus.config.schema import OptimizerConfig, ScheduleConfig
from linnaeus.models.hierarchical import HierarchicalClassifier
from linnaeus.training.optim import build_optimizer, peak_values, scale_values
from linnaeus.training.schedule import Schedule


def make_model():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.LayerNorm(4), nn.Linear(4, 2))


class Unusual(torch.optim.SGD):
    """A user's optimizer."""

    def __init__(self, params, lr, betas):
        super().__init__(params, lr=lr)
        self.betas = betas


def test_a_users_optimizer_gets_what_trains_and_plain_values():
    model = make_model()
    model[0].requires_grad_(False)
    node = {"_target_": f"{__name__}.Unusual", "lr": 0.5, "betas": [0.9, 0.95]}
    optimizer = build_optimizer(node, model)
    assert type(optimizer.betas) is list
    [group] = optimizer.param_groups
    assert (group["lr"], group["params"]) == (0.5, [*model[1:].parameters()])


def test_every_group_is_scaled_and_a_factor_of_one_is_exact():
    node = OptimizerConfig(NAME="AdamW", LR=0.1 + 0.2, WEIGHT_DECAY=0.05, KWARGS={"eps": 0.3})
    optimizer = build_optimizer(node, make_model())
    scale_values(optimizer, lr_scale=1.0, weight_decay_scale=1.0)
    assert {(group["lr"], group["eps"]) for group in optimizer.param_groups} == {(0.1 + 0.2, 0.3)}
    scale_values(optimizer, lr_scale=2.0, weight_decay_scale=4.0)
    assert {group["lr"] for group in optimizer.param_groups} == {2 * (0.1 + 0.2)}
    assert sorted(group["weight_decay"] for group in optimizer.param_groups) == [0, 0.2]


# --- learning rates of layers ---

CLASSES = 5


def classifier(name):
    """A model, and timm's own with the same weights."""
    torch.manual_seed(0)
    size = {"img_size": 32} if "vit" in name else {}
    own = timm.create_model(name, num_classes=CLASSES, **size)
    backbone = deepcopy(own)
    backbone.reset_classifier(0)
    model = HierarchicalClassifier(backbone, own.num_features, [CLASSES])
    model.heads[0].load_state_dict(own.get_classifier().state_dict())
    return model, own


def train(model, optimizer, set_rate):
    """Four steps on the same samples each time, with the rate of each step set before it."""
    for step in range(4):
        set_rate(step)
        generator = torch.Generator().manual_seed(step)
        outputs = model(torch.randn(4, 3, 32, 32, generator=generator))
        labels = torch.randint(CLASSES, (4,), generator=generator)
        nn.functional.cross_entropy(
            outputs[0] if isinstance(outputs, tuple) else outputs, labels
        ).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", ["test_vit", "test_resnet"])
def test_layer_decay_trains_as_timm_does(name):
    ours, theirs = classifier(name)
    equal_rates, _ = classifier(name)
    reference = create_optimizer_v2(theirs, opt="sgd", lr=0.1, weight_decay=0.1, layer_decay=0.6)
    scheduler = CosineLRScheduler(reference, t_initial=8, lr_min=0.01, t_in_epochs=False)
    train(theirs, reference, scheduler.step_update)
    for model, layer_decay in ((ours, 0.6), (equal_rates, None)):
        node = OptimizerConfig(NAME="sgd", LR=0.1, WEIGHT_DECAY=0.1, LAYER_DECAY=layer_decay)
        optimizer = build_optimizer(node, model)
        config = ScheduleConfig(MIN_LR_FRACTION=0.1)
        schedule = Schedule(config, optimizer, steps_per_epoch=[8], warmup_steps=0)
        train(model, optimizer, schedule.apply)
    num_different = 0
    for key, parameter in ours.named_parameters():
        their = key.removeprefix("backbone.").replace(
            "heads.0", str(theirs.pretrained_cfg["classifier"])
        )
        expected = theirs.get_parameter(their)
        torch.testing.assert_close(parameter, expected, rtol=1e-4, atol=1e-6)
        other = equal_rates.get_parameter(key)
        num_different += not torch.allclose(other, expected, rtol=1e-3)
    assert num_different > 0  # the comparison sees rates that are not timm's


def test_heads_are_the_last_layer_and_can_have_their_own_rate():
    model, _ = classifier("test_vit")
    config = OptimizerConfig(LR=0.5, LAYER_DECAY=0.5, HEAD_LR_SCALE=10)
    optimizer = build_optimizer(config, model)
    Schedule(ScheduleConfig(NAME="constant"), optimizer, steps_per_epoch=[4], warmup_steps=0)
    groups = {weight: group for group in optimizer.param_groups for weight in group["params"]}
    rates = {name: groups[weight]["lr"] for name, weight in model.named_parameters()}
    assert rates["heads.0.weight"] == rates["heads.0.bias"] == 0.5 * 10
    assert rates["backbone.patch_embed.proj.weight"] == min(rates.values())
    blocks = range(len(model.backbone.blocks))
    rates = [rates[f"backbone.blocks.{index}.mlp.fc1.weight"] for index in blocks]
    assert all(later == 2 * earlier for earlier, later in pairwise(rates))
    assert peak_values(build_optimizer(config, model))[0] == 0.5
