"""Write scikit-learn's handwritten digits as a folder of images; nothing is downloaded.

    python examples/write_digits.py data/digits
    linnaeus train --cfg configs/digits_image_folder.yaml

The folders are nested, one depth for each taxonomic level: `data/digits/train/looped/8/0008.png`. This is the
layout that `DATA.DATASET.NAME imagefolder` reads. `--rare 1 3 8 9` keeps a tenth of the training images of
these digits, so that the classes are of unequal size; the validation images stay.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from pathlib import Path

from PIL import Image
from sklearn.datasets import load_digits

SHAPES = {"straight": (1, 4, 7), "curved": (2, 3, 5), "looped": (0, 6, 8, 9)}
"""The coarse level, and the digits below each of its classes."""
VALIDATE_EVERY = 5  # each fifth image of a digit is for validation
KEEP_EVERY = 10  # each tenth training image of a rare digit is written


def write_digits(folder: Path, rare: Collection[int] = ()) -> int:
    """Write the images as 8-bit grey PNG files and return how many there are.

    Args:
        folder: gets the folders `train` and `val`.
        rare: digits with only a tenth of their training images.
    """
    data = load_digits()
    shape_of = {digit: shape for shape, digits in SHAPES.items() for digit in digits}
    seen, training, written = dict.fromkeys(range(10), 0), dict.fromkeys(range(10), 0), 0
    for number, (image, digit) in enumerate(zip(data.images, data.target.tolist(), strict=True)):
        seen[digit] += 1
        split = "val" if seen[digit] % VALIDATE_EVERY == 0 else "train"
        training[digit] += split == "train"
        if split == "train" and digit in rare and training[digit] % KEEP_EVERY:
            continue
        file = folder / split / shape_of[digit] / str(digit) / f"{number:04d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((image * (255 / 16)).round().astype("uint8")).save(
            file
        )  # values are 0 to 16
        written += 1
    return written


def main(argv: Sequence[str] | None = None) -> None:
    """Read the arguments and write the folder."""
    parser = argparse.ArgumentParser(
        description="Write the handwritten digits as a folder of images."
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--rare",
        type=int,
        nargs="+",
        choices=range(10),
        default=(),
        metavar="DIGIT",
        help="digits with only a tenth of their training images",
    )
    args = parser.parse_args(argv)
    print(f"{write_digits(args.folder, args.rare)} images in {args.folder}")


if __name__ == "__main__":
    main()
