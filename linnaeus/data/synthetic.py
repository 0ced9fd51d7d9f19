"""Generated images of any size, channels, classes and length, with a pattern for each class to learn."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import Dataset

from linnaeus.config.schema import DataConfig, DatasetConfig
from linnaeus.data.bundle import DataBundle, as_size, collate_pairs
from linnaeus.data.taxonomy import Level, Taxonomy
from linnaeus.data.transforms import Transform, build_transforms, preprocessing_of
from linnaeus.data.unknown import known_labels
from linnaeus.errors import ConfigError
from linnaeus.rng import derive_seed

GRID = 4
"""A class is a pattern of GRID x GRID fields, interpolated to the size of the image."""


class SyntheticImages(Dataset[tuple[Tensor, Tensor]]):
    """Sample i is the sum of the patterns of its classes, one per level, and of noise that depends on i.

    Args:
        num_samples: length of the dataset.
        num_classes: classes of each level, coarse to fine, never fewer than in the level above.
        shape: channels, height and width.
        transform: applied to each image.
        split: 0 for training, 1 for validation: same classes, other noise.
        noise: standard deviation of the noise, on the 0-255 scale of pixels.
        unknown_fraction: see `known_labels`.
    """

    def __init__(
        self,
        num_samples: int,
        num_classes: list[int],
        shape: tuple[int, int, int],
        transform: Transform,
        split: int,
        noise: float,
        unknown_fraction: float = 0.0,
    ) -> None:
        self.num_samples = num_samples
        self.num_classes = num_classes
        self.shape = shape
        self.transform = transform
        self.unknown_fraction = unknown_fraction
        generator = torch.Generator().manual_seed(derive_seed(split, *num_classes))
        # Each sample takes a window of one buffer: far cheaper than drawing noise for it.
        self.noise = torch.randn(2 * shape[0] * shape[1] * shape[2] + 4096, generator=generator) * noise

    def __len__(self) -> int:
        return self.num_samples

    @property
    def targets(self) -> Tensor:
        """Labels [N, R] of all samples, int64."""
        rows = [labels_of(finest, self.num_classes) for finest in range(self.num_classes[-1])]
        return torch.tensor(rows)[torch.arange(self.num_samples) % self.num_classes[-1]]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < self.num_samples:
            raise IndexError(index)
        labels = labels_of(index % self.num_classes[-1], self.num_classes)
        channels, height, width = self.shape
        fields = torch.stack([_pattern(level, label, channels) for level, label in enumerate(labels)]).sum(0)
        image = interpolate(fields[None], (height, width), mode="bilinear", align_corners=False)[0]
        numel = channels * height * width
        start = derive_seed(index) % (len(self.noise) - numel)
        image = image + self.noise[start : start + numel].view(self.shape)
        known = known_labels(labels, index, self.unknown_fraction)
        return self.transform((image + 127.5).clamp_(0, 255).to(torch.uint8)), torch.tensor(known)


def labels_of(finest: int, num_classes: list[int]) -> list[int]:
    """Labels of all levels, coarse to fine; neighbouring labels of the finest level share ancestors.

    >>> labels_of(5, [2, 4, 8])
    [1, 2, 5]
    """
    labels = [finest]
    for below, above in pairwise(reversed(num_classes)):
        labels.append(labels[-1] * above // below)
    return labels[::-1]


def build_synthetic(config: DataConfig) -> DataBundle:
    """Synthetic images of `DATA.IMG_SIZE` (default 64 x 64 pixels).

    Raises:
        ConfigError: a level with fewer classes than the level above it, or labels that cannot be left out.
    """
    dataset: DatasetConfig = config.DATASET
    taxonomy = _taxonomy(dataset)
    size = as_size(config.IMG_SIZE, (64, 64))
    shape, counts = (dataset.CHANNELS, *size), dataset.NUM_CLASSES
    transform, transform_val = build_transforms(config.AUGMENT, size, dataset.CHANNELS)
    train = SyntheticImages(
        dataset.NUM_SAMPLES, counts, shape, transform, 0, dataset.NOISE, dataset.UNKNOWN_FRACTION
    )
    val = SyntheticImages(dataset.NUM_SAMPLES_VAL, counts, shape, transform_val, 1, dataset.NOISE)
    report = [f"synthetic: {len(train)} training and {len(val)} validation samples"]
    return DataBundle(
        train, val, taxonomy, dataset.CHANNELS, size, collate_pairs, report,
        preprocessing_of(config.AUGMENT, size, dataset.CHANNELS),
    )  # fmt: skip


def _taxonomy(dataset: DatasetConfig) -> Taxonomy:
    counts = dataset.NUM_CLASSES
    names = dataset.RANKS or [f"rank{depth}" for depth in range(1, len(counts) + 1)]
    problems = []
    if not counts or counts != sorted(counts):
        problems.append(
            f"DATA.DATASET.NUM_CLASSES: {counts} must go from few classes (coarse) to many (fine)"
        )
    if len(names) != len(counts):
        problems.append(f"DATA.DATASET.RANKS: {len(names)} names for {len(counts)} entries of NUM_CLASSES")
    if dataset.UNKNOWN_FRACTION and len(counts) == 1:
        problems.append(
            f"DATA.DATASET.UNKNOWN_FRACTION: {dataset.UNKNOWN_FRACTION} keeps the labels of a coarser rank, "
            "and NUM_CLASSES has one rank only; set it 0, or add a rank"
        )
    if problems:
        raise ConfigError(problems)
    levels = tuple(
        Level(name, tuple(f"{name}-{label}" for label in range(count)))
        for name, count in zip(names, counts, strict=True)
    )
    parents = tuple(
        tuple(label * above // below for label in range(below)) for above, below in pairwise(counts)
    )
    return Taxonomy(levels, parents)


def _pattern(level: int, label: int, channels: int) -> Tensor:
    """Pattern [channels, GRID, GRID] of one class: values around 0, on the 0-255 scale of pixels."""
    generator = torch.Generator().manual_seed(derive_seed(level, label))
    return torch.randint(-60, 61, (channels, GRID, GRID), generator=generator).float()
