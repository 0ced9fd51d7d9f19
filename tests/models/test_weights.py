"""Weights of another run, or of a file with a backbone or a whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from linnaeus.config.schema import DataConfig, ModelConfig
from linnaeus.data.taxonomy import Level, Taxonomy
from linnaeus.errors import ConfigError
from linnaeus.models.build import build_model
from linnaeus.models.hierarchical import HierarchicalClassifier
from linnaeus.models.normalisation import with_normalisation
from tests.helpers.small_models import ONE_RANK as ONE_LEVEL
from tests.helpers.small_models import TWO_RANKS as BEFORE
from tests.helpers.small_models import built

FAMILIES = BEFORE.levels[0]
SAME_NAMES = Taxonomy((FAMILIES, Level("species", ("wolf", "lion", "lynx"))), ((1, 0, 0),))
OTHER_NAMES = Taxonomy((FAMILIES, Level("species", ("lion", "lynx", "fox"))), ((0, 0, 1),))
MORE_NAMES = Taxonomy(
    (FAMILIES, Level("species", ("lion", "lynx", "wolf", "fox"))), ((0, 0, 1, 1),)
)


def source_model(seed: int = 7, in_chans: int = 3) -> HierarchicalClassifier:
    model, _ = built(seed=seed, in_chans=in_chans)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean)  # type: ignore[arg-type]
            nn.init.uniform_(module.running_var)  # type: ignore[arg-type]
    return model


def checkpoint(
    model: nn.Module, average: nn.Module | None = None, spec: Taxonomy | None = None
) -> Any:
    state: dict[str, Any] = {"model": model.state_dict(), "optimizer": {}}
    if average is not None:
        state["ema"] = {"module": average.state_dict(), "num_updates": 3}
    content: dict[str, Any] = {"progress": {"epoch": 12, "samples": 0}, "state": state}
    if spec is not None:
        levels = [{"name": level.name, "classes": list(level.classes)} for level in spec.levels]
        content["model_spec"] = {"taxonomy": {"levels": levels}}
    return content


def test_a_runs_folder_gives_its_best_checkpoint_else_its_last(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    last, best = source_model(1, in_chans=1), source_model(2, in_chans=1)
    # A run killed while it saved may have no more than `previous.pt`.
    for name, source, average in (
        ("previous", last, None),
        ("last", last, None),
        ("best", last, best),
    ):
        torch.save(checkpoint(source, average), folder / f"{name}.pt")
        model, line = built(in_chans=1, WEIGHTS=str(folder.parent))
        expected = (average or source).state_dict()
        assert all(torch.equal(model.state_dict()[name], value) for name, value in expected.items())
        assert str(folder / f"{name}.pt") in line
        assert "94 tensors" in line
        assert ("EMA" in line) == (average is not None)


@pytest.mark.parametrize(
    ("spec", "taxonomy", "new"),
    [
        (BEFORE, SAME_NAMES, []),
        (BEFORE, OTHER_NAMES, ["species"]),
        (BEFORE, MORE_NAMES, ["species"]),
        (BEFORE, ONE_LEVEL, []),
        (None, OTHER_NAMES, []),
        (None, MORE_NAMES, ["species"]),
        (None, ONE_LEVEL, ["species"]),
    ],
)
def test_heads_are_copied_where_the_classes_are_the_same(
    tmp_path: Path, spec: Taxonomy | None, taxonomy: Taxonomy, new: list[str]
) -> None:
    source = source_model()
    torch.save(checkpoint(source, spec=spec), tmp_path / "a.pt")
    model, line = built(taxonomy=taxonomy, WEIGHTS=str(tmp_path / "a.pt"))
    untrained, _ = built(taxonomy=taxonomy)
    num_tensors = 90 + 2 * (len(taxonomy.levels) - len(new))
    assert f"{num_tensors} tensors" in line
    assert ("head of" in line) == bool(new)
    for index, level in enumerate(taxonomy.levels):
        weight: Tensor = model.heads[index].weight
        if level.name in new:
            assert torch.equal(weight, untrained.heads[index].weight)
            continue
        position = [other.name for other in BEFORE.levels].index(level.name)
        head_before = source.heads[position]
        before = BEFORE.levels[position].classes
        rows = [before.index(name) for name in level.classes] if spec else range(len(before))
        for row, row_before in enumerate(rows):
            assert torch.equal(weight[row], head_before.weight[row_before])
            assert torch.equal(model.heads[index].bias[row], head_before.bias[row_before])


@pytest.mark.parametrize(
    ("prefix", "nested"), [("", None), ("module.", "state_dict"), ("_orig_mod.module.", "model")]
)
def test_state_dicts_of_a_whole_model_in_their_wrappings(
    tmp_path: Path, prefix: str, nested: str | None
) -> None:
    source = source_model()
    state: dict[str, Any] = {
        f"{prefix}{name}": value for name, value in source.state_dict().items()
    }
    torch.save(state if nested is None else {nested: state, "epoch": 3}, tmp_path / "a.pth")
    model, _ = built(WEIGHTS=str(tmp_path / "a.pth"))
    assert all(
        torch.equal(tensor, source.state_dict()[name])
        for name, tensor in model.state_dict().items()
    )


def test_nothing_is_read_where_a_checkpoint_replaces_the_weights() -> None:
    node = ModelConfig(NAME="test_resnet", WEIGHTS="nowhere.pt")
    data: dict[str, Any] = {"taxonomy": BEFORE, "in_chans": 3, "img_size": (32, 32)}
    build_model(node, **data, load_weights=False)
    with pytest.raises(ConfigError, match=r"nowhere.pt"):
        build_model(node, **data)


IMAGENET = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])


def data_of(mean: Any = None, std: Any = None, channels: int = 3) -> DataConfig:
    config = DataConfig()
    config.DATASET.NAME, config.DATASET.CHANNELS = "synthetic", channels
    config.AUGMENT.MEAN, config.AUGMENT.STD = mean, std
    return config


@pytest.mark.parametrize(
    ("node", "data", "expected", "has_note"),
    [
        (ModelConfig(NAME="resnet18"), data_of(), (None, None), False),
        (ModelConfig(NAME="resnet18", PRETRAINED=True), data_of(), IMAGENET, False),
        (ModelConfig(NAME="resnet18", PRETRAINED=True), data_of(*IMAGENET), IMAGENET, False),
        (
            ModelConfig(NAME="resnet18", PRETRAINED=True),
            data_of([0.5] * 3),
            ([0.5] * 3, IMAGENET[1]),
            True,
        ),
        (ModelConfig(NAME="resnet18", PRETRAINED=True), data_of(channels=5), (None, None), False),
        ({"_target_": "torch.nn.Linear"}, data_of(), (None, None), False),
    ],
    ids=["random", "null", "the same", "another mean", "five channels", "own model"],
)
def test_null_takes_the_normalisation_of_the_pretrained_weights(
    node: Any, data: DataConfig, expected: Any, has_note: bool
) -> None:
    found, note = with_normalisation(data, node)
    values = (found.AUGMENT.MEAN, found.AUGMENT.STD)
    assert values == expected
    assert (note is not None) == has_note


def test_a_resumed_run_keeps_its_normalisation_whatever_the_weights() -> None:
    saved = {"DATA": {"AUGMENT": {"MEAN": [0.1, 0.2, 0.3], "STD": [0.4, 0.5, 0.6]}}}
    node = ModelConfig(NAME="test_resnet", WEIGHTS="nowhere.pt")
    found, note = with_normalisation(data_of(), node, saved)
    assert (found.AUGMENT.MEAN, found.AUGMENT.STD) == ([0.1, 0.2, 0.3], [0.4, 0.5, 0.6])
    assert note is None
