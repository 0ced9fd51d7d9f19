"""Real image files, written with Pillow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

WriteImage = Callable[..., Path]


def _picture(seed: int = 0) -> Image.Image:
    """Coloured blocks, 24 pixels high and 32 wide: not flat, and kind to lossy compression."""
    fields = np.random.default_rng(seed).integers(0, 256, (3, 4, 3), dtype=np.uint8)
    return Image.fromarray(fields.repeat(8, axis=0).repeat(8, axis=1))


@pytest.fixture
def picture() -> Image.Image:
    """What `write_image` writes unless it is given another seed."""
    return _picture()


@pytest.fixture
def write_image() -> WriteImage:
    """Writes a picture to a path, in the format of its ending, and makes the folders above it."""

    def write(path: Path, seed: int = 0, mode: str = "RGB", **options: Any) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        _picture(seed).convert(mode).save(path, **options)
        return path

    return write


@pytest.fixture
def nested(tmp_path: Path, write_image: WriteImage) -> Path:
    """Two levels of class folders, five images in each of four; `unknown` stands under both parents."""
    for i, folder in enumerate(["Animalia/cat", "Animalia/unknown", "Plantae/oak", "Plantae/unknown"]):
        for j in range(5):
            write_image(tmp_path / "images" / folder / f"{j}.jpg", seed=10 * i + j)
    return tmp_path / "images"
