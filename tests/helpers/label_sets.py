"""Samples with several labels: images with a bright stripe for each label, and points."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from tests.helpers.small_runs import Clusters

NAMES = ("bee", "cow", "elk", "fox", "owl")
SIDE = 16


class Pixels(nn.Sequential):
    """A layer on the pixels."""

    def __init__(self, num_classes: int, in_chans: int, img_size: tuple[int, int]) -> None:
        super().__init__(nn.Flatten(), nn.Linear(in_chans * img_size[0] * img_size[1], num_classes))


class Sets(Clusters):
    """The clusters, of which each has the label of the one before it too; the last class is often unknown."""

    multilabel = True

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        point, label = super().__getitem__(index)
        target = torch.zeros(3).long()
        target[[label, label - 1]] = 1
        target[2] = -1 if index % 3 == 0 else target[2]
        return point, target


def write_label_sets(folder: Path, number: int = 160, number_val: int = 80) -> Path:
    """Images with `train.csv` and `val.csv`, whose column `animal` has the labels; gives the folder."""
    folder.mkdir(parents=True)
    for seed, (split, count) in enumerate((("train", number), ("val", number_val))):
        rng = np.random.default_rng(seed)
        rows = [["image", "animal", "number"]]
        for position in range(count):
            labels = np.flatnonzero(rng.random(len(NAMES)) < (0.5, 0.4, 0.3, 0.3, 0.15))
            pixels = rng.normal(90, 45, (SIDE, SIDE, 3))
            for label in labels:
                pixels[4:12, 3 * label : 3 * label + 3] += 40
            rows.append([f"{split}{position:03}.png", ";".join(NAMES[i] for i in labels) or ";", len(labels)])
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / rows[-1][0])
        with (folder / f"{split}.csv").open("w", newline="") as file:
            csv.writer(file).writerows(rows)
    return folder
