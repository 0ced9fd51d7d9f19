"""Reads one image file.

Pillow decodes: it reads all common formats and works with every supported version of torch, while the
decoders of torchvision are deprecated since 0.29.
"""

from __future__ import annotations

from pathlib import Path

from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torchvision.transforms.v2 import functional

from linnaeus.errors import DataError

EXTENSIONS = frozenset(
    f".{ending}"
    for ending in "jpg jpeg jpe jfif png webp bmp gif tif tiff ppm pgm pbm pnm avif jp2".split()  # noqa: SIM905
)
"""Endings, in lower case, of the files in a folder that are taken for images."""

_ORIENTATION = 0x0112
_MODES = {1: "L", 3: "RGB"}


def load_image(path: str | Path, channels: int) -> Tensor:
    """Decode an image file.

    Palette, CMYK, 16-bit and grey images are converted, transparency is dropped, the EXIF orientation is
    applied, and an animation gives its first frame.

    Args:
        path: the file.
        channels: 1 (grey) or 3 (RGB).

    Returns:
        Tensor [channels, height, width], uint8.

    Raises:
        DataError: the file is missing, damaged or not an image; the message names it.
    """
    try:
        with Image.open(path) as image:
            return to_tensor(image, channels)
    except MemoryError:
        raise
    except Exception as error:  # on damaged data, Pillow raises many types
        raise DataError(
            f"cannot read image {path}: {_reason(error)}; remove it, or leave such images out with "
            "DATA.ON_BAD_IMAGE skip"
        ) from error


def to_tensor(image: Image.Image, channels: int) -> Tensor:
    """A Pillow image, upright and converted, as uint8 tensor [channels, height, width]."""
    image.load()
    if _orientation(image) != 1:
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
        return _reason(error)
    return None


def _converted(image: Image.Image, mode: str) -> Image.Image:
    if image.mode == mode:
        return image
    if image.mode.startswith("I"):
        # Pillow clips 16-bit grey instead of scaling it.
        image = image.convert("I").point(lambda value: value / 256).convert("L")
    elif image.mode == "P" and "transparency" in image.info:
        # Without this step Pillow warns for every such file.
        image = image.convert("RGBA")
    return image.convert(mode)


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # the picture may be usable though its metadata is damaged
        return 1


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    if isinstance(error, PermissionError):
        return "no permission to read it"
    if isinstance(error, UnidentifiedImageError):
        return "not an image, or damaged at its start"
    return str(error).rstrip(".") or type(error).__name__
