"""What the device does to batches: erasing, Mixup and CutMix with labels on all levels, reproducible."""

from collections import Counter
from functools import partial

import pytest
import torch
from torchvision.transforms import v2

from linnaeus.config.schema import AugmentConfig, DataConfig, DatasetConfig
from linnaeus.data.batch import Batch, BatchSpec
from linnaeus.data.bundle import collate_pairs
from linnaeus.data.datasets import build_data
from linnaeus.data.loader import build_loaders
from linnaeus.data.mixing import (
    DeviceTransform,
    Mixing,
    build_device_transform,
    mixed_epochs,
    soft_targets,
)
from linnaeus.data.transforms import build_transforms
from linnaeus.runtime.distributed import World
from linnaeus.runtime.rng import seed_all
from tests.helpers.ledger import Ledger

CPU = torch.device("cpu")
COUNTS = [2, 3]
LABELS = torch.tensor([[0, 1], [1, -1], [-1, -1], [1, 2], [0, 0]])
SOFT = soft_targets(LABELS, COUNTS)
IMAGES = torch.rand(5, 3, 8, 8, generator=torch.Generator().manual_seed(0))
ALPHAS = [{"MIXUP": 0.4}, {"CUTMIX": 1.0}, {"MIXUP": 0.4, "CUTMIX": 1.0}]


def transform(**augment):
    return DeviceTransform(mixing=Mixing(COUNTS, AugmentConfig(**augment)))


def chosen(on_device, batch):
    return batch._replace(choices=on_device.choose(batch))


@pytest.mark.parametrize(
    ("ours", "other"),
    [({"MIXUP": 0.4}, v2.MixUp(alpha=0.4)), ({"CUTMIX": 0.7}, v2.CutMix(alpha=0.7))],
)
def test_the_batch_is_that_of_torchvision(ours, other):
    changed, on_device = [], transform(**ours)
    for seed in range(5):
        seed_all(seed)
        images, soft = on_device(chosen(on_device, Batch(IMAGES, LABELS)))
        seed_all(seed)
        expected, expected_soft = other(IMAGES, SOFT)
        torch.testing.assert_close(images, expected)
        torch.testing.assert_close(soft, expected_soft)
        changed.append(not torch.allclose(images, IMAGES))
    assert sum(changed) > 2  # a rectangle may be empty


@pytest.mark.parametrize("alphas", ALPHAS)
@pytest.mark.parametrize(("repeats", "is_mixed"), [(2, True), (3, True), (1, False)])
def test_a_repeated_sample_is_not_mixed_with_itself(alphas, repeats, is_mixed):
    """With a shift of one, only the first of several in a row is mixed with another."""
    label = torch.tensor([0, 1, 2]).repeat_interleave(max(2, repeats))
    images = torch.zeros(len(label), 1, 8, 8) + label[:, None, None, None]
    on_device = transform(REPEATS=repeats, **alphas)
    torch.manual_seed(1)
    batch = Batch(images, torch.stack([label % 2, label], dim=1))
    mixed, soft = on_device(chosen(on_device, batch))
    fine = soft[:, 2:]
    assert bool((fine.max(dim=1).values < 1).all()) == is_mixed
    torch.testing.assert_close(mixed.mean((1, 2, 3)), fine @ torch.arange(3.0))


def kinds(**augment):
    """What 400 batches of one shape get."""
    on_device, batch = transform(**augment), Batch(IMAGES, LABELS)
    torch.manual_seed(0)
    drawn = [(on_device.choose(batch) or {}).get("mix", {}) for _ in range(400)]
    return Counter("cutmix" if "box" in each else "mixup" if each else "none" for each in drawn)


def test_probability_and_switch_decide_what_a_batch_gets():
    assert kinds(CUTMIX=1.0, MIX_SWITCH=0.0) == {"cutmix": 400}
    some = kinds(MIXUP=1.0, CUTMIX=1.0, MIX_PROB=0.5, MIX_SWITCH=0.2)
    assert some["none"] == pytest.approx(200, abs=50)
    assert some["cutmix"] == pytest.approx(40, abs=25)


def test_the_rectangle_has_sides_between_the_bounds():
    mixing = Mixing(COUNTS, AugmentConfig(CUTMIX=1.0, CUTMIX_MINMAX=[0.25, 0.5]))
    for height, width in ((40, 80), (3, 2)):
        for _ in range(50):
            drawn = mixing.draw(torch.zeros(2, 1, height, width))
            left, top, right, bottom = drawn["box"]
            for side, start, end in ((width, left, right), (height, top, bottom)):
                assert 0 <= start <= end <= side
                assert int(0.25 * side) <= end - start <= 0.5 * side
            area = (right - left) * (bottom - top) / (height * width)
            assert drawn["lam_adjusted"] == pytest.approx(1 - area)


@pytest.mark.parametrize("mode", ["const", "rand", "pixel"])
def test_erasing_depends_on_the_choices_alone(mode):
    augment = AugmentConfig(ERASING=1.0, ERASING_MODE=mode)
    preprocessing = build_transforms(augment, (16, 16), 3)[1]
    on_device = build_device_transform(augment, None, preprocessing)
    pixels = torch.full((4, 3, 16, 16), 255, dtype=torch.uint8)
    batch = chosen(on_device, Batch(pixels, LABELS[:4]))
    state = torch.get_rng_state()
    first, again = on_device(batch)[0], on_device(batch)[0]
    assert torch.equal(first, again)
    assert torch.equal(state, torch.get_rng_state())
    assert not torch.equal(first, on_device(chosen(on_device, batch))[0])
    plain = on_device(Batch(pixels, None))[0]
    torch.testing.assert_close(plain, torch.ones(4, 3, 16, 16))
    for image in first:
        erased = image[image != plain[0]]
        assert 0 < erased.numel() < 0.5 * image.numel()
        assert len(erased.unique()) == pytest.approx(
            {"const": 1, "rand": 3}.get(mode, erased.numel())
        )


def loaders(workers=0, **mix):
    node = DatasetConfig(NAME="synthetic", NUM_SAMPLES=13, NUM_SAMPLES_VAL=6, NUM_CLASSES=COUNTS)
    augment = AugmentConfig(**({"MIXUP": 0.4, "CUTMIX": 1.0, "ERASING": 0.5} | mix))
    config = DataConfig(DATASET=node, IMG_SIZE=8, AUGMENT=augment, NUM_WORKERS=workers)
    data = build_data(config, seed=0)
    return build_loaders(
        data,
        config,
        World(CPU),
        sizes=lambda epoch, skip: iter([4] * ((12 - skip) // 4)),
        batch_size_val=4,
        seed=5,
        mixed_epochs=mixed_epochs(augment, 2),
    )


def batches(made, epoch=0, skip=0):
    """The training batches as the model sees them."""
    made.train.set_epoch(epoch, skip)
    on_device = made.train._loader.dataset.on_device
    return [on_device(batch) for batch in made.train]


def assert_same(one, other):
    assert all(map(torch.equal, one, other))


OWN = [{"_target_": "tests.data.test_transforms.Albumentation"}]


AUGMENTED = {"CROP_SCALE": [0.3, 1.0], "COLOR_JITTER": 0.3, "POLICY": "randaugment", "TRAIN": OWN}


@pytest.mark.parametrize("augment", [{}, {"REPEATS": 3, **AUGMENTED}])
def test_batches_do_not_depend_on_workers_or_on_a_resume(augment):
    with loaders(**augment) as made, loaders(workers=2, **augment) as parallel:
        whole = batches(made)
        for one, other in zip(whole, batches(parallel), strict=True):
            assert_same(one, other)
        (rest,) = batches(made, skip=8)
        assert_same(rest, whole[2])
        again = batches(made, epoch=1)
    assert not torch.equal(again[0][0], whole[0][0])
    assert any(((targets > 0) & (targets < 1)).any() for _, targets in whole)


def test_validation_and_the_last_epochs_are_not_mixed():
    off = {"MIXUP": 0.0, "CUTMIX": 0.0, "ERASING": 0.0}
    with loaders(MIX_OFF_EPOCHS=1, ERASING=0.0) as made, loaders(**off) as plain:
        assert batches(made, 0)[0][1].shape == (4, 5)
        for one, expected in zip(batches(made, 1), batches(plain, 1), strict=True):
            assert_same(one, expected)
    with loaders() as made:
        assert {batch.choices for batch in made.val} == {None}


@pytest.mark.parametrize("augment", ALPHAS[:2])
def test_mixing_holds_one_copy_of_the_images(augment):
    """Whatever is drawn, so that a trial holds what any step holds."""
    images, labels = torch.rand(64, 3, 32, 32), torch.zeros(64, 2, dtype=torch.int64)
    on_device = transform(**augment)
    for seed in range(4):
        torch.manual_seed(seed)
        batch = chosen(on_device, Batch(images, labels))
        with Ledger() as ledger:
            on_device(batch)
        assert ledger.peak_bytes == pytest.approx(images.nbytes, rel=0.02)


@pytest.mark.parametrize("augment", ALPHAS)
def test_a_spec_makes_batches_that_are_mixed(augment):
    samples = list(zip(IMAGES, LABELS, strict=True))
    on_device = transform(**augment, MIX_PROB=0.0)
    choose = partial(on_device.choose, always=True)
    spec = BatchSpec(samples, collate_pairs, num_samples=5, choose=choose)
    for size in (1, 7):
        batch = spec.make(size, "meta")
        assert "mix" in (batch.choices or {})
        inputs, targets = on_device(batch)
        assert inputs.shape == (size, 3, 8, 8)
        assert (targets.shape, targets.dtype) == ((size, 5), torch.float32)
    assert "mix" in (spec.load(3).choices or {})
