"""Scikit-learn's handwritten digits: 1,797 grey images of 8 x 8 pixels that need no download."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset

from linnaeus.config.schema import DataConfig
from linnaeus.data.bundle import DataBundle, as_size, collate_pairs
from linnaeus.data.split import stratified_split
from linnaeus.data.taxonomy import Level, Taxonomy
from linnaeus.data.transforms import Transform, build_transforms, preprocessing_of
from linnaeus.data.unknown import known_labels

SHAPES = ("straight", "curved", "looped")
"""Classes of the coarse level: how a digit is drawn."""

SHAPE_OF_DIGIT = (2, 0, 1, 1, 0, 1, 2, 0, 2, 2)
"""For each digit, its position in `SHAPES`: 1, 4, 7 straight; 2, 3, 5 curved; 0, 6, 8, 9 looped."""

TAXONOMY = Taxonomy(
    (Level("shape", SHAPES), Level("digit", tuple(str(digit) for digit in range(10)))), (SHAPE_OF_DIGIT,)
)


class ImageTensors(Dataset[tuple[Tensor, Tensor]]):
    """Images held in memory.

    Args:
        images: [N, C, H, W], uint8.
        targets: [N, R], int64, one column per level.
        transform: applied to each image.
    """

    def __init__(self, images: Tensor, targets: Tensor, transform: Transform) -> None:
        self.images = images
        self.targets = targets
        self.transform = transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.transform(self.images[index]), self.targets[index]


def build_digits(config: DataConfig) -> DataBundle:
    """The digits with two levels, `shape` above `digit`.

    Validation is a part held out, stratified by digit and the same in every run.
    """
    from sklearn.datasets import load_digits  # its import takes a second, so only this dataset imports it

    data = load_digits()
    images = torch.from_numpy(data.images * (255 / 16)).round().to(torch.uint8).unsqueeze(1)
    digits = torch.from_numpy(data.target).long()
    targets = torch.stack([torch.tensor(SHAPE_OF_DIGIT)[digits], digits], dim=1)
    split = stratified_split(
        [str(i) for i in range(len(digits))], digits.tolist(), config.DATASET.VAL_FRACTION
    )
    fraction = config.DATASET.UNKNOWN_FRACTION
    known = torch.tensor([known_labels(labels, i, fraction) for i, labels in enumerate(targets.tolist())])
    size = as_size(config.IMG_SIZE, (32, 32))
    train, val = (
        ImageTensors(images[rows], labels[rows], transform)
        for rows, labels, transform in zip(
            split, (known, targets), build_transforms(config.AUGMENT, size, 1), strict=True
        )
    )
    report = [f"digits: {len(train)} training and {len(val)} validation samples"]
    preprocessing = preprocessing_of(config.AUGMENT, size, 1)
    return DataBundle(train, val, TAXONOMY, 1, size, collate_pairs, report, preprocessing)
