"""Reads one image file.

Pillow decodes: it reads all common formats and works with every supported version of torch, while the
decoders of torchvision are deprecated since 0.29.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torchvision.transforms.v2 import functional

from linnaeus.errors import DataError, first_line

_ORIENTATION = 0x0112
_MODES = {1: "L", 3: "RGB"}


def load_image(path: str | Path, channels: int) -> Tensor:
    """Decode an image file to uint8 [channels, height, width], for 1 (grey) or 3 (RGB) channels.

    Palette, CMYK and grey images are converted, 16-bit ones are scaled to 8 bits, transparency is dropped (a
    transparent pixel keeps its colour), the EXIF orientation is applied, and an animation or a file of
    several pages gives its first image. Grey images of float32 or 32-bit integers are scaled as `_to_grey`
    says.

    Raises:
        DataError: the file is missing, damaged or not an image; the message names it.
    """
    try:
        return decode(path, channels)
    except MemoryError:
        raise
    except Exception as error:  # on damaged data, Pillow raises many types
        raise DataError(
            f"cannot read image {path}: {why_unreadable(error)}; remove it, or leave such images out with "
            "DATA.ON_BAD_IMAGE skip. `linnaeus check-data` finds all of them"
        ) from error


def decode(path: str | Path, channels: int) -> Tensor:
    """What `load_image` returns; it raises whatever Pillow does, which `why_unreadable` puts into words."""
    with Image.open(path) as image:
        return to_tensor(image, channels)


def to_tensor(image: Image.Image, channels: int) -> Tensor:
    """A Pillow image, upright and converted, as uint8 tensor [channels, height, width]."""
    image.load()
    with suppress(Exception):  # the picture may be usable though its metadata is damaged
        if image.getexif().get(_ORIENTATION, 1) != 1:
            image = ImageOps.exif_transpose(image)
    tensor: Tensor = functional.pil_to_tensor(_converted(image, _MODES[channels]))
    return tensor


def find_damage(path: str | Path) -> str | None:
    """Why `load_image` would fail on this file, or None. For JPEG this takes about half the time of loading.

    The whole file is decoded, as a truncated image is damaged only at its end.
    """
    try:
        with Image.open(path) as image:
            if image.format == "JPEG":
                # At an eighth of the size, in grey: this reads all compressed data, with little arithmetic.
                image.draft("L", (1, 1))
            image.load()
            _converted(image, "RGB")
    except MemoryError:
        raise
    except Exception as error:  # as in load_image
        return why_unreadable(error)
    return None


def _converted(image: Image.Image, mode: str) -> Image.Image:
    if image.mode == mode:
        return image
    if image.mode.startswith("I") or image.mode == "F":
        image = _to_grey(image)
    elif image.mode == "P" and "transparency" in image.info:
        # Without this step Pillow warns for every such file.
        image = image.convert("RGBA")
    return image.convert(mode)


def _to_grey(image: Image.Image) -> Image.Image:
    """8-bit grey of an image with 16 or 32 bits per pixel, which Pillow would clip instead of scaling it.

    The scale is chosen for each image. Integer values are read as 16-bit, or as 31-bit if any exceeds 65535.
    Floating-point values are read as fractions if none exceeds 1, else as 8-bit if none exceeds 255, else as
    16-bit. NaN, infinity and negative values become black.
    """
    if image.mode == "F":
        values = np.nan_to_num(np.asarray(image), nan=0.0, posinf=0.0, neginf=0.0)
        peak = values.max(initial=0.0)
        factor = 255.0 if peak <= 1 else 1.0 if peak <= 255 else 1 / 257
        values = np.rint(values * factor)
    else:
        values = np.asarray(image.convert("I"))
        values = values // (2**23 if values.max(initial=0) > 0xFFFF else 2**8)
    return Image.fromarray(values.clip(0, 255).astype(np.uint8))


def why_unreadable(error: Exception) -> str:
    """Why an image cannot be decoded, in words."""
    if isinstance(error, UnidentifiedImageError):
        return "not an image, or damaged at its start"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror  # without its number
    return first_line(error)
