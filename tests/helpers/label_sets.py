"""Samples with several labels: images with a bright stripe for each label, and points."""

import csv

import numpy as np
from PIL import Image
from torch import nn

NAMES = ("bee", "cow", "elk", "fox", "owl")


class Pixels(nn.Sequential):
    def __init__(self, num_classes, in_chans, img_size):
        super().__init__(nn.Flatten(), nn.Linear(in_chans * img_size[0] * img_size[1], num_classes))


def write_label_sets(folder):
    """160 and 80 images, with `train.csv` and `val.csv`, whose column `animal` has the labels."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for split, count in (("train", 160), ("val", 80)):
        rows = [["image", "animal", "number"]]
        for position in range(count):
            labels = np.flatnonzero(rng.random(len(NAMES)) < (0.5, 0.4, 0.3, 0.3, 0.15))
            pixels = rng.normal(90, 45, (16, 16, 3))
            for label in labels:
                pixels[4:12, 3 * label : 3 * label + 3] += 40
            names = ";".join(NAMES[i] for i in labels) or ";"
            rows.append([f"{split}{position:03}.png", names, str(len(labels))])
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / rows[-1][0])
        (folder / f"{split}.csv").write_text("\n".join(map(",".join, rows)))


def cells_of(path):
    """The labels of each row."""
    with path.open(newline="") as file:
        return [row["animal"].split(";") for row in csv.DictReader(file)]
