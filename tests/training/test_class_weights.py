"""Weights of classes from counts and from files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight

from linnaeus.config.load import load_config
from linnaeus.data.datasets import build_data
from linnaeus.data.taxonomy import Level, Taxonomy
from linnaeus.runtime.distributed import World
from linnaeus.runtime.errors import ConfigError
from linnaeus.training.build import Assembly, assemble
from linnaeus.training.class_weights import class_weights
from linnaeus.training.losses import TaxonomicLoss
from tests.helpers.datasets import Samples

TAXONOMY = Taxonomy(
    (Level("family", ("cats", "dogs")), Level("species", ("lion", "lynx", "wolf", "1")))
)
TARGETS = torch.tensor([[0, 0], [0, 0], [0, 1], [1, 2], [1, -1], [-1, -1]])
YAML = "family:\n  dogs: 3\nspecies:\n  lynx: 0.5\n  1: 4\n"
JSON = '{"family": {"dogs": 3}, "species": {"lynx": 0.5, "1": 4}}'
CSV = "level,class,weight\nfamily,dogs,3\nspecies,lynx,0.5\nspecies,1,4\n"


def test_balanced_weights_are_those_of_scikit_learn() -> None:
    family, species = class_weights("balanced", TAXONOMY, TARGETS)
    for weights, labels in ((family, [0, 0, 0, 1, 1]), (species, [0, 0, 1, 2])):
        present = np.unique(labels)
        expected = compute_class_weight("balanced", classes=present, y=np.array(labels))
        np.testing.assert_allclose(weights[: len(present)], expected, rtol=1e-6)
        assert weights[labels].mean().item() == pytest.approx(1)
    assert species[3] == 1  # without a training sample


@pytest.mark.parametrize(("name", "text"), [("w.yaml", YAML), ("w.json", JSON), ("w.csv", CSV)])
def test_weights_of_a_file_have_the_mean_1_over_the_samples(
    tmp_path: Path, name: str, text: str
) -> None:
    (tmp_path / name).write_text(text)
    family, species = class_weights(str(tmp_path / name), TAXONOMY, TARGETS)
    torch.testing.assert_close(family, torch.tensor([1.0, 3.0]) / (9 / 5))
    torch.testing.assert_close(species, torch.tensor([1.0, 0.5, 1.0, 4.0]) / (3.5 / 4))


def test_a_class_has_one_weight(tmp_path: Path) -> None:
    (tmp_path / "w.csv").write_text(CSV + "species,lynx,0.25\n")
    with pytest.raises(ConfigError, match=r"LOSS\.CLASS_WEIGHTS.*lynx.*0\.5 .*0\.25"):
        class_weights(str(tmp_path / "w.csv"), TAXONOMY, TARGETS)


def assembled(*argv: str) -> Assembly:
    config = load_config(
        ["EXPERIMENT.DEVICE=cpu", "MODEL.NAME=test_resnet", "DATA.IMG_SIZE=32", *argv]
    ).config
    data, world = build_data(config.DATA, seed=0), World(torch.device("cpu"))
    return assemble(config.MODEL, config.LOSS, config.OPTIMIZER, config.TRAIN, data, world)


def test_a_run_weights_by_its_own_training_samples() -> None:
    dataset = ("DATA.DATASET.NAME=synthetic", "DATA.DATASET.NUM_SAMPLES=200")
    criterion = assembled(*dataset, "LOSS.CLASS_WEIGHTS=balanced").criterion
    assert isinstance(criterion, TaxonomicLoss)
    config = load_config([*dataset, "DATA.IMG_SIZE=32"]).config
    train = build_data(config.DATA, seed=0).train
    labels = torch.stack([train[index][1] for index in range(len(train))])  # type: ignore[arg-type]
    for level in range(labels.shape[1]):
        counts = labels[:, level].bincount().double()
        expected = (len(labels) / (len(counts) * counts)).float()
        torch.testing.assert_close(criterion.class_weights(level), expected)


def test_labels_that_are_not_to_be_had_without_reading_images_are_an_error() -> None:
    own = [
        f"DATA.DATASET.{key}" for key in (f"_target_={Samples.__module__}.Samples", "classes=[a,b]")
    ]
    for key in ("LOSS.CLASS_WEIGHTS", "DATA.SAMPLER"):
        with pytest.raises(ConfigError, match=rf"{key}"):
            assembled(*own, f"{key}=balanced")
