"""Contact sheets: pictures in rows of six, each with a caption, as PNG."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw, ImageFont, ImageOps
from torch import Tensor
from torchvision.transforms.v2 import functional

from linnaeus.autobatch.state.rng import preserved_generators
from linnaeus.data.bundle import DataBundle, dataset_length
from linnaeus.data.taxonomy import Taxonomy
from linnaeus.runtime.errors import ConfigError
from linnaeus.runtime.files import not_written, write_atomically
from linnaeus.runtime.rng import derive_seed, seed_generators

NUM_PICTURES = 36
COLUMNS = 6
SIDE, GAP, LINE = 200, 8, 16
"""Pixels: side of a picture, between two of them, and height of a line of text."""
LONGEST = 30
"""Characters of a line of a caption."""
FONTS = "NotoSansCJK-Regular.ttc", "Arial Unicode.ttf", "msyh.ttc", "DejaVuSans.ttf"
"""Files with many scripts, where one is installed; Pillow's own font has Latin letters only."""


def draw_contact_sheet(
    pictures: Iterable[Image.Image], captions: Sequence[str], title: str, path: Path
) -> None:
    """Draw pictures above their captions, which may have several lines.

    Raises:
        LinnaeusError: the file cannot be written.
    """
    font = _font()
    row_height = SIDE + GAP + LINE * max((text.count("\n") + 1 for text in captions), default=0)
    num_rows, top = -(-len(captions) // COLUMNS), LINE + 2 * GAP
    size = GAP + COLUMNS * (SIDE + GAP), top + num_rows * row_height
    sheet = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(sheet)
    draw.text((GAP, GAP), title, "black", font)
    for number, (picture, caption) in enumerate(zip(pictures, captions, strict=True)):
        row, column = divmod(number, COLUMNS)
        x, y = GAP + column * (SIDE + GAP), top + row * row_height
        sheet.paste(ImageOps.contain(picture, (SIDE, SIDE)), (x, y))
        for i, line in enumerate(caption.split("\n")):
            text = line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…"
            draw.text((x, y + SIDE + i * LINE), text, "black", font)
    try:
        write_atomically(path, lambda file: sheet.save(file, "png", compress_level=1))
    except OSError as error:
        raise not_written(path, error) from error


def draw_samples(data: DataBundle, path: Path, seed: int) -> None:
    """Draw training samples, augmented as in the first epoch, with their labels.

    Generators are left as they are.

    Raises:
        ConfigError: the samples are no images with classes.
        DataError: a sample cannot be read.
        LinnaeusError: the file cannot be written.
    """
    look, taxonomy, dataset = data.preprocessing, data.taxonomy, data.train
    if look is None or taxonomy is None:
        raise ConfigError("--preview: needs a dataset of labeled images")
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(dataset_length(dataset), generator=generator)[:NUM_PICTURES]
    pictures, captions = [], []
    with preserved_generators():
        for position in chosen.tolist():
            seed_generators(derive_seed(seed, 0, position))
            pixels, labels = dataset[position]
            if pixels.is_floating_point():
                pixels = look.pixels(pixels)
            pixels = pixels[:3] if len(pixels) >= 3 else pixels[:1]
            pictures.append(functional.to_pil_image(pixels))
            captions.append(_caption(labels, taxonomy))
    draw_contact_sheet(pictures, captions, f"augmented training samples of {data.source}", path)


def _caption(labels: Tensor, taxonomy: Taxonomy) -> str:
    """Return a line for each level, or for each of several labels."""
    if taxonomy.is_multilabel:
        classes = taxonomy.levels[0].classes
        names = [classes[label] for label in labels.eq(1).nonzero()[:, 0].tolist()][:3]
    else:
        pairs = zip(taxonomy.levels, labels.tolist(), strict=True)
        names = [level.classes[label] if label >= 0 else "unknown" for level, label in pairs]
    return "\n".join(" ".join(name.split()) for name in names)


def _font() -> Any:
    for name in FONTS:
        try:
            return ImageFont.truetype(name, 12)
        except OSError:
            continue
    return ImageFont.load_default(12)
