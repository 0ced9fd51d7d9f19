"""From the MODEL node to a network that takes the images of the data."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import torch
from torch import Tensor, nn

from linnaeus.config.schema import ModelConfig
from linnaeus.data.taxonomy import Level, Taxonomy
from linnaeus.errors import ConfigError
from linnaeus.models.build import build_model, set_gradient_checkpointing
from linnaeus.models.hierarchical import HierarchicalClassifier

ONE_RANK = Taxonomy((Level("species", ("lion", "lynx", "wolf")),))
TWO_RANKS = Taxonomy(
    (Level("family", ("cats", "dogs")), Level("species", ("lion", "lynx", "wolf"))), ((0, 0, 1),)
)
FAMILIES = ("test_resnet", "test_vit", "test_convnext", "test_efficientnet")


def build(
    name: str = "test_resnet",
    *,
    taxonomy: Taxonomy = TWO_RANKS,
    in_chans: int = 3,
    img_size: tuple[int, int] = (64, 64),
    **changes: Any,
) -> HierarchicalClassifier:
    torch.manual_seed(0)
    model, _ = build_model(
        ModelConfig(NAME=name, **changes), taxonomy=taxonomy, in_chans=in_chans, img_size=img_size
    )
    assert isinstance(model, HierarchicalClassifier)
    return model


class Recorder(nn.Module):
    """A user's network, which keeps what it was given."""

    def __init__(self, width: int, num_classes: Any, in_chans: int = 0, img_size: Any = None) -> None:
        super().__init__()
        self.given = (width, num_classes, in_chans, img_size)


class Plain(nn.Module):
    """A user's network that wants nothing from the framework."""

    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)


def not_a_module() -> dict[str, int]:
    return {}


# --- timm ---


@pytest.mark.parametrize("in_chans", [1, 3, 5])
@pytest.mark.parametrize("img_size", [(32, 32), (48, 64)])
@pytest.mark.parametrize("name", FAMILIES)
def test_channels_and_size_come_from_the_data(name: str, in_chans: int, img_size: tuple[int, int]) -> None:
    model = build(name, in_chans=in_chans, img_size=img_size)
    outputs = model(torch.randn(2, in_chans, *img_size))
    assert [tuple(logits.shape) for logits in outputs] == [(2, 2), (2, 3)]
    sum(logits.sum() for logits in outputs).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("name", FAMILIES)
def test_there_is_one_head_per_rank_and_none_of_timm(name: str) -> None:
    assert len(build(name, taxonomy=ONE_RANK).heads) == 1
    model = build(name)
    assert [type(head) for head in model.heads] == [nn.Linear, nn.Linear]
    features = model.backbone(torch.randn(2, 3, 64, 64))
    assert features.shape == (2, model.heads[0].in_features)
    head_names = {name for name, _ in timm.create_model(name).named_parameters()} - {
        name for name, _ in model.backbone.named_parameters()
    }
    assert len(head_names) == 2  # weight and bias of timm's classifier


def test_a_model_is_built_in_training_mode_on_the_cpu() -> None:
    model = build()
    assert all(module.training for module in model.modules())
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}


def test_looking_at_the_features_leaves_the_statistics_of_batchnorm_alone() -> None:
    norms = [module for module in build().modules() if isinstance(module, nn.BatchNorm2d)]
    assert norms
    assert not any(norm.running_mean.any() for norm in norms if norm.running_mean is not None)


def test_the_seed_fixes_the_weights() -> None:
    a, b = build().state_dict(), build().state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_drop_rates_and_further_arguments_reach_the_model() -> None:
    model = build("test_vit", DROP_RATE=0.3, DROP_PATH_RATE=0.2, KWARGS={"depth": 3})
    assert model.dropout.p == 0.3
    assert max(getattr(module, "drop_prob", 0) for module in model.modules()) == pytest.approx(0.2)
    assert len(model.backbone.blocks) == 3  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "test_resnt"}, "MODEL.NAME: 'test_resnt' is not a timm model; did you mean .*test_resnet"),
        ({"name": "zzzzzz"}, r"MODEL.NAME: 'zzzzzz' is not a timm model; `timm.list_models\(\)` lists them"),
        ({"KWARGS": {"colour": "red"}}, "timm cannot build 'test_resnet' with {'colour': 'red'}: .*colour"),
        ({"name": "test_vit", "img_size": (30, 30)}, r"cannot take images of 3×30×30 \(DATA.IMG_SIZE\)"),
        ({"name": "test_vit", "img_size": (8, 64)}, r"cannot take images of 3×8×64 \(DATA.IMG_SIZE\)"),
        ({"name": "test_convnext", "img_size": (8, 8)}, "'test_convnext' cannot take images of 3×8×8"),
    ],
)  # fmt: skip
def test_models_that_cannot_be_built_say_why(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(**changes)


@pytest.mark.parametrize(
    "facts",
    [
        {"taxonomy": None, "in_chans": 3, "img_size": (32, 32)},
        {"taxonomy": TWO_RANKS, "in_chans": None, "img_size": None},
    ],
)
def test_a_timm_model_needs_images_with_labels(facts: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"needs a dataset of images with class labels; .* MODEL._target_"):
        build_model(ModelConfig(), **facts)


# --- weights from a file ---


def save(state: dict[str, Tensor], path: Path) -> None:
    if path.suffix == ".safetensors":
        safetensors.torch.save_file(state, path)
    else:
        torch.save(state, path)


@pytest.mark.parametrize("file", ["weights.pth", "weights.pt", "weights.safetensors"])
@pytest.mark.parametrize("num_classes", [0, 1000])
@pytest.mark.parametrize("name", FAMILIES)
def test_weights_come_from_a_local_file(tmp_path: Path, name: str, num_classes: int, file: str) -> None:
    torch.manual_seed(7)
    source = timm.create_model(name, num_classes=num_classes, **size_of(name))
    save(source.state_dict(), tmp_path / file)
    model = build(name, WEIGHTS=str(tmp_path / file))
    found, expected = model.backbone.state_dict(), source.state_dict()
    assert all(torch.equal(found[key], expected[key]) for key in found)
    assert all(torch.equal(a.weight, b.weight) for a, b in zip(model.heads, build(name).heads, strict=True))


def size_of(name: str) -> dict[str, int]:
    return {"img_size": 64} if name == "test_vit" else {}


def test_weights_fit_other_channels_and_another_size(tmp_path: Path) -> None:
    torch.manual_seed(7)
    source = timm.create_model("test_vit", img_size=160)
    torch.save(source.state_dict(), tmp_path / "weights.pth")
    model = build("test_vit", in_chans=1, img_size=(32, 48), WEIGHTS=str(tmp_path / "weights.pth"))
    assert model.backbone.pos_embed.shape[1] == 1 + 2 * 3  # type: ignore[union-attr]
    found: Tensor = model.backbone.patch_embed.proj.weight  # type: ignore[union-attr, assignment]
    torch.testing.assert_close(found, source.patch_embed.proj.weight.sum(1, keepdim=True))
    assert torch.equal(model.backbone.blocks[0].mlp.fc1.weight, source.blocks[0].mlp.fc1.weight)  # type: ignore[index, union-attr]


def write_other_model(path: Path) -> None:
    torch.save(timm.create_model("test_vit").state_dict(), path)


def write_part_of_the_model(path: Path) -> None:
    state = timm.create_model("test_resnet").state_dict()
    torch.save({key: value for key, value in state.items() if not key.startswith("layer4")}, path)


def write_wider_model(path: Path) -> None:
    torch.save(timm.create_model("test_resnet", channels=(48, 48, 48, 96)).state_dict(), path)


def write_list(path: Path) -> None:
    torch.save([1, 2], path)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (write_other_model, r"\d+ parameters are not in the file, such as 'conv1.0.weight'"),
        (write_part_of_the_model, r"\d+ parameters are not in the file, such as 'layer4.0.conv1.weight'"),
        (
            write_wider_model,
            r"12 of 90 tensors have another shape, such as 'layer1.0.conv1.weight' \(48×32×3×3 in the file, "
            r"32×32×3×3 in the model\)",
        ),
        (write_list, "holds a list without tensors by name"),
        (lambda path: path.write_text("not weights at all"), r"cannot be read as tensors \(UnpicklingError"),
        (lambda path: path.write_bytes(b""), r"cannot be read as tensors \(EOFError"),
    ],
    ids=["another model", "a part", "another width", "a list", "text", "empty"],
)  # fmt: skip
def test_a_wrong_file_is_refused(tmp_path: Path, write: Any, message: str) -> None:
    path = tmp_path / "weights.pth"
    write(path)
    start = re.escape(f"MODEL.WEIGHTS: {str(path)!r} ")
    with pytest.raises(ConfigError, match=f"{start}(does not load into 'test_resnet': )?{message}") as error:
        build(WEIGHTS=str(path))
    [problem] = error.value.problems
    assert "\n" not in problem
    assert len(problem) < 400 + len(str(path))  # no wall of names


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"MODEL.WEIGHTS: '.*none.pth' is not a file"):
        build(WEIGHTS=str(tmp_path / "none.pth"))


# --- gradient checkpointing ---


@pytest.mark.parametrize("name", FAMILIES)
def test_gradient_checkpointing_recomputes_and_changes_no_gradient(name: str) -> None:
    images = torch.randn(2, 3, 64, 64)
    gradients, num_saved = [], []
    for checkpointing in (False, True):
        model = build(name)
        if checkpointing:
            set_gradient_checkpointing(model)
        saved: list[int] = []

        def pack(tensor: Tensor, saved: list[int] = saved) -> Tensor:
            saved.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = torch.stack([logits.square().sum() for logits in model(images)]).sum()
        num_saved.append(sum(saved))
        loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(gradients[0], gradients[1])
    assert num_saved[1] < 0.75 * num_saved[0]


@pytest.mark.parametrize("model", [Plain(), nn.Sequential(nn.Linear(2, 2))])
def test_models_without_gradient_checkpointing_say_so(model: nn.Module) -> None:
    with pytest.raises(ConfigError, match=r"TRAIN.GRADIENT_CHECKPOINTING: True, but this model has no"):
        set_gradient_checkpointing(model)


# --- a user's own ---


@pytest.mark.parametrize(
    ("taxonomy", "num_classes"), [(ONE_RANK, 3), (TWO_RANKS, {"family": 2, "species": 3})]
)
def test_a_users_model_is_offered_what_the_data_is_like(taxonomy: Taxonomy, num_classes: Any) -> None:
    node = {"_target_": f"{__name__}.Recorder", "width": 7, "in_chans": 9}
    model, _ = build_model(node, taxonomy=taxonomy, in_chans=1, img_size=(32, 48))
    assert isinstance(model, Recorder)
    assert model.given == (7, num_classes, 9, (32, 48))
    assert type(model.given[1]) is type(num_classes)


def test_a_users_model_may_have_no_images_or_labels() -> None:
    node = {"_target_": f"{__name__}.Plain", "width": 4}
    model, _ = build_model(node, taxonomy=None, in_chans=None, img_size=None)
    assert isinstance(model, Plain)
    assert model.layer.in_features == 4


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"_target_": f"{__name__}.not_a_module"}, "MODEL: .*not_a_module gave a dict, not an nn.Module"),
        ({"_target_": f"{__name__}.Missing"}, "MODEL._target_: .*Missing' cannot be imported"),
        ({"_target_": f"{__name__}.Recorder"}, "MODEL: .*Recorder failed with TypeError: .*width"),
    ],
)
def test_a_users_model_that_cannot_be_built_says_why(node: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_model(node, taxonomy=TWO_RANKS, in_chans=3, img_size=(32, 32))


def test_heads_see_dropped_features_in_training_only() -> None:
    model = HierarchicalClassifier(nn.Flatten(), 4, [2, 3], drop_rate=0.5)
    images = torch.ones(64, 1, 2, 2)
    assert not torch.equal(model(images)[0], model(images)[0])
    model.eval()
    assert torch.equal(model(images)[0], model(images)[0])
    assert torch.equal(model(images)[1], model.heads[1](torch.ones(64, 4)))
