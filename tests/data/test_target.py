"""Datasets of a user, named by `_target_`: classes and functions of this module."""

import random

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Subset, random_split

from linnaeus.config.schema import AugmentConfig, DataConfig
from linnaeus.data.datasets import build_data
from linnaeus.data.image import Decoding
from linnaeus.data.taxonomy import Level, Taxonomy
from linnaeus.data.user_dataset import UserDataset
from linnaeus.runtime.rng import seed_generators
from tests.helpers import datasets
from tests.helpers.datasets import Samples

TAXONOMY = Taxonomy((Level("coarse", ("a", "b")), Level("fine", ("p", "q", "r"))), ((0, 0, 1),))

CLASSES = Taxonomy((Level("class", ("0", "1", "2")),))


def split_at_random(train):
    assert random.random() + np.random.rand() > 0
    parts = random_split(Samples("all", length=20, num_classes=2), [0.75, 0.25])
    return parts[0] if train else parts[1]


def collate(samples):
    return torch.stack([x for x, _ in samples]) + 1, torch.tensor([y for _, y in samples])


def with_collate(split):
    return Samples(split, collate_fn=collate, num_classes=2)


def build(name, img_size=None, augment=None, **node):
    module = datasets.__name__ if hasattr(datasets, name) else __name__
    augment = augment or AugmentConfig(CROP_SCALE=[1.0, 1.0])
    config = DataConfig(
        DATASET={"_target_": f"{module}.{name}", **node}, IMG_SIZE=img_size, AUGMENT=augment
    )
    return build_data(config, seed=3)


def test_split_is_passed_by_name():
    bundle = build("Samples", num_classes=2)
    assert (bundle.train.dataset.split, bundle.val.dataset.split) == ("train", "val")
    assert bundle.taxonomy == Taxonomy((Level("class", ("0", "1")),))
    assert (bundle.in_chans, bundle.img_size) == (3, (4, 4))
    batch = bundle.collate([bundle.train[i] for i in range(4)])
    assert batch.inputs.shape == (4, 3, 4, 4)
    assert batch.targets.tolist() == [[0], [1], [0], [1]]
    assert batch.targets.dtype == torch.int64


def test_torchvision_style_with_pillow_images():
    bundle = build("TorchvisionStyle", root="x", augment=AugmentConfig(HFLIP=0.0, COLOR_JITTER=0.9))
    assert (bundle.train.dataset.train, bundle.val.dataset.train) == (True, False)
    assert (bundle.in_chans, bundle.img_size) == (3, (10, 20))
    assert bundle.taxonomy.levels[0].classes == ("zero", "one", "two, deux")
    image, target = bundle.val[5]
    assert image.shape == (3, 10, 20)
    assert image[0, 0, 0] == 40
    assert target.tolist() == [2]
    assert len({float(bundle.train[9][0][0].float().mean()) for _ in range(8)}) > 1, "augmented"


def test_a_generator_of_a_dataset_is_named():
    (line,) = (line for line in build("with_generator").report if "own generator" in line)
    assert "rng" in line
    assert "own generator" not in " ".join(build("Samples", num_classes=2).report)


def with_generator(split):
    return Samples(split, num_classes=2, rng=np.random.default_rng())


def clear(split):
    return [(Image.new("RGBA", (8, 8), (200, 0, 0, alpha)), 0) for alpha in (0, 255) * 4]


def test_transparent_pillow_images_show_the_background():
    node = {"_target_": f"{__name__}.clear"}
    config = DataConfig(DATASET=node, BACKGROUND=[255, 0, 51], DECODE="fast")
    bundle = build_data(config, seed=0)
    found = [bundle.val[i][0].amax(dim=(1, 2)).tolist() for i in (0, 1)]
    assert found == [[255, 0, 51], [200, 0, 0]]
    assert bundle.preprocessing.decoding == Decoding((255, 0, 51), fast=False)


def test_pillow_images_get_the_size_asked_for_or_one_for_all():
    for asked, size in ((8, 8), (None, 224)):
        bundle = build("TorchvisionStyle", img_size=asked, root="x", even=False)
        assert bundle.train[7][0].shape == (3, size, size)
    grey = build("TorchvisionStyle", root="x", mode="L")
    assert grey.in_chans == 1
    assert grey.val[0][0].shape == (1, 10, 20)


@pytest.mark.parametrize(
    ("target", "expected"),
    [(torch.tensor([1, 2]), [1, 2]), ({"fine": 2, "coarse": 1}, [1, 2]), ({"coarse": 1}, [1, -1])],
)
def test_targets_of_several_levels(target, expected):
    dataset = UserDataset(Samples("train", targets=target), "Own", TAXONOMY, raw=False)
    assert dataset[0][1].tolist() == expected


@pytest.mark.parametrize("attributes", [{}, {"taxonomy": None, "classes": ["a", "b"]}])
def test_without_classes_targets_pass_untouched(attributes):
    bundle = build("Samples", targets=(0.5, "text"), **attributes)
    assert bundle.taxonomy is None
    batch = bundle.collate([bundle.train[i] for i in range(2)])
    assert batch.targets[0].tolist() == [0.5, 0.5]
    assert list(batch.targets[1]) == ["text", "text"]


def test_a_subset_is_looked_through_and_random_splits_agree():
    def draw():
        return float(torch.rand(())), random.random(), np.random.rand()

    seed_generators(1)
    expected = draw()
    seed_generators(1)
    bundle = build("split_at_random")
    assert bundle.taxonomy is not None
    indices = [list(dataset.dataset.indices) for dataset in (bundle.train, bundle.val)]
    assert sorted(indices[0] + indices[1]) == list(range(20))
    assert draw() == expected
    torch.manual_seed(99)  # another process
    assert list(build("split_at_random").val.dataset.indices) == indices[1]


def test_own_collate_function():
    bundle = build("with_collate")
    batch = bundle.collate([bundle.train[i] for i in range(3)])
    assert batch.inputs[:, 0, 0, 0].tolist() == [1.0, 2.0, 3.0]
    assert batch.targets.tolist() == [[0], [1], [0]]


class Labelled(Samples):
    """Targets for all samples; reading one is a mistake."""

    def __getitem__(self, index):
        raise AssertionError("a sample was read")


@pytest.mark.parametrize(
    ("targets", "taxonomy", "expected"),
    [
        (torch.tensor([0, 1, 2, 0, -1, 2]), CLASSES, [[0], [1], [2], [0], [-1], [2]]),
        ([{"coarse": 1}, {"coarse": 0, "fine": 2}] * 3, TAXONOMY, [[1, -1], [0, 2]] * 3),
    ],
)
def test_targets_of_all_samples(targets, taxonomy, expected):
    dataset = Labelled("train", targets=targets)
    wrapped = UserDataset(dataset, "Own", taxonomy, raw=False)
    assert wrapped.targets.tolist() == expected
    assert wrapped.targets.dtype == torch.int64
    part = UserDataset(Subset(dataset, [4, 0]), "Own", taxonomy, raw=False)
    assert part.targets.tolist() == [expected[4], expected[0]]


def test_a_target_transform_is_applied():
    dataset = Labelled("train", targets=[5, 6] * 3, target_transform=lambda target: target - 5)
    found = UserDataset(dataset, "Own", CLASSES, raw=False).targets
    assert found.tolist() == [[0], [1]] * 3
