"""Images with several labels: each label lights a field of the image."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
from PIL import Image
from torch import nn

NAMES = ("bee", "cow", "elk", "fox", "owl")
SIDE = 16


class Pixels(nn.Sequential):
    """A layer on the pixels, without any state beside its weights."""

    def __init__(self, num_classes: int, in_chans: int, img_size: tuple[int, int]) -> None:
        super().__init__(nn.Flatten(), nn.Linear(in_chans * img_size[0] * img_size[1], num_classes))


def sets_of(number: int, seed: int = 0) -> np.ndarray:
    """Which of the five labels each sample has, bool [N, 5]; some samples have none."""
    return np.random.default_rng(seed).random((number, len(NAMES))) < (0.5, 0.4, 0.3, 0.3, 0.15)


def picture(labels: np.ndarray, seed: int) -> Image.Image:
    """A field of 3 columns for each label, over noise."""
    pixels = np.random.default_rng(seed).normal(90, 45, (SIDE, SIDE, 3))
    for label in np.flatnonzero(labels):
        pixels[4:12, 3 * label : 3 * label + 3] += 40
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def write_label_sets(folder: Path, number: int = 160, number_val: int = 80, separator: str = ";") -> Path:
    """Images with `train.csv` and `val.csv`, whose column `animal` has the labels; gives the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, count, seed in (("train", number, 1), ("val", number_val, 2)):
        rows = []
        for position, labels in enumerate(sets_of(count, seed)):
            name = f"{split}{position:03}.png"
            picture(labels, 1000 * seed + position).save(folder / name)
            rows.append([name, separator.join(NAMES[i] for i in np.flatnonzero(labels)) or separator])
        with (folder / f"{split}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([["image", "animal"], *rows])
    return folder


def tokens_of(folder: Path) -> list[str]:
    """A run on these files, of a tenth of a second."""
    return [
        f"DATA.DATASET={{NAME: manifest, ROOT: {folder}, LABEL_SEPARATOR: ;}}", f"DATA.IMG_SIZE={SIDE}",
        f"MODEL._target_={__name__}.Pixels", "LOSS.NAME=bce", "EXPERIMENT.DEVICE=cpu",
        "DATA.BATCH_SIZE=32", "TRAIN.EPOCHS=4", "OPTIMIZER.LR=0.01", "TRAIN.LOG_EVERY=1",
        "DATA.AUGMENT.CROP_SCALE=[1,1]",
    ]  # fmt: skip
