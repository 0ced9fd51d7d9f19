"""Weights of another run, or of a file with a backbone or a whole model."""

import argparse
import re
from contextlib import nullcontext

import pytest
import timm
import torch
from torch import nn

from linnaeus.config.schema import DataConfig, ModelConfig
from linnaeus.data.taxonomy import Level, Taxonomy
from linnaeus.inference.trained import load_run
from linnaeus.models.build import build_model
from linnaeus.models.preprocessing import with_preprocessing
from linnaeus.runtime.errors import ConfigError
from tests.helpers.bits import bits
from tests.helpers.small_models import ONE_LEVEL, built
from tests.helpers.small_models import TWO_LEVELS as BEFORE
from tests.helpers.trained import PLAIN, save_run, spec_of

FAMILIES = BEFORE.levels[0]
SAME_NAMES = Taxonomy((FAMILIES, Level("species", ("wolf", "lion", "lynx"))), ((1, 0, 0),))
OTHER_NAMES = Taxonomy((FAMILIES, Level("species", ("lion", "lynx", "fox"))), ((0, 0, 1),))
MORE_NAMES = Taxonomy(
    (FAMILIES, Level("species", ("lion", "lynx", "wolf", "fox"))), ((0, 0, 1, 1),)
)


def source_model(seed=7):
    model, _ = built(seed=seed)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var)
    return model


def checkpoint(model, average=None, spec=None):
    state = {"model": model.state_dict(), "optimizer": {}}
    if average is not None:
        state["ema"] = {"module": average.state_dict(), "num_updates": 3}
    content = {"progress": {"epoch": 12, "samples": 0}, "state": state}
    if spec is not None:
        levels = [{"name": level.name, "classes": list(level.classes)} for level in spec.levels]
        content["model_spec"] = {"taxonomy": {"levels": levels}}
    return content


@pytest.fixture
def load(tmp_path):
    """Saves a content; gives the model that takes its weights from there, and the line about them."""

    def save_and_build(content, **options):
        torch.save(content, tmp_path / "a.pt")
        return built(WEIGHTS=str(tmp_path / "a.pt"), **options)

    return save_and_build


def test_a_runs_folder_gives_its_best_checkpoint_else_its_last(tmp_path):
    folder = tmp_path / "run/checkpoints"
    folder.mkdir(parents=True)
    last, best = source_model(1), source_model(2)
    # A run killed while it saved may have no more than `previous.pt`.
    for name, source, average in (
        ("previous", last, None),
        ("last", last, None),
        ("best", last, best),
    ):
        torch.save(checkpoint(source, average), folder / f"{name}.pt")
        model, line = built(WEIGHTS=str(folder.parent))
        assert bits(model.state_dict()) == bits((average or source).state_dict())
        assert str(folder / f"{name}.pt") in line
        assert ("EMA" in line) == (average is not None)


@pytest.mark.parametrize(
    ("spec", "taxonomy", "new"),
    [
        (BEFORE, SAME_NAMES, []),
        (BEFORE, OTHER_NAMES, ["species"]),
        (BEFORE, ONE_LEVEL, []),
        (None, OTHER_NAMES, []),
        (None, MORE_NAMES, ["species"]),
        (None, ONE_LEVEL, ["species"]),
    ],
)
def test_heads_are_copied_where_the_classes_are_the_same(load, spec, taxonomy, new):
    source = source_model()
    model, _ = load(checkpoint(source, spec=spec), taxonomy=taxonomy)
    untrained, _ = built(taxonomy=taxonomy)
    for index, level in enumerate(taxonomy.levels):
        weight = model.heads[index].weight
        if level.name in new:
            assert torch.equal(weight, untrained.heads[index].weight)
            continue
        position = [other.name for other in BEFORE.levels].index(level.name)
        before = BEFORE.levels[position].classes
        rows = [before.index(name) for name in level.classes] if spec else [*range(len(before))]
        assert torch.equal(weight, source.heads[position].weight[rows])
        assert torch.equal(model.heads[index].bias, source.heads[position].bias[rows])


def test_a_state_dict_of_a_whole_model_loads(load):
    """Without the parts that torch's wrappers put into names."""
    source = source_model()
    state = {
        name.replace("layer1.", "layer1._orig_mod."): x for name, x in source.state_dict().items()
    }
    state = {f"_orig_mod.module.{name}": each for name, each in state.items()}
    model, line = load({"model": state, "epoch": 3})
    assert ("_orig_mod." in line, "backbone" in line) == (True, False)
    assert bits(model.state_dict()) == bits(source.state_dict())


def random_state(seed, name="test_resnet"):
    torch.manual_seed(seed)
    return timm.create_model(name, num_classes=5).state_dict()


def is_loaded(model, state):
    own = model.backbone.state_dict()
    return bits(own) == bits({name: state[name] for name in own})


@pytest.mark.parametrize("key", ["", "net", "checkpoint.model.weights", "ema"])
@pytest.mark.parametrize("prefix", ["", "timm_model.", "model.backbone.", "module._orig_mod.a.b."])
def test_backbones_load_from_any_nesting_and_prefix(load, key, prefix):
    state = random_state(7)
    content = {f"{prefix}{name}": tensor for name, tensor in state.items()}
    content["criterion.weight"] = torch.ones(3)
    for part in reversed(key.split(".") if key else []):
        content = {"optimizer": {"state": {"conv1.0.weight": torch.ones(1)}}, part: content}
    model, line = load(content)
    assert is_loaded(model, state)
    assert all(part in line for part in (key, "90 tensors", "criterion.weight", "new head"))
    assert ("without the prefix" in line) == bool(prefix)
    assert all(f"{part}." in line for part in prefix.split(".") if part)


@pytest.mark.parametrize("average", ["state_dict_ema", "swa_model"])
def test_a_whole_average_is_taken_before_the_weights(load, average):
    weights, averaged = random_state(7), random_state(8)
    assert is_loaded(load({"state_dict": weights, average: averaged})[0], averaged)
    part = {name: tensor for name, tensor in averaged.items() if "layer1" in name}
    model, _ = load({"state_dict": weights, average: part, "schema": averaged})
    assert is_loaded(model, weights)


def test_a_prefix_hides_no_names_that_timm_translates(tmp_path):
    """Facebook's names of ConvNeXt, in a module that is called `model`."""
    own = random_state(7, "test_convnext")
    names = {
        r"^stem\.": "downsample_layers.0.",
        r"^head\.(norm\.|fc\.)": r"\1",
        r"^fc\.": "head.",
        r"\.blocks\.": ".",
        r"stages\.(\d)\.downsample\.": r"downsample_layers.\1.",
        "conv_dw": "dwconv",
        r"mlp\.fc": "pwconv",
    }
    foreign = {}
    for name, tensor in own.items():
        for ours, theirs in names.items():
            name = re.sub(ours, theirs, name)
        foreign[f"model.{name}"] = tensor
    torch.save(foreign, tmp_path / "a.pt")
    model, line = built("test_convnext", WEIGHTS=str(tmp_path / "a.pt"))
    assert is_loaded(model, own)
    assert "'model.'" in line


def test_checkpoints_of_timms_training_script_load(load):
    state = random_state(7)
    arguments = argparse.Namespace(model="test_resnet", lr=0.1)
    model, _ = load({"arch": "test_resnet", "state_dict": state, "args": arguments, "metric": 1.0})
    assert is_loaded(model, state)


@pytest.mark.parametrize(
    ("key", "value", "is_loaded"),
    [
        ("state.model", 5, False),
        ("model_spec.model", {"LORA": 5}, False),
        ("model_spec.model", {"NAME": 5}, True),
        ("model_spec.taxonomy", {"levels": [{"name": [], "classes": [{}, []]}]}, True),
        ("model_spec.preprocessing", {"size": 5, "decoding": 5}, True),
    ],
)
def test_an_odd_checkpoint_is_loaded_or_refused(tmp_path, key, value, is_loaded):
    content = checkpoint(source_model(), spec=BEFORE)
    part, name = key.split(".")
    content[part][name] = value
    torch.save(content, tmp_path / "last.pt")
    node = ModelConfig("test_resnet", WEIGHTS=str(tmp_path / "last.pt"))
    assert with_preprocessing(DataConfig(), node)[1] is None
    with nullcontext() if is_loaded else pytest.raises(ConfigError, match=r"last\.pt"):
        built(WEIGHTS=node.WEIGHTS)


def test_heads_of_an_export_are_copied_by_class_names(tmp_path):
    source = load_run(save_run(tmp_path / "run", spec_of(taxonomy=PLAIN)), device="cpu")
    file = source.export("safetensors").path
    taxonomy = Taxonomy((Level("species", ("corax", "major", "viridis")),))
    model, line = built(taxonomy=taxonomy, WEIGHTS=str(file))
    assert "copied by class names" in line
    head = dict(source.model.named_parameters())["heads.1.weight"]
    assert torch.equal(model.heads[0].weight, head)


def test_nothing_is_read_where_a_checkpoint_replaces_the_weights():
    node = ModelConfig(NAME="test_resnet", WEIGHTS="nowhere.pt")
    data = {"taxonomy": BEFORE, "in_chans": 3, "img_size": (32, 32)}
    build_model(node, **data, load_weights=False)
    with pytest.raises(ConfigError, match=r"nowhere.pt"):
        build_model(node, **data)


IMAGENET = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
NONE = {"IMG_SIZE": None, "INTERPOLATION": None, "CROP_FRACTION": None, "RESIZE": None}
NONE |= {"MEAN": None, "STD": None}
RESNET = {"IMG_SIZE": 224, "INTERPOLATION": "bicubic", "CROP_FRACTION": 0.95, "RESIZE": "crop"}
RESNET |= dict(zip(("MEAN", "STD"), IMAGENET, strict=True))


def data_of(name="imagefolder", channels=3, img_size=None):
    config = DataConfig(IMG_SIZE=img_size)
    config.DATASET.NAME, config.DATASET.CHANNELS = name, channels
    return config


def values_of(data):
    return {key: getattr(data.AUGMENT, key, data.IMG_SIZE) for key in NONE}


PRETRAINED = ModelConfig(NAME="resnet18", PRETRAINED=True)


@pytest.mark.parametrize(
    ("node", "data", "expected"),
    [
        ({"_target_": "torch.nn.Linear"}, data_of(), NONE),
        (PRETRAINED, data_of(), RESNET),
        (PRETRAINED, data_of(img_size=64), {**RESNET, "IMG_SIZE": 64}),
        (PRETRAINED, data_of(channels=5), {**RESNET, "MEAN": None, "STD": None}),
        (
            PRETRAINED,
            data_of("digits"),
            {**RESNET, "IMG_SIZE": None, "CROP_FRACTION": None, "RESIZE": None},
        ),
        (ModelConfig(NAME="resnet18", WEIGHTS="nowhere.pt"), data_of(), NONE),
    ],
    ids=lambda value: None,
)
def test_null_takes_the_preprocessing_of_the_weights(node, data, expected):
    found, line = with_preprocessing(data, node)
    assert values_of(found) == expected
    assert (line is not None) == (expected != NONE)


def test_a_file_of_another_program_is_preprocessed_as_timm_says(tmp_path):
    torch.save(random_state(7), tmp_path / "a.pt")
    node = ModelConfig(NAME="resnet18", WEIGHTS=str(tmp_path / "a.pt"))
    assert values_of(with_preprocessing(data_of(), node)[0]) == RESNET


@pytest.mark.parametrize("is_export", [False, True])
def test_a_run_and_its_export_bring_their_preprocessing(tmp_path, is_export):
    resizing = {"interpolation": "bicubic", "resize": "letterbox"}
    file = save_run(tmp_path / "run", spec_of(size=(32, 48), resizing=resizing))
    if is_export:
        file = load_run(file, device="cpu").export("safetensors").path
    found, _ = with_preprocessing(data_of(), ModelConfig(NAME="resnet18", WEIGHTS=str(file)))
    assert values_of(found) == {
        "IMG_SIZE": [32, 48],
        "INTERPOLATION": "bicubic",
        "CROP_FRACTION": 0.9,
        "RESIZE": "letterbox",
        "MEAN": [0.5, 0.4, 0.3],
        "STD": [0.2, 0.3, 0.25],
    }


def test_a_resumed_run_keeps_its_preprocessing():
    augment = {"MEAN": [0.1, 0.2, 0.3], "STD": [0.4, 0.5, 0.6], "RESIZE": "squash"}
    node = ModelConfig(NAME="resnet18", WEIGHTS="nowhere.pt")
    for size in (None, 48):
        saved = {"DATA": {"IMG_SIZE": size, "AUGMENT": augment}}
        found, line = with_preprocessing(data_of(), node, saved)
        assert values_of(found) == {**NONE, "IMG_SIZE": size, **augment}
        assert line is None
