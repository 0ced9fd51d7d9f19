"""Reads one image file, or one array file.

Pillow decodes: it reads all common formats and works with every supported version of torch, while the
decoders of torchvision are deprecated since 0.29. `tifffile` reads TIFF files that Pillow cannot.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from linnaeus.config.schema import MAX_PIXELS, DataConfig
from linnaeus.data.packed import opened, unpacked
from linnaeus.runtime.errors import DataError, first_line

with suppress(ImportError):
    import pillow_heif

    pillow_heif.register_heif_opener()

_ORIENTATION = 0x0112
_TURNED = (5, 6, 7, 8)
"""EXIF orientations that swap height and width."""
_MODES = {1: "L", 3: "RGB"}
_TIFF_MAGIC = frozenset((b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"))
_RUN_PROGRAMS = frozenset(("EPS",))
"""Pillow's formats for which it starts a program: PostScript, which Ghostscript executes."""

Array = np.ndarray[Any, Any]
MinSize = Callable[[int, int], tuple[float, float]]
"""Takes height and width of an upright image; gives those that its decoded form needs at least."""


@dataclass(frozen=True)
class Decoding:
    """Settings that turn a file into pixels, except the number of channels.

    Attributes:
        background: red, green and blue behind transparent pixels; None drops transparency, as versions did
            that recorded no `Decoding`.
        bit_depth: significant bits of integers wider than 8 bits. None: 16 for 16-bit files; wider integers
            have the range of their file.
        float_bits: the same of floats, with 1 for fractions. None: the range of the file.
        fast: decode a JPEG file at the smallest scale that its use allows.
        max_pixels: height times width of the largest image that is read.
    """

    background: tuple[int, int, int] | None = (255, 255, 255)
    bit_depth: int | None = None
    fast: bool = False
    max_pixels: int = MAX_PIXELS
    float_bits: int | None = None

    @classmethod
    def of(cls, config: DataConfig) -> Decoding:
        """Return the decoding of the DATA node, without measured values."""
        red, green, blue = (config.BACKGROUND * 3)[:3]  # one value, or three
        is_fast = config.DECODE == "fast"
        return cls((red, green, blue), config.BIT_DEPTH, is_fast, config.MAX_PIXELS)


DEFAULT_DECODING = Decoding()
"""The decoding of a configuration that says nothing about it."""


def load_image(
    path: str | Path,
    channels: int,
    decoding: Decoding = DEFAULT_DECODING,
    min_size: MinSize | None = None,
) -> Tensor:
    """Decode an image or array file to uint8 [channels, height, width].

    For 1 (grey) or 3 (RGB) channels, palette, CMYK and grey images are converted. Other numbers need a file
    with as many. Transparent pixels show the background, the EXIF orientation is applied, and an animation
    or a file of several pages gives its first image. Values of more than 8 bits are scaled as
    `Decoding` says.

    Args:
        path: the file.
        channels: of the result.
        decoding: how the file becomes pixels.
        min_size: size that suffices; with `decoding.fast`, the result may be smaller than the image.

    Raises:
        DataError: the file is missing, damaged or of another kind; the message names it.
    """
    try:
        return decode(path, channels, decoding, min_size)
    except DataError as error:
        raise DataError(
            f"cannot read image {path}: {error}; remove it, or leave such images out with "
            "DATA.ON_BAD_IMAGE skip. `linnaeus check-data` finds all of them"
        ) from error


def decode(
    path: str | Path, channels: int, decoding: Decoding, min_size: MinSize | None = None
) -> Tensor:
    """Return the same as `load_image`; a `DataError` leaves naming the file to the caller."""
    with readable():
        opened = _open(path, channels, decoding)
        if not isinstance(opened, Image.Image):
            return array_to_tensor(opened, channels, decoding)
        with opened:
            _check_size(opened.height * opened.width, decoding)
            return to_tensor(opened, channels, decoding, min_size)


def find_damage(path: str | Path, channels: int, decoding: Decoding) -> str | None:
    """Why `load_image` would fail on this file, or None. For JPEG this takes about half the time of loading.

    The whole file is decoded, as a truncated image is damaged only at its end. JPEG files are decoded at an
    eighth of the size: this reads all compressed data, with little arithmetic.
    """
    try:
        decode(path, channels, replace(decoding, fast=True), lambda height, width: (1, 1))
    except DataError as error:
        return str(error)
    return None


def to_tensor(
    image: Image.Image, channels: int, decoding: Decoding, min_size: MinSize | None = None
) -> Tensor:
    """Return the image of `upright` as a uint8 tensor [channels, height, width]."""
    return pixels_of(upright(image, channels, decoding, min_size))


def upright(
    image: Image.Image, channels: int, decoding: Decoding, min_size: MinSize | None = None
) -> Image.Image:
    """A Pillow image, loaded, upright, and with these channels of 8 bits.

    With `decoding.fast` and `min_size`, a JPEG file that is not loaded yet is decoded at a smaller scale.
    """
    if _needs_all_bits(image, decoding):
        raise DataError(
            f"Pillow reads only the upper 8 bits of 16-bit colors, but the values have {decoding.bit_depth} "
            "bits: convert it to TIFF or to 8 bits, or set DATA.BIT_DEPTH 16"
        )
    if min_size is not None and decoding.fast and image.format in ("JPEG", "MPO"):
        is_turned = _orientation(image) in _TURNED
        height, width = image.size if is_turned else image.size[::-1]
        height, width = (math.ceil(side) for side in min_size(height, width))
        image.draft(None, (height, width) if is_turned else (width, height))
    image.load()
    if _orientation(image) != 1:
        with suppress(Exception):  # the picture may be usable though its metadata is damaged
            image = ImageOps.exif_transpose(image)
    if channels in _MODES:
        image = _converted(image, _MODES[channels], decoding)
    elif len(image.getbands()) != channels:
        raise DataError(
            f"it has {len(image.getbands())} channels, but DATA.DATASET.CHANNELS is {channels}"
        )
    return image


def pixels_of(image: Image.Image) -> Tensor:
    """Return the pixels [channels, height, width] of a Pillow image unchanged.

    `pil_to_tensor` of torchvision takes twice as long for a small image.
    """
    values = torch.from_numpy(np.array(image))
    return values.unsqueeze(0) if values.ndim == 2 else values.permute(2, 0, 1)


def file_range(
    path: str, channels: int, decoding: Decoding
) -> tuple[float, float, str, str] | None:
    """Return the result of `range_of`, its key of `Decoding`, and the path; None for 8 bits."""
    opened = _open(path, channels, decoding)
    if isinstance(opened, Image.Image):
        with opened:
            factor = 257 if _is_16_bit_color(opened) else 1  # Pillow gives the upper byte
            if factor == 1 and opened.mode[0] not in "IF":
                return None
            opened = np.asarray(opened) * np.uint16(factor)
    kind = opened.dtype.kind
    if kind not in "iuf" or opened.itemsize == 1:
        return None
    return *range_of(opened), "float_bits" if kind == "f" else "bit_depth", path


def range_of(values: Array) -> tuple[float, float]:
    """Return the least and the largest finite value without a thousandth at each end, such as hot pixels."""
    low, high = np.quantile(values[np.isfinite(values)], (0.001, 0.999), method="lower").tolist()
    return low, high


def bits_of(high: float, key: str) -> int:
    """Return the bits of the range up to a value: at least 8, but 1 for fractions."""
    return 1 if key == "float_bits" and high < 1.005 else max(8, int(high).bit_length())


@contextmanager
def readable() -> Iterator[None]:
    """Turn every error inside the context but a `MemoryError` into a `DataError` that says why."""
    try:
        yield
    except MemoryError:
        raise
    except UnidentifiedImageError as error:
        raise DataError("not an image, or damaged at its start") from error
    except Exception as error:  # on damaged data, Pillow raises many types
        reason = getattr(error, "strerror", None) or first_line(error)  # without a number
        raise DataError(reason) from error


def _open(path: str | Path, channels: int, decoding: Decoding) -> Image.Image | Array:
    """A Pillow image, not loaded yet, or an array of any shape where Pillow does not give all values."""
    if str(path).lower().endswith(".npy"):
        values: Array = np.load(path, mmap_mode="r")
        _check_size(values.size // channels, decoding)
        return values
    try:
        image = _open_pillow(unpacked(path) or path, decoding)
    except UnidentifiedImageError:
        with opened(path) as file:
            if file.read(4) not in _TIFF_MAGIC:
                raise
        return _read_tiff(path, channels, decoding)
    if image.format == "TIFF" and (channels not in _MODES or _needs_all_bits(image, decoding)):
        image.close()
        return _read_tiff(path, channels, decoding)
    return image


def _open_pillow(path: str | Path | BytesIO, decoding: Decoding) -> Image.Image:
    """Open an image that Pillow reads regardless of its file name."""
    # Pillow has one limit for the process, above which it warns. The limit is raised, never lowered.
    if Image.MAX_IMAGE_PIXELS is not None:
        Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS, decoding.max_pixels)
    Image.init()  # registers all formats
    formats = [name for name in Image.OPEN if name not in _RUN_PROGRAMS]
    try:
        return Image.open(path, formats=formats)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise DataError(f"it has more pixels than DATA.MAX_PIXELS {decoding.max_pixels}") from None


def _read_tiff(path: str | Path, channels: int, decoding: Decoding) -> Array:
    """The first image of a TIFF file; for many channels, also one whose channels are its pages."""
    try:
        import tifffile
    except ImportError:
        raise DataError("this kind of TIFF file needs tifffile: pip install tifffile") from None
    # Its log repeats exceptions or does not concern the pixels.
    logging.getLogger("tifffile").setLevel(logging.CRITICAL)
    with tifffile.TiffFile(unpacked(path) or path) as file:
        page = file.pages[0]
        has_samples = "S" in page.axes
        of_all = page if has_samples or channels in _MODES else file.series[0]
        _check_size(of_all.size // channels, decoding)
        values: Array = of_all.asarray()
        return np.moveaxis(values, page.axes.find("S"), 0) if has_samples else values


def _check_size(num_pixels: int, decoding: Decoding) -> None:
    if num_pixels > decoding.max_pixels:
        raise DataError(
            f"it has {num_pixels} pixels, more than DATA.MAX_PIXELS {decoding.max_pixels}"
        )


def _orientation(image: Image.Image) -> Any:
    with suppress(Exception):  # damaged metadata
        return image.getexif().get(_ORIENTATION, 1)
    return 1


def _is_16_bit_color(image: Image.Image) -> bool:
    """Whether Pillow, which loads the upper 8 bits of 16-bit colors, loses some of this image."""
    # Pillow has no public name for the depth of a file whose pixels it converts.
    return image.mode[0] != "I" and any(";16" in repr(tile[3]) for tile in image.tile)  # type: ignore[attr-defined]


def _needs_all_bits(image: Image.Image, decoding: Decoding) -> bool:
    return (decoding.bit_depth or 16) < 16 and _is_16_bit_color(image)


def array_to_tensor(values: Array, channels: int, decoding: Decoding) -> Tensor:
    """uint8 [channels, H, W] of an array [H, W], [C, H, W] or [H, W, C]; 1 and 3 channels are converted."""
    found = f"it is an array {list(values.shape)} of {values.dtype}"
    if values.ndim == 2:
        values = values[None]
    usable = set(_MODES) if channels in _MODES else {channels}
    places = {axis for axis in (0, -1) if values.ndim == 3 and values.shape[axis] in usable}
    if not places or not values.size or values.dtype.kind not in "biuf":
        raise DataError(
            f"{found}, but DATA.DATASET.CHANNELS {channels} needs [{channels}, H, W] or [H, W, {channels}]"
        )
    if len(places) > 1:
        raise DataError(f"{found}, whose first and last axis may both be the channels")
    planes = _to_uint8(np.moveaxis(values, places.pop(), 0), decoding)
    if len(planes) == channels:
        return torch.from_numpy(np.array(planes, order="C"))
    picture = Image.merge(_MODES[len(planes)], [Image.fromarray(plane) for plane in planes])
    return pixels_of(picture.convert(_MODES[channels]))


def _converted(image: Image.Image, mode: str, decoding: Decoding) -> Image.Image:
    """The image in a mode of 8 bits, without transparency."""
    if image.mode[0] in "IF":
        image = Image.fromarray(_to_uint8(np.asarray(image), decoding))
    elif image.has_transparency_data and (decoding.background is not None or image.mode == "P"):
        # Without this step, Pillow warns of palettes with transparency.
        image = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
        if decoding.background is not None:
            behind = Image.new("RGBA", image.size, (*decoding.background, 255))
            image = Image.alpha_composite(behind, image)
    elif image.mode == "LAB":  # Pillow converts it to RGB alone
        image = image.convert("RGB")
    return image if image.mode == mode else image.convert(mode)


def _to_uint8(values: Array, decoding: Decoding) -> Array:
    """uint8 of numbers of any type; negative values become black, values above the range white.

    NaN and infinity become black.
    """
    if values.dtype == np.uint8:
        return values
    kind, size = values.dtype.kind, values.dtype.itemsize
    if kind == "b":
        values = values * np.uint8(255)
    elif kind == "f":
        finite = np.isfinite(values)
        if not finite.any():
            raise DataError("all its values are NaN or infinite")
        bits = decoding.float_bits or bits_of(range_of(values)[1], "float_bits")
        values = np.rint(np.where(finite, values, 0) * (255 / (2**bits - 1)))
    elif size > 1:
        bits = decoding.bit_depth or (
            16 if size == 2 else bits_of(range_of(values)[1], "bit_depth")
        )
        values = values >> (bits - 8)
    return values.clip(0, 255).astype(np.uint8)
