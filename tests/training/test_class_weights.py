"""Weights of classes from counts and from files."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight

from linnaeus.config.schema import LossConfig
from linnaeus.data.bundle import DataBundle, collate_pairs
from linnaeus.data.taxonomy import Level, Taxonomy
from linnaeus.runtime.errors import ConfigError
from linnaeus.training.class_weights import class_statistics, class_weights
from tests.helpers.datasets import Samples
from tests.helpers.searches import prepared

TAXONOMY = Taxonomy(
    (Level("family", ("cats", "dogs")), Level("species", ("lion", "lynx", "wolf", "1")))
)
TARGETS = torch.tensor([[0, 0], [0, 0], [0, 1], [1, 2], [1, -1], [-1, -1]])
YAML = "family:\n  dogs: 3\nspecies:\n  lynx: 0.5\n  1: 4\n"
JSON = '{"family": {"dogs": 3}, "species": {"lynx": 0.5, "1": 4}}'
SEVERAL = Taxonomy(TAXONOMY.levels[1:], separator=";")


def statistics(targets=TARGETS, taxonomy=TAXONOMY, **keys):
    train = SimpleNamespace(targets=targets)
    bundle = DataBundle(train, None, taxonomy, None, None, collate_pairs)
    return class_statistics(LossConfig(**keys), bundle)


def test_balanced_weights_are_those_of_scikit_learn():
    family, species = class_weights("balanced", TAXONOMY, TARGETS)
    for weights, labels in ((family, [0, 0, 0, 1, 1]), (species, [0, 0, 1, 2])):
        present = np.unique(labels)
        expected = compute_class_weight("balanced", classes=present, y=np.array(labels))
        np.testing.assert_allclose(weights[: len(present)], expected, rtol=1e-6)
        assert weights[labels].mean().item() == pytest.approx(1)
    assert species[3] == 1  # without a training sample


@pytest.mark.parametrize(("name", "text"), [("w.yaml", YAML), ("w.json", JSON)])
def test_weights_of_a_file_have_the_mean_1_over_the_samples(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    family, species = class_weights(str(tmp_path / name), TAXONOMY, TARGETS)
    torch.testing.assert_close(family, torch.tensor([1.0, 3.0]) / (9 / 5))
    torch.testing.assert_close(species, torch.tensor([1.0, 0.5, 1.0, 4.0]) / (3.5 / 4))


def test_effective_weights_are_between_equal_and_balanced_ones():
    """(1 - beta) / (1 - beta ** n) for 3 and 2 samples of a family, scaled to a mean of 1."""
    (family, _) = statistics(CLASS_WEIGHTS="effective", EFFECTIVE_BETA=0.9)["class_weights"]
    three, two = 0.1 / 0.271, 0.1 / 0.19
    mean = (3 * three + 2 * two) / 5
    assert family.tolist() == pytest.approx([three / mean, two / mean])


def test_offsets_are_logarithms_of_shares():
    family, species = statistics(LOGIT_ADJUSTMENT=0.5)["logit_offsets"]
    assert family.exp().tolist() == pytest.approx([0.6**0.5, 0.4**0.5])
    # A class without a sample counts as if it had one.
    assert species.exp().tolist() == pytest.approx([(n / 5) ** 0.5 for n in (2, 1, 1, 1)])


def test_weights_of_presence_are_absent_over_present_labels():
    family, species = statistics(NAME="bce", POS_WEIGHT="balanced")["pos_weights"]
    assert family.tolist() == pytest.approx([2 / 3, 3 / 2])
    assert species.tolist() == pytest.approx([1, 3, 3, 1])  # the last one has no sample
    labels = torch.tensor([[1, 0, 1, -1], [1, 1, 0, 0], [0, 0, -1, 0], [1, 0, 0, 0]])
    for value, expected in (("balanced", [1 / 3, 3, 2, 1]), (4, [4, 4, 4, 4])):
        (found,) = statistics(labels, SEVERAL, NAME="bce", POS_WEIGHT=value)["pos_weights"]
        assert found.tolist() == pytest.approx(expected)


def test_labels_known_only_by_reading_images_are_an_error():
    own = (f"DATA.DATASET._target_={Samples.__module__}.Samples", "DATA.DATASET.classes=[a,b]")
    for key in ("LOSS.CLASS_WEIGHTS", "DATA.SAMPLER"):
        with pytest.raises(ConfigError, match=key):
            prepared(*own, "MODEL.NAME=test_resnet", "DATA.IMG_SIZE=32", f"{key}=balanced")
