from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from linnaeus.data.endings import EXTENSIONS
from linnaeus.data.image import find_damage, load_image
from linnaeus.errors import DataError

WriteImage = Callable[..., Path]

RGB_FILES = ["a.jpg", "a.JPEG", "a.png", "a.webp", "a.bmp", "a.gif", "a.tif", "a.ppm"]


def as_tensor(image: Image.Image, mode: str = "RGB") -> torch.Tensor:
    """uint8 [C, H, W]."""
    pixels = np.array(image.convert(mode))
    return torch.from_numpy(pixels.reshape(*pixels.shape[:2], -1)).permute(2, 0, 1)


def mean_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    return float((a.float() - b.float()).abs().mean())


@pytest.mark.parametrize("name", RGB_FILES)
@pytest.mark.parametrize("channels", [1, 3])
def test_every_format_gives_the_picture(
    tmp_path: Path, write_image: WriteImage, picture: Image.Image, name: str, channels: int
) -> None:
    path = write_image(tmp_path / name)
    image = load_image(path, channels)
    assert image.dtype == torch.uint8
    assert mean_difference(image, as_tensor(picture, "L" if channels == 1 else "RGB")) < 16
    assert path.suffix.lower() in EXTENSIONS
    assert find_damage(path) is None


@pytest.mark.parametrize(
    ("name", "mode"),
    [("a.jpg", "CMYK"), ("a.png", "P"), ("a.png", "RGBA"), ("a.tif", "CMYK"), ("a.gif", "P")],
)
def test_colours_are_converted(
    tmp_path: Path, write_image: WriteImage, name: str, mode: str, picture: Image.Image
) -> None:
    image = load_image(write_image(tmp_path / name, mode=mode), 3)
    expected = as_tensor(picture.convert(mode))  # a palette has few colours
    assert mean_difference(image, expected) < 16


@pytest.mark.parametrize(("name", "mode"), [("a.jpg", "L"), ("a.png", "L"), ("a.png", "LA")])
def test_grey_is_repeated_over_the_channels(
    tmp_path: Path, write_image: WriteImage, name: str, mode: str, picture: Image.Image
) -> None:
    image = load_image(write_image(tmp_path / name, mode=mode), 3)
    assert mean_difference(image, as_tensor(picture, "L").expand(3, -1, -1)) < 8


@pytest.mark.parametrize("name", ["a.png", "a.tif"])
def test_16_bit_grey_is_scaled_and_not_clipped(tmp_path: Path, name: str) -> None:
    values = np.linspace(0, 65535, 64, dtype=np.uint16).reshape(8, 8)
    Image.fromarray(values).save(tmp_path / name)
    image = load_image(tmp_path / name, 1)
    assert mean_difference(image[0], torch.from_numpy((values // 256).astype(np.uint8))) <= 0.5
    assert find_damage(tmp_path / name) is None


def test_palette_with_transparency_does_not_warn(tmp_path: Path, picture: Image.Image) -> None:
    picture.convert("P").save(tmp_path / "a.png", transparency=bytes(range(256)))
    assert load_image(tmp_path / "a.png", 3).shape == (3, 24, 32)  # a warning would be an error here
    assert find_damage(tmp_path / "a.png") is None


@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.webp"])
def test_exif_orientation_is_applied(
    tmp_path: Path, write_image: WriteImage, name: str, picture: Image.Image
) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held upright
    image = load_image(write_image(tmp_path / name, exif=exif), 3)
    assert mean_difference(image, as_tensor(picture).rot90(-1, (1, 2))) < 16


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_damaged_metadata_do_not_spoil_a_picture(
    tmp_path: Path, write_image: WriteImage, picture: Image.Image
) -> None:
    path = write_image(tmp_path / "a.jpg", exif=b"Exif\0\0MM\0*garbage")
    assert mean_difference(load_image(path, 3), as_tensor(picture)) < 16
    assert find_damage(path) is None


def damaged_files(folder: Path, write_image: WriteImage) -> dict[str, Path]:
    files = {}
    for name, keep in [("short.jpg", 0.5), ("nearly.jpg", 0.97), ("short.png", 0.5), ("short.webp", 0.5)]:
        path = write_image(folder / name)
        data = path.read_bytes()
        path.write_bytes(data[: int(keep * len(data))])
        files[name] = path
    path = write_image(folder / "progressive.jpg", progressive=True)
    path.write_bytes(path.read_bytes()[:-40])
    files[path.name] = path
    for name, data in [("empty.jpg", b""), ("text.jpg", b"no image at all"), ("zeros.png", bytes(1000))]:
        (folder / name).write_bytes(data)
        files[name] = folder / name
    files["missing.jpg"] = folder / "missing.jpg"
    (folder / "folder.jpg").mkdir()
    files["folder.jpg"] = folder / "folder.jpg"
    (folder / "dangling.jpg").symlink_to(folder / "nowhere.jpg")
    files["dangling.jpg"] = folder / "dangling.jpg"
    return files


def test_damaged_files_are_named(tmp_path: Path, write_image: WriteImage) -> None:
    for path in damaged_files(tmp_path, write_image).values():
        with pytest.raises(DataError, match="cannot read image") as caught:
            load_image(path, 3)
        assert str(path) in str(caught.value)
        assert "DATA.ON_BAD_IMAGE skip" in str(caught.value)
        assert find_damage(path), path


def test_reasons_are_told(tmp_path: Path, write_image: WriteImage) -> None:
    files = damaged_files(tmp_path, write_image)
    assert find_damage(files["missing.jpg"]) == "there is no such file"
    assert find_damage(files["text.jpg"]) == "not an image, or damaged at its start"
    assert "truncated" in (find_damage(files["nearly.jpg"]) or "")
