import os
import sys
from contextlib import suppress

import numpy as np
import pytest
import torch
from PIL import EpsImagePlugin, Image
from torchvision.transforms.v2 import functional

from linnaeus.data import EXTENSIONS
from linnaeus.data.image import DEFAULT_DECODING, Decoding, file_range, find_damage, load_image
from linnaeus.runtime.errors import DataError
from tests.helpers.datasets import picture, write_image

RGB_FILES = ["a.jpg", "a.JPEG", "a.png", "a.webp", "a.bmp", "a.gif", "a.tif", "a.ppm"]


def as_tensor(image, mode="RGB"):
    """uint8 [C, H, W]."""
    pixels = np.array(image.convert(mode))
    return torch.from_numpy(pixels.reshape(*pixels.shape[:2], -1)).permute(2, 0, 1)


def mean_difference(a, b):
    assert a.shape == b.shape
    return float((a.float() - b.float()).abs().mean())


def damage(path, channels=3, decoding=DEFAULT_DECODING):
    """What the check says of a file."""
    return find_damage(path, channels, decoding) or ""


@pytest.mark.parametrize("channels", [1, 3])
def test_every_format_gives_the_picture(tmp_path, channels):
    for name in RGB_FILES:
        path = write_image(tmp_path / name)
        expected = as_tensor(picture(), "L" if channels == 1 else "RGB")
        assert mean_difference(load_image(path, channels), expected) < 16
        assert path.suffix.lower() in EXTENSIONS
        assert not damage(path)


def test_damaged_files_are_named(tmp_path):
    for name, options in {
        "a.jpg": {},
        "a.png": {},
        "progressive.jpg": {"progressive": True},
    }.items():
        path = write_image(tmp_path / name, **options)
        path.write_bytes(path.read_bytes()[:-40])
    (tmp_path / "empty.jpg").touch()
    (tmp_path / "folder.jpg").mkdir()
    (tmp_path / "dangling.jpg").symlink_to(tmp_path / "nowhere.jpg")
    for path in tmp_path.iterdir():
        with pytest.raises(DataError, match=rf"{path}.*DATA\.ON_BAD_IMAGE"):
            load_image(path, 3)
        assert damage(path), path


ALPHA = (np.arange(16 * 24) % 256).astype(np.uint8).reshape(16, 24)


def on(background, rgb, alpha=ALPHA):
    """The pixels composited on a grey background."""
    part = alpha[:, :, None] / 255
    return np.rint(rgb * part + background * (1 - part)).astype(np.uint8)


def with_alpha(image):
    image.putalpha(Image.fromarray(ALPHA))
    return image


RGB = np.random.default_rng(3).integers(0, 256, (4, 6, 3), np.uint8).repeat(4, 0).repeat(4, 1)
"""Coloured blocks, [16, 24, 3]."""
PALETTE = np.random.default_rng(1).integers(0, 256, (16, 3), dtype=np.uint8)
LABELS = np.random.default_rng(2).integers(0, 16, (16, 24), dtype=np.uint8)


def palette_image():
    image = Image.frombytes("P", (24, 16), LABELS.tobytes())
    image.putpalette(PALETTE.tobytes())
    return image


def rotated(path):
    exif = Image.Exif()
    exif[0x0112] = 8
    Image.fromarray(np.rot90(RGB, -1).copy()).save(path, exif=exif)


GREY = RGB[:, :, 0]
COLOUR, SHADES, CHOSEN = Image.fromarray(RGB), Image.fromarray(GREY), PALETTE[LABELS]
MORE = {"save_all": True, "append_images": [Image.new("P", (24, 16))]}
ODD = {
    "16-bit grey.tif": (
        lambda p: Image.fromarray(GREY.astype(np.uint16) * 257).save(p),
        RGB[:, :, :1].repeat(3, axis=2),
        0,
    ),
    "cmyk.jpg": (lambda p: COLOUR.convert("CMYK").save(p, quality=100), RGB, 3),
    "animated.gif": (lambda p: palette_image().save(p, **MORE), CHOSEN, 0),
    "palette.png": (
        lambda p: palette_image().save(p, transparency=bytes(range(0, 256, 17))),
        on(255, CHOSEN, LABELS * 17),
        0.5,
    ),
    "rgba.png": (lambda p: with_alpha(COLOUR.copy()).save(p), on(255, RGB), 0.5),
    "rotated.png": (rotated, RGB, 0),
}
"""By the name of the file: what writes it, the plain form, and the mean difference that is allowed.

The plain form is made from arrays, without what reads images."""


@pytest.mark.parametrize("name", ODD)
def test_odd_images_give_their_plain_form(tmp_path, name):
    write, expected, allowed = ODD[name]
    write(tmp_path / name)
    found = load_image(tmp_path / name, 3)
    assert mean_difference(found, torch.from_numpy(expected.copy()).permute(2, 0, 1)) <= allowed
    assert not damage(tmp_path / name)


def test_opaque_pixels_and_older_runs_keep_their_colors(tmp_path):
    file = tmp_path / "a.png"
    with_alpha(COLOUR.copy()).save(file)
    opaque, colors = torch.from_numpy(ALPHA == 255), torch.from_numpy(RGB).permute(2, 0, 1)
    found = load_image(file, 3, Decoding((90, 90, 90)))
    assert torch.equal(found[:, opaque], colors[:, opaque])
    assert found[:, ALPHA == 0].unique().tolist() == [90]
    assert torch.equal(load_image(file, 3, Decoding(background=None)), colors)


@pytest.mark.parametrize("mode", ["1", "LA", "P", "RGBA", "CMYK", "I", "F"])
def test_a_mode_has_one_three_or_its_own_number_of_channels(tmp_path, mode):
    pytest.importorskip("tifffile")
    path = tmp_path / "a.tif"
    COLOUR.convert(mode).save(path)
    for channels in range(1, 6):
        if channels in (1, 3, {"LA": 2, "RGBA": 4, "CMYK": 4}.get(mode)):
            assert load_image(path, channels).shape == (channels, 16, 24)
            assert not damage(path, channels)
        else:
            assert "DATA.DATASET.CHANNELS" in damage(path, channels)
            with pytest.raises(DataError):
                load_image(path, channels)


BANDS = np.random.default_rng(5).integers(0, 2**12, (5, 16, 24), dtype=np.uint16)


@pytest.mark.parametrize("name", ["CHW.npy", "HWC.npy", "CHW.tif", "HWC.tif", "pages.tif"])
def test_any_number_of_channels_is_read(tmp_path, name):
    path, layout = tmp_path / name, name[:-4]
    values = np.ascontiguousarray(np.moveaxis(BANDS, 0, -1)) if layout == "HWC" else BANDS
    if path.suffix == ".npy":
        np.save(path, values)
    else:
        tifffile = pytest.importorskip("tifffile")
        planes = {"CHW": "separate", "HWC": "contig", "pages": None}[layout]
        tifffile.imwrite(path, values, planarconfig=planes, photometric="minisblack")
    found = load_image(path, 5, Decoding(bit_depth=12))
    assert np.array_equal(found, BANDS >> 4)
    assert not damage(path, 5)
    path.write_bytes(path.read_bytes()[:2000])
    assert damage(path, 5)


def test_a_missing_library_is_named(tmp_path, monkeypatch):
    path = tmp_path / "a.tif"
    with_alpha(COLOUR.copy()).save(path)
    monkeypatch.setitem(sys.modules, "tifffile", None)
    assert "pip install tifffile" in damage(path, 4)
    assert not damage(path)


def test_an_array_of_objects_is_refused(tmp_path):
    np.save(tmp_path / "a.npy", np.array([{}]))
    assert damage(tmp_path / "a.npy", 5)


def test_arrays_of_one_and_three_channels_are_converted(tmp_path):
    """With the range of the file, where none is measured."""
    np.save(tmp_path / "rgb.npy", RGB)
    assert torch.equal(load_image(tmp_path / "rgb.npy", 3), as_tensor(COLOUR))
    assert torch.equal(load_image(tmp_path / "rgb.npy", 1), as_tensor(COLOUR, "L"))
    np.save(tmp_path / "grey.npy", GREY.astype(np.float32) / 255)
    assert torch.equal(load_image(tmp_path / "grey.npy", 3), as_tensor(SHADES))
    np.save(tmp_path / "wide.npy", GREY.astype(np.int32))
    assert torch.equal(load_image(tmp_path / "wide.npy", 1), as_tensor(SHADES, "L"))


def test_a_file_without_a_finite_value_is_damaged(tmp_path):
    values = np.full((16, 24), np.nan, np.float32)
    np.save(tmp_path / "a.npy", values)
    assert "NaN" in damage(tmp_path / "a.npy", 1)
    values[3, 4] = 0.5
    np.save(tmp_path / "a.npy", values)
    for decoding in (DEFAULT_DECODING, Decoding(float_bits=1)):
        found = load_image(tmp_path / "a.npy", 1, decoding)
        assert int(found[0, 3, 4]) == 128
        assert int(found.sum()) == 128


def test_colors_of_16_bits_are_not_read_dark(tmp_path):
    tifffile = pytest.importorskip("tifffile")
    values = RGB.astype(np.uint16) * 16
    tifffile.imwrite(tmp_path / "a.tif", values)
    assert file_range(str(tmp_path / "a.tif"), 3, DEFAULT_DECODING)[1] < 2**12
    assert torch.equal(load_image(tmp_path / "a.tif", 3, Decoding(bit_depth=12)), as_tensor(COLOUR))
    tifffile.imwrite(tmp_path / "b.tif", values * 16)
    assert torch.equal(load_image(tmp_path / "b.tif", 3), as_tensor(COLOUR))


def test_the_largest_image_is_a_key(tmp_path):
    path = write_image(tmp_path / "a.png")
    np.save(tmp_path / "a.npy", np.asarray(picture()))
    for file in (path, tmp_path / "a.npy"):
        assert not damage(file, decoding=Decoding(max_pixels=24 * 32))
        assert "DATA.MAX_PIXELS" in damage(file, decoding=Decoding(max_pixels=24 * 32 - 1))


def test_heic_images_are_read_where_the_library_is(tmp_path):
    pillow_heif = pytest.importorskip("pillow_heif")
    pillow_heif.from_pillow(picture()).save(tmp_path / "a.heic", quality=95)
    assert mean_difference(load_image(tmp_path / "a.heic", 3), as_tensor(picture())) < 16


def test_no_image_file_starts_a_program(tmp_path, monkeypatch):
    path, ran = tmp_path / "photo.jpg", tmp_path / "ran"
    picture().save(path, format="EPS")
    ghostscript = tmp_path / "gs"
    ghostscript.write_text(f"#!/bin/sh\necho > '{ran}'\n")
    ghostscript.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)  # Pillow looks once for it
    assert damage(path)
    assert not ran.exists()
    with Image.open(path) as image, suppress(OSError):
        image.load()
    assert ran.exists(), "a negative control"


def large_photo(path, **options):
    """A JPEG file with fine and coarse structure."""
    noise = Image.fromarray(np.random.default_rng(6).integers(0, 256, (18, 24, 3), np.uint8))
    noise.resize((1200, 900), Image.Resampling.BICUBIC).save(path, quality=95, **options)
    return path


def test_large_photos_are_decoded_at_twice_the_size_needed(tmp_path):
    path = large_photo(tmp_path / "a.jpg")
    whole = load_image(path, 3)
    assert torch.equal(whole, as_tensor(Image.open(path)))
    fast = Decoding(fast=True)
    for side, scale in ((451, 1), (450, 2), (226, 2), (225, 4), (20, 8)):
        smallest = lambda *_, side=side: (side, side)  # noqa: E731
        found = load_image(path, 3, fast, smallest)
        assert found.shape == (3, -(-900 // scale), 1200 // scale)
        size = [side // 2, side * 2 // 3]  # of the model's input
        resized = [functional.resize(each, size, antialias=True) for each in (found, whole)]
        assert mean_difference(*resized) < 1.5
        assert torch.equal(load_image(path, 3, DEFAULT_DECODING, smallest), whole)


def test_the_orientation_turns_the_size_needed(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    path, seen = large_photo(tmp_path / "a.jpg", exif=exif), []

    def smallest(height, width):
        seen.append((height, width))
        return 600, 225

    assert load_image(path, 3, Decoding(fast=True), smallest).shape == (3, 600, 450)
    assert seen == [(1200, 900)]
