"""Mixup and CutMix of training batches: labels on all levels, reproducible, counted by AutoBatch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchvision.transforms import v2

from linnaeus.config.schema import AugmentConfig, DataConfig, DatasetConfig
from linnaeus.data.batch import Batch, BatchSpec
from linnaeus.data.bundle import collate_pairs
from linnaeus.data.datasets import build_data
from linnaeus.data.loader import Loaders, build_loaders
from linnaeus.data.mixing import Mixing, mixed_epochs, soft_targets
from linnaeus.runtime.distributed import World
from linnaeus.runtime.rng import seed_all
from tests.helpers.ledger import Ledger

CPU = torch.device("cpu")
COUNTS = [2, 3]
LABELS = torch.tensor([[0, 1], [1, -1], [-1, -1], [1, 2], [0, 0]])
SOFT = soft_targets(LABELS, COUNTS)
IMAGES = torch.rand(5, 3, 8, 8, generator=torch.Generator().manual_seed(0))
ALPHAS = [(0.4, 0.0), (0.0, 1.0), (0.4, 1.0)]


@pytest.mark.parametrize(
    ("ours", "other"), [((0.4, 0.0), v2.MixUp(alpha=0.4)), ((0.0, 0.7), v2.CutMix(alpha=0.7))]
)
def test_the_batch_is_that_of_torchvision(ours: tuple[float, float], other: Any) -> None:
    changed = []
    for seed in range(5):
        seed_all(seed)
        images, soft = Mixing(COUNTS, *ours)(Batch(IMAGES.clone(), LABELS))
        seed_all(seed)
        expected, expected_soft = other(IMAGES, SOFT)
        torch.testing.assert_close(images, expected)
        torch.testing.assert_close(soft, expected_soft)
        changed.append(not torch.allclose(images, IMAGES))
    assert sum(changed) > 2  # a rectangle may be empty


def test_a_batch_that_a_user_keeps_is_not_written_over() -> None:
    for in_place in (True, False):
        images = IMAGES.clone()
        Mixing(COUNTS, 0.4, 0.0, in_place=in_place)(Batch(images, LABELS))
        assert torch.equal(images, IMAGES) != in_place


def loaders(
    workers: int = 0, size: int = 4, epochs: int = 2, sampler: str = "shuffle", **mix: Any
) -> Loaders:
    node = DatasetConfig(NAME="synthetic", NUM_SAMPLES=13, NUM_SAMPLES_VAL=6, NUM_CLASSES=COUNTS)
    augment = AugmentConfig(**({"MIXUP": 0.4, "CUTMIX": 1.0} | mix))
    config = DataConfig(DATASET=node, IMG_SIZE=8, AUGMENT=augment, NUM_WORKERS=workers)
    data = build_data(config, seed=0)
    return build_loaders(
        data,
        config,
        World(CPU),
        sizes=lambda epoch, skip: iter([size] * ((12 - skip) // size)),
        batch_size_val=4,
        seed=5,
        mixed_epochs=mixed_epochs(augment, epochs),
    )


def batches(made: Loaders, epoch: int = 0, skip: int = 0) -> list[Batch]:
    made.train.set_epoch(epoch, skip)
    return list(made.train)


def test_batches_do_not_depend_on_workers_or_on_where_an_epoch_is_resumed() -> None:
    with loaders() as made, loaders(workers=2) as parallel:
        whole = batches(made)
        for one, other in zip(whole, batches(parallel), strict=True):
            assert torch.equal(one.inputs, other.inputs)
            assert torch.equal(one.targets, other.targets)
        (rest,) = batches(made, skip=8)
        assert torch.equal(rest.inputs, whole[2].inputs)
        assert torch.equal(rest.targets, whole[2].targets)
        again = batches(made, epoch=1)
    assert not torch.equal(again[0].inputs, whole[0].inputs)
    assert any(((batch.targets > 0) & (batch.targets < 1)).any() for batch in whole)


def test_validation_and_the_last_epochs_are_not_mixed() -> None:
    assert mixed_epochs(AugmentConfig(MIXUP=0.1, MIX_OFF_EPOCHS=3), 4) == 1
    assert mixed_epochs(AugmentConfig(MIX_OFF_EPOCHS=3), 3) == 0
    with loaders(MIX_OFF_EPOCHS=1) as made, loaders(MIXUP=0.0, CUTMIX=0.0) as plain:
        assert batches(made, 0)[0].targets.shape == (4, 5)
        for mixes, other in (
            (batches(made, 1), batches(plain, 1)),
            (list(made.val), list(plain.val)),
        ):
            for one, expected in zip(mixes, other, strict=True):
                assert torch.equal(one.inputs, expected.inputs)
                assert torch.equal(one.targets, expected.targets)


@pytest.mark.parametrize("alphas", ALPHAS)
def test_a_spec_makes_batches_of_the_mixed_form_without_collating(
    alphas: tuple[float, float],
) -> None:
    samples = list(zip(IMAGES, LABELS, strict=True))
    mixing = Mixing(COUNTS, *alphas)
    spec = BatchSpec(samples, mixing.soft_collate(collate_pairs), num_samples=5)
    spec.collate = lambda samples: pytest.fail("batches are filled")
    real = mixing(collate_pairs([samples[index % 5] for index in range(7)]))
    for made, expected in zip(spec.make(7, "meta"), real, strict=True):
        assert (made.shape, made.dtype) == (expected.shape, expected.dtype)


@pytest.mark.parametrize("alphas", ALPHAS[:2])
@pytest.mark.parametrize("in_place", [True, False])
def test_mixing_holds_the_copies_that_the_bound_of_host_memory_counts(
    alphas: tuple[float, float], in_place: bool
) -> None:
    batch = Batch(torch.rand(64, 3, 32, 32), torch.zeros(64, 2, dtype=torch.int64))
    mixing = Mixing(COUNTS, *alphas, in_place=in_place)
    batch = mixing.to_soft_targets(batch)
    with Ledger() as ledger:
        mixing.mix(batch)
        copies = ledger.peak_bytes / batch.inputs.nbytes
    assert mixing.num_copies <= copies < mixing.num_copies + 0.03  # an image and the labels
