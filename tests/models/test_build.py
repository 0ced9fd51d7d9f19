"""From the MODEL node to a network that takes the images of the data."""

import pytest
import safetensors.torch
import timm
import torch
from torch import nn

from linnaeus.config.schema import ModelConfig
from linnaeus.data.builtin import TAXONOMY
from linnaeus.data.bundle import DataBundle, collate_pairs
from linnaeus.models.build import build_model, set_gradient_checkpointing
from linnaeus.models.model_spec import ModelSpec
from tests.helpers.bits import bits
from tests.helpers.small_models import ONE_LEVEL, TWO_LEVELS, build


class Recorder(nn.Module):
    def __init__(self, width, num_classes, in_chans=0, img_size=None):
        super().__init__()
        self.given = (width, num_classes, in_chans, img_size)


def test_channels_and_size_come_from_the_data():
    model = build("test_vit", in_chans=5, img_size=(48, 64))
    outputs = model(torch.randn(2, 5, 48, 64))
    assert [tuple(logits.shape) for logits in outputs] == [(2, 2), (2, 3)]


def test_a_model_follows_from_the_seed_with_untouched_statistics():
    """The features have been looked at, but in no way that shows."""
    model, again = build(), build().state_dict()
    assert all(module.training for module in model.modules())
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert norms
    assert not any(norm.running_mean.any() for norm in norms)
    assert bits(model.state_dict()) == bits(again)


def test_weights_come_from_a_safetensors_file(tmp_path):
    torch.manual_seed(7)
    state = timm.create_model("test_vit", img_size=64).state_dict()
    safetensors.torch.save_file(state, tmp_path / "a.safetensors")
    model = build("test_vit", WEIGHTS=str(tmp_path / "a.safetensors"))
    found = model.backbone.state_dict()
    assert bits(found) == bits({key: state[key] for key in found})
    assert bits(model.heads.state_dict()) == bits(build("test_vit").heads.state_dict())


@pytest.mark.parametrize("name", ["test_resnet", "test_vit", "test_convnext"])
def test_gradient_checkpointing_recomputes_the_same_gradients(name):
    images = torch.randn(2, 3, 64, 64)
    gradients, num_saved = [], []
    for checkpointing in (False, True):
        model = build(name)
        if checkpointing:
            set_gradient_checkpointing(model)
        saved = []

        def pack(tensor, saved=saved):
            saved.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = torch.stack([logits.square().sum() for logits in model(images)]).sum()
        num_saved.append(sum(saved))
        loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(gradients[0], gradients[1])
    assert num_saved[1] < 0.75 * num_saved[0]


@pytest.mark.parametrize(
    ("taxonomy", "num_classes"), [(ONE_LEVEL, 3), (TWO_LEVELS, {"family": 2, "species": 3})]
)
def test_a_users_model_is_offered_what_the_data_is_like(taxonomy, num_classes):
    node = {"_target_": f"{__name__}.Recorder", "width": 7, "in_chans": 9}
    model, _ = build_model(node, taxonomy=taxonomy, in_chans=1, img_size=(32, 48))
    assert isinstance(model, Recorder)
    assert model.given == (7, num_classes, 9, (32, 48))
    assert type(model.given[1]) is type(num_classes)


def test_a_model_of_a_folder_is_built_without_the_folder(tmp_path):
    folder = tmp_path / "weights"
    arguments = {"img_size": 32, "in_chans": 1}
    source = timm.create_model("test_vit", **arguments)
    timm.models.save_for_hf(source, folder, model_args=arguments | {"qkv_bias": False})
    node = ModelConfig(NAME=f"local-dir:{folder}")
    data = DataBundle([], [], TAXONOMY, in_chans=1, img_size=(32, 32), collate=collate_pairs)
    model, _ = build_model(node, taxonomy=TAXONOMY, in_chans=1, img_size=(32, 32))
    spec = ModelSpec.from_dict(ModelSpec.of(node, data).as_dict(), folder / "last.pt")
    folder.rename(tmp_path / "moved")
    again = spec.build()
    again.load_state_dict(model.state_dict())
    images = torch.rand(2, 1, 32, 32)
    for one, two in zip(model.eval()(images), again.eval()(images), strict=True):
        assert torch.equal(one, two)
