"""The splits for training, and the interface of any dataset: its length, labels and sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from linnaeus.data.batch import Batch
from linnaeus.data.mixing import DeviceTransform
from linnaeus.data.taxonomy import LabelIndex, Taxonomy
from linnaeus.data.transforms import Preprocessing
from linnaeus.runtime.errors import ConfigError
from linnaeus.runtime.words import counted, several

Collate = Callable[[list[Any]], Batch]
"""Turns a list of samples into a batch."""
OnMain = Callable[[Callable[[], Any]], Any]
"""Calls a function on rank 0 and returns its result on all; see `World.on_main`."""


class Resized(NamedTuple):
    """The training data from an epoch on.

    Attributes:
        start: the first epoch, from 0.
        side: of the images, in pixels.
        dataset: the samples, with a transform to this side.
    """

    start: int
    side: int
    dataset: Dataset[Any]


@dataclass
class DataBundle:
    """The splits, and their properties that the model needs.

    Attributes:
        train, val: map-style datasets; a sample is (input, target).
        taxonomy: levels and classes; None where a user's dataset declares none.
        in_chans: channels of an input [C, H, W]; None where inputs are not images.
        img_size: height and width of an input, in pixels; None where inputs are not images.
        collate: turns a list of samples into a `Batch`.
        report: sentences for the user about samples found, held out or left out.
        preprocessing: how an image becomes an input in validation; None where the dataset gives tensors.
        index: gives the labels of class names; None where there is no more to it than the taxonomy's names.
        on_device: transforms of batches on the device; validation is neither erased nor mixed.
        test: a third split, for one evaluation at the end; None if there is none.
        source: the folder, the manifest or the name of the dataset, for the report.
        resized: the training data of each side of DATA.IMG_SIZE_SCHEDULE; the last is `train`.
    """

    train: Dataset[Any]
    val: Dataset[Any]
    taxonomy: Taxonomy | None
    in_chans: int | None
    img_size: tuple[int, int] | None
    collate: Collate
    report: list[str] = field(default_factory=list)
    preprocessing: Preprocessing | None = None
    index: LabelIndex | None = None
    on_device: DeviceTransform = field(default_factory=DeviceTransform)
    test: Dataset[Any] | None = None
    source: str = ""
    resized: tuple[Resized, ...] = ()

    @property
    def splits(self) -> dict[str, Dataset[Any]]:
        """Each split that there is, by name."""
        named = {"train": self.train, "val": self.val, "test": self.test}
        return {name: dataset for name, dataset in named.items() if dataset is not None}

    @property
    def description(self) -> str:
        """The levels with their first classes, and the length of each split, in one line."""
        levels = [] if self.taxonomy is None else self.taxonomy.levels
        shown = [
            f"{x.name} ({counted(len(x.classes), 'class')}: {several(x.classes)})" for x in levels
        ]
        parts = [f"{counted(len(levels), 'level')}: {', '.join(shown)}"] if shown else []
        sizes = (f"{name} {dataset_length(split)}" for name, split in self.splits.items())
        return f"{self.source}: {'; '.join([*parts, 'splits: ' + ', '.join(sizes)])}"


def collate_pairs(samples: list[Any]) -> Batch:
    """Collate (input, target) samples with torch's default rules."""
    inputs, targets = default_collate(samples)
    return Batch(inputs, targets)


def limited(dataset: Dataset[Any], most: int | None, seed: int) -> Dataset[Any]:
    """Limit the dataset to a number of random samples, in their order. The seed selects them."""
    length = dataset_length(dataset)
    if most is None or most >= length:
        return dataset
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(length, generator=generator)[:most].sort().values
    return dataset.take(rows)  # type: ignore[attr-defined, no-any-return]


def dataset_length(dataset: Dataset[Any]) -> int:
    """Length of a map-style dataset, whose type torch declares without one."""
    return len(dataset)  # type: ignore[arg-type]


def training_targets(data: DataBundle, key: str, *, takes_several: bool = False) -> Tensor:
    """The labels [N, L] of all training samples, int64, -1 where unknown, without reading an image.

    Several labels for a sample are [N, C]: 1, 0, or -1 where unknown.

    Raises:
        ConfigError: the dataset has no classes, does not give the labels, or has several for a sample and the
            key does not take them.
    """
    if data.taxonomy is not None and data.taxonomy.is_multilabel and not takes_several:
        raise ConfigError(
            f"{key}: needs one label for each sample, but samples have several; leave it out"
        )
    targets = getattr(data.train, "targets", None)
    if data.taxonomy is None or not isinstance(targets, Tensor):
        lacking = "class names or their number" if data.taxonomy is None else "`targets`"
        raise ConfigError(
            f"{key}: needs the labels of all training samples, but the dataset has no {lacking}; give it "
            "an attribute `targets` with the label of each sample, and `classes`, `num_classes` or `taxonomy`"
        )
    return targets


def as_size(img_size: int | list[int] | None, default: tuple[int, int]) -> tuple[int, int]:
    """`DATA.IMG_SIZE` as (height, width), in pixels."""
    if img_size is None:
        return default
    sides = [img_size] if isinstance(img_size, int) else list(img_size)
    return sides[0], sides[-1]
