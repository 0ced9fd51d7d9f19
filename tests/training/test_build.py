"""The pieces of a step fit together as the configuration says."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from linnaeus.config.schema import EmaConfig, LossConfig, ModelConfig, OptimizerConfig, TrainConfig
from linnaeus.data.batch import Batch
from linnaeus.data.builtin import TAXONOMY
from linnaeus.data.bundle import DataBundle, collate_pairs
from linnaeus.runtime.distributed import World
from linnaeus.training.build import assemble, plan_facts


def assembled(freeze="none", node=None, **changes):
    torch.manual_seed(0)
    model = node or ModelConfig(NAME="test_resnet", FREEZE=freeze)
    nothing, train = TensorDataset(torch.empty(0)), TrainConfig(**changes)
    data = DataBundle(nothing, nothing, TAXONOMY, 1, (32, 32), collate_pairs)
    return assemble(model, LossConfig(), OptimizerConfig(), train, data, World(torch.device("cpu")))


def make_batch():
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(0, 3, (6, 2), generator=generator)
    return Batch(torch.randn(6, 1, 32, 32, generator=generator), targets)


@pytest.mark.parametrize(
    ("amp", "dtype", "scales"), [("bf16", torch.bfloat16, False), ("fp16", torch.float16, True)]
)
def test_precision(amp, dtype, scales):
    parts = assembled(AMP=amp, CHANNELS_LAST=True)
    assert parts.train_step.precision.autocast_dtype is dtype
    weight = parts.model.get_parameter("backbone.layer1.0.conv1.weight")
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert parts.scaler.is_enabled() is scales
    parts.train_step([make_batch()])


class Compiled(nn.Linear):
    """Notes how it was compiled. `compile` keeps the names of the weights."""

    options = None

    def __init__(self):
        super().__init__(1, 1)

    def compile(self, *args, **options):
        self.options = options


@pytest.mark.parametrize("is_on", [True, False])
def test_compile_takes_mode_and_shapes_from_the_configuration(is_on):
    keys = {"COMPILE_MODE": "reduce-overhead", "COMPILE_DYNAMIC": False}
    model = assembled(node={"_target_": f"{__name__}.Compiled"}, COMPILE=is_on, **keys).model
    assert model.options == ({"mode": "reduce-overhead", "dynamic": False} if is_on else None)


# --- what is frozen ---


@pytest.mark.parametrize(
    ("amp", "checkpointing", "unfreeze_epoch"), [("off", True, None), ("fp16", False, 2)]
)
def test_a_step_trains_what_is_not_frozen(amp, checkpointing, unfreeze_epoch):
    """What is unfrozen later is held without state."""
    more = {"GRADIENT_CHECKPOINTING": checkpointing, "UNFREEZE_EPOCH": unfreeze_epoch}
    parts = assembled(freeze="backbone", AMP=amp, EMA=EmaConfig(ENABLED=True), **more)
    heads, whole = {*parts.model.heads.parameters()}, {*parts.model.parameters()}
    held = {parameter for group in parts.optimizer.param_groups for parameter in group["params"]}
    assert held == (whole if unfreeze_epoch else heads)
    before = {name: tensor.clone() for name, tensor in parts.model.state_dict().items()}
    parts.model.train()
    parts.train_step([make_batch()])
    assert {*parts.optimizer.state} == heads
    for state in (parts.model.state_dict(), parts.ema.module.state_dict()):
        changed = {name for name in before if not torch.equal(state[name], before[name])}
        assert {name.split(".")[0] for name in changed} == {"heads"}


@pytest.mark.parametrize(
    ("freeze", "unfreeze_epoch", "batchnorm", "pretrained"),
    [
        ("none", None, "local", True),
        ("backbone", 3, "none", False),  # not in this run
        ("backbone", 2, "local", True),
    ],
)
def test_the_plan_counts_what_trains_by_the_last_epoch(
    freeze, unfreeze_epoch, batchnorm, pretrained
):
    config = TrainConfig(EPOCHS=2, UNFREEZE_EPOCH=unfreeze_epoch)
    parts = assembled(freeze=freeze, EPOCHS=2, UNFREEZE_EPOCH=unfreeze_epoch)
    sizes = {"max_micro_batch_size": 8, "world_size": 1, "num_samples": 64}
    facts = plan_facts(parts, ModelConfig(PRETRAINED=True), config, **sizes)
    assert (facts.batchnorm, facts.pretrained) == (batchnorm, pretrained)
    assert facts.pretrained_key == "MODEL.PRETRAINED"
