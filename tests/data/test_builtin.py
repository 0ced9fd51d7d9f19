import gzip

import pytest
import torch

from linnaeus.config.schema import AugmentConfig, DataConfig, DatasetConfig
from linnaeus.data.builtin import FASHION
from linnaeus.data.datasets import build_data
from linnaeus.runtime.errors import ConfigError, DataError
from tests.helpers.fashion import write_fashion_mnist, write_idx

PLAIN = AugmentConfig(CROP_SCALE=[1.0, 1.0])


def build(augment=PLAIN, img_size=None, seed=0, **dataset):
    config = DataConfig(DATASET=DatasetConfig(**dataset), AUGMENT=augment, IMG_SIZE=img_size)
    return build_data(config, seed=seed)


def everything(dataset):
    inputs, targets = zip(*(dataset[i] for i in range(len(dataset))), strict=True)
    return torch.stack(inputs), torch.stack(targets)


def assert_nests(taxonomy, targets):
    for depth, row in enumerate(taxonomy.parents):
        assert torch.equal(torch.tensor(row)[targets[:, depth + 1]], targets[:, depth])


def test_digits():
    bundle = build(NAME="digits")
    assert (bundle.in_chans, bundle.img_size) == (1, (32, 32))
    assert bundle.taxonomy.num_classes == {"shape": 3, "digit": 10}
    inputs, targets = everything(bundle.train)
    assert inputs.shape == (1438, 1, 32, 32)
    assert (inputs.dtype, targets.dtype) == (torch.uint8, torch.int64)
    assert (inputs.min(), inputs.max()) == (0, 255)
    assert_nests(bundle.taxonomy, targets)
    held_out = torch.bincount(everything(bundle.val)[1][:, 1])
    assert held_out.sum() == 359
    assert held_out.min() >= 34
    assert len(build(NAME="digits", VAL_FRACTION=0.5).val) == 898


def test_fashion_mnist(tmp_path):
    write_fashion_mnist(tmp_path, 20, 10)
    bundle = build(NAME="fashion_mnist", ROOT=str(tmp_path))
    assert bundle.taxonomy == FASHION
    inputs, targets = everything(bundle.train)
    assert torch.equal(inputs[:, 0, 9, 9].int(), torch.arange(20).int())
    assert targets[:, 1].tolist() == [*range(10)] * 2
    assert targets[5, 0] == targets[7, 0] == targets[9, 0], "sandals, sneakers and boots are shoes"


def test_files_of_fashion_mnist_that_cannot_be_used(tmp_path):
    write_fashion_mnist(tmp_path, 20, 10)
    labels, images = tmp_path / "train-labels-idx1-ubyte.gz", tmp_path / "t10k-images-idx3-ubyte.gz"
    whole = images.read_bytes()
    for content in (whole[:-30], gzip.compress(b"\0\0\x08")):
        images.write_bytes(content)
        with pytest.raises(DataError, match=images.name):
            build(NAME="fashion_mnist", ROOT=str(tmp_path))
    for values in (range(19), [10] * 20):
        write_idx(labels, values)
        with pytest.raises(DataError, match=labels.name):
            build(NAME="fashion_mnist", ROOT=str(tmp_path))
    labels.unlink()
    with pytest.raises(ConfigError, match=rf"DATASET.ROOT.*{labels.name}.*dataset-fashion"):
        build(NAME="fashion_mnist", ROOT=str(tmp_path))


SYNTHETIC = {
    "NAME": "synthetic",
    "NUM_SAMPLES": 96,
    "NUM_SAMPLES_VAL": 48,
    "NUM_CLASSES": [2, 5, 10],
}


def test_synthetic_is_what_was_asked_for():
    bundle = build(img_size=[12, 20], CHANNELS=5, **SYNTHETIC)
    assert (bundle.in_chans, bundle.img_size) == (5, (12, 20))
    assert bundle.taxonomy.num_classes == {"level1": 2, "level2": 5, "level3": 10}
    inputs, targets = everything(bundle.train)
    assert inputs.shape == (96, 5, 12, 20)
    assert len(bundle.val) == 48
    assert_nests(bundle.taxonomy, targets)
    assert [len(column.unique()) for column in targets.T] == [2, 5, 10]
    with pytest.raises(IndexError):
        bundle.train[96]


def test_synthetic_samples_follow_from_their_index():
    first, second = build(img_size=8, **SYNTHETIC), build(img_size=8, seed=9, **SYNTHETIC)
    torch.manual_seed(1)
    assert torch.equal(first.train[17][0], second.train[17][0])
    assert not torch.equal(first.train[17][0], first.train[27][0])
    assert not torch.equal(first.train[17][0], first.val[17][0])
    state = torch.get_rng_state()
    first.train[3]
    assert torch.equal(state, torch.get_rng_state())


def test_a_fraction_of_the_training_labels_may_be_unknown():
    dataset = SYNTHETIC | {"NUM_SAMPLES": 1000}
    plain = build(img_size=4, **dataset)
    hidden = build(img_size=4, UNKNOWN_FRACTION=0.6, seed=5, **dataset)
    assert torch.equal(plain.train[7][0], hidden.train[7][0])
    targets = plain.train.targets
    targets_hidden = everything(hidden.train)[1]
    assert torch.equal(torch.where(targets_hidden < 0, targets_hidden, targets), targets_hidden)
    known = targets_hidden >= 0
    assert torch.equal(known.cummin(dim=1).values, known), "without a gap"
    depths = torch.bincount(known.sum(dim=1)) / len(targets)
    assert depths.tolist() == pytest.approx([0, 0.3, 0.3, 0.4], abs=0.05)
    assert (targets >= 0).all()
    assert torch.equal(everything(plain.val)[1], everything(hidden.val)[1])
