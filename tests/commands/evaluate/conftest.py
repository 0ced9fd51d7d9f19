"""Runs of the tests' own small models, and folders of images for them."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

from PIL import Image

TINY = (
    "MODEL._target_=tests.commands.evaluate.tiny.TinyNet", "EXPERIMENT.DEVICE=cpu", "EXPERIMENT.NAME=tiny",
    "TRAIN.EPOCHS=1", "DATA.BATCH_SIZE=64", "DATA.BATCH_SIZE_VAL=61", "OPTIMIZER.LR=0.01",
    "DATA.AUGMENT.CROP_SCALE=[1,1]",
)  # fmt: skip
DIGITS = (*TINY, "DATA.IMG_SIZE=8", "DATA.DATASET.VAL_FRACTION=0.25")


def write_images(folder: Path, classes: Iterable[str], num_images: int, seed: int = 0) -> Path:
    """Images of 8 x 8 pixels of noise around a colour of their class, in a folder for each class."""
    generator = random.Random(seed)
    for name in classes:
        (folder / name).mkdir(parents=True)
        colour = random.Random(name).choices(range(256), k=3)
        for number in range(num_images):
            image = Image.new("RGB", (8, 8))
            noisy = [
                tuple(min(255, max(0, value + generator.randint(-120, 120))) for value in colour)
                for _ in range(64)
            ]
            image.putdata(noisy)
            image.save(folder / name / f"{number}.png")
    return folder
