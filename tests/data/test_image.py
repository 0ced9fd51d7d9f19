from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from linnaeus.data import EXTENSIONS
from linnaeus.data.image import find_damage, load_image
from linnaeus.errors import DataError
from tests.helpers.datasets import picture, write_image

RGB_FILES = ["a.jpg", "a.JPEG", "a.png", "a.webp", "a.bmp", "a.gif", "a.tif", "a.ppm"]


def as_tensor(image: Image.Image, mode: str = "RGB") -> torch.Tensor:
    """uint8 [C, H, W]."""
    pixels = np.array(image.convert(mode))
    return torch.from_numpy(pixels.reshape(*pixels.shape[:2], -1)).permute(2, 0, 1)


def mean_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    return float((a.float() - b.float()).abs().mean())


@pytest.mark.parametrize("channels", [1, 3])
def test_every_format_gives_the_picture(tmp_path: Path, channels: int) -> None:
    for name in RGB_FILES:
        path = write_image(tmp_path / name)
        image = load_image(path, channels)
        assert image.dtype == torch.uint8
        assert mean_difference(image, as_tensor(picture(), "L" if channels == 1 else "RGB")) < 16
        assert path.suffix.lower() in EXTENSIONS
        assert find_damage(path) is None


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_damaged_metadata_do_not_spoil_a_picture(tmp_path: Path) -> None:
    path = write_image(tmp_path / "a.jpg", exif=b"Exif\0\0MM\0*garbage")
    assert mean_difference(load_image(path, 3), as_tensor(picture())) < 16
    assert find_damage(path) is None


def damaged_files(folder: Path) -> dict[str, Path]:
    files = {}
    for name, keep in [
        ("short.jpg", 0.5),
        ("nearly.jpg", 0.97),
        ("short.png", 0.5),
        ("short.webp", 0.5),
    ]:
        path = write_image(folder / name)
        data = path.read_bytes()
        path.write_bytes(data[: int(keep * len(data))])
        files[name] = path
    path = write_image(folder / "progressive.jpg", progressive=True)
    path.write_bytes(path.read_bytes()[:-40])
    files[path.name] = path
    for name, data in [
        ("empty.jpg", b""),
        ("text.jpg", b"no image at all"),
        ("zeros.png", bytes(1000)),
    ]:
        (folder / name).write_bytes(data)
        files[name] = folder / name
    files["missing.jpg"] = folder / "missing.jpg"
    (folder / "folder.jpg").mkdir()
    files["folder.jpg"] = folder / "folder.jpg"
    (folder / "dangling.jpg").symlink_to(folder / "nowhere.jpg")
    files["dangling.jpg"] = folder / "dangling.jpg"
    return files


def test_damaged_files_are_named(tmp_path: Path) -> None:
    for path in damaged_files(tmp_path).values():
        with pytest.raises(DataError, match=r"DATA\.ON_BAD_IMAGE") as caught:
            load_image(path, 3)
        assert str(path) in str(caught.value)
        assert find_damage(path), path


def reference(seed: int = 3) -> np.ndarray:
    """uint8 [16, 24, 3], coloured blocks."""
    fields = np.random.default_rng(seed).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    return fields.repeat(4, axis=0).repeat(4, axis=1)


def grey(rgb: np.ndarray) -> np.ndarray:
    return np.repeat(rgb[:, :, :1], 3, axis=2)


def with_alpha(image: Image.Image) -> Image.Image:
    image.putalpha(Image.fromarray((np.arange(16 * 24) % 256).astype(np.uint8).reshape(16, 24)))
    return image


RGB = reference()
PALETTE = np.random.default_rng(1).integers(0, 256, (16, 3), dtype=np.uint8)
LABELS = np.random.default_rng(2).integers(0, 16, (16, 24), dtype=np.uint8)
BITS = np.random.default_rng(4).integers(0, 2, (16, 24), dtype=np.uint8) * 255


def palette_image() -> Image.Image:
    image = Image.frombytes("P", (24, 16), LABELS.tobytes())
    image.putpalette(PALETTE.tobytes())
    return image


def rotated(path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 8
    Image.fromarray(np.rot90(RGB, -1).copy()).save(path, exif=exif)


GREY = RGB[:, :, 0]
COLOUR, SHADES, CHOSEN = Image.fromarray(RGB), Image.fromarray(GREY), PALETTE[LABELS]
MORE = {"save_all": True, "append_images": [Image.new("P", (24, 16))]}
LOOSE = {"progressive": True, "quality": 100, "subsampling": 0}
ODD: dict[str, tuple[Callable[[Path], Any], np.ndarray, float]] = {
    "16-bit grey.tif": (
        lambda p: Image.fromarray(GREY.astype(np.uint16) * 257).save(p),
        grey(RGB),
        0,
    ),
    "32-bit grey.tif": (
        lambda p: Image.fromarray(GREY.astype(np.int32) * 2**23).save(p),
        grey(RGB),
        0,
    ),
    "fractions.tif": (
        lambda p: Image.fromarray(GREY.astype(np.float32) / 255).save(p),
        grey(RGB),
        0,
    ),
    "floats.tif": (lambda p: Image.fromarray(GREY.astype(np.float32)).save(p), grey(RGB), 0),
    "16-bit floats.tif": (
        lambda p: Image.fromarray(GREY.astype(np.float32) * 257).save(p),
        grey(RGB),
        0,
    ),
    "cmyk.jpg": (lambda p: COLOUR.convert("CMYK").save(p, quality=100), RGB, 3),
    "animated.gif": (lambda p: palette_image().save(p, **MORE), CHOSEN, 0),
    "palette.png": (lambda p: palette_image().save(p, transparency=bytes(range(16))), CHOSEN, 0),
    "la.png": (lambda p: with_alpha(SHADES.copy()).save(p), grey(RGB), 0),
    "rgba.png": (lambda p: with_alpha(COLOUR.copy()).save(p), RGB, 0),
    "rotated.png": (rotated, RGB, 0),
    "1-bit.png": (
        lambda p: Image.fromarray(BITS).convert("1").save(p),
        np.stack([BITS] * 3, axis=2),
        0,
    ),
    "progressive.jpg": (lambda p: COLOUR.save(p, **LOOSE), RGB, 6),
    "lossless.webp": (lambda p: COLOUR.save(p, lossless=True), RGB, 0),
}
"""By the name of the file: what writes it, the plain form, and the mean difference that is allowed.

The plain form is made from arrays, without what reads images."""


@pytest.mark.parametrize("name", ODD)
def test_odd_images_give_their_plain_form(tmp_path: Path, name: str) -> None:
    write, expected, allowed = ODD[name]
    write(tmp_path / name)
    found = load_image(tmp_path / name, 3)
    assert mean_difference(found, torch.from_numpy(expected.copy()).permute(2, 0, 1)) <= allowed
    assert find_damage(tmp_path / name) is None
