import os
import sys
import warnings
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import EpsImagePlugin, Image
from torchvision.transforms.v2 import functional

from linnaeus.data import EXTENSIONS
from linnaeus.data.image import (
    DEFAULT_DECODING,
    Decoding,
    file_range,
    find_damage,
    load_image,
)
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


@pytest.mark.parametrize("channels", [1, 3])
def test_every_format_gives_the_picture(tmp_path, channels):
    for name in RGB_FILES:
        path = write_image(tmp_path / name)
        image = load_image(path, channels)
        assert image.dtype == torch.uint8
        assert mean_difference(image, as_tensor(picture(), "L" if channels == 1 else "RGB")) < 16
        assert path.suffix.lower() in EXTENSIONS
        assert find_damage(path, 3, DEFAULT_DECODING) is None


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_damaged_metadata_do_not_spoil_a_picture(tmp_path):
    path = write_image(tmp_path / "a.jpg", exif=b"Exif\0\0MM\0*garbage")
    assert mean_difference(load_image(path, 3), as_tensor(picture())) < 16
    assert find_damage(path, 3, DEFAULT_DECODING) is None


def damaged_files(folder):
    files = {}
    for name, keep in [
        ("short.jpg", 0.5),
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
    files["empty.jpg"] = folder / "empty.jpg"
    files["empty.jpg"].touch()
    files["missing.jpg"] = folder / "missing.jpg"
    (folder / "folder.jpg").mkdir()
    files["folder.jpg"] = folder / "folder.jpg"
    (folder / "dangling.jpg").symlink_to(folder / "nowhere.jpg")
    files["dangling.jpg"] = folder / "dangling.jpg"
    return files


def test_damaged_files_are_named(tmp_path):
    for path in damaged_files(tmp_path).values():
        with pytest.raises(DataError, match=r"DATA\.ON_BAD_IMAGE") as caught:
            load_image(path, 3)
        assert str(path) in str(caught.value)
        assert find_damage(path, 3, DEFAULT_DECODING), path


ALPHA = (np.arange(16 * 24) % 256).astype(np.uint8).reshape(16, 24)


def reference(seed=3):
    """uint8 [16, 24, 3], coloured blocks."""
    fields = np.random.default_rng(seed).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    return fields.repeat(4, axis=0).repeat(4, axis=1)


def on(background, rgb, alpha=ALPHA):
    """The pixels composited on a grey background."""
    part = alpha[:, :, None] / 255
    return np.rint(rgb * part + background * (1 - part)).astype(np.uint8)


def grey(rgb):
    return np.repeat(rgb[:, :, :1], 3, axis=2)


def with_alpha(image):
    image.putalpha(Image.fromarray(ALPHA))
    return image


RGB = reference()
PALETTE = np.random.default_rng(1).integers(0, 256, (16, 3), dtype=np.uint8)
LABELS = np.random.default_rng(2).integers(0, 16, (16, 24), dtype=np.uint8)
BITS = np.random.default_rng(4).integers(0, 2, (16, 24), dtype=np.uint8) * 255


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
LOOSE = {"progressive": True, "quality": 100, "subsampling": 0}
ODD = {
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
    "floats.tif": (lambda p: Image.fromarray(GREY.astype(np.float32)).save(p), grey(RGB), 0),
    "cmyk.jpg": (lambda p: COLOUR.convert("CMYK").save(p, quality=100), RGB, 3),
    "animated.gif": (lambda p: palette_image().save(p, **MORE), CHOSEN, 0),
    "palette.png": (
        lambda p: palette_image().save(p, transparency=bytes(range(0, 256, 17))),
        on(255, CHOSEN, LABELS * 17),
        0.5,
    ),
    "la.png": (lambda p: with_alpha(SHADES.copy()).save(p), on(255, grey(RGB)), 0.5),
    "rgba.png": (lambda p: with_alpha(COLOUR.copy()).save(p), on(255, RGB), 0.5),
    "one color.png": (
        lambda p: COLOUR.save(p, transparency=tuple(RGB[0, 0].tolist())),
        np.where((RGB[0, 0] == RGB).all(axis=2, keepdims=True), 255, RGB).astype(np.uint8),
        0,
    ),
    "rotated.png": (rotated, RGB, 0),
    "1-bit.png": (
        lambda p: Image.fromarray(BITS).convert("1").save(p),
        np.stack([BITS] * 3, axis=2),
        0,
    ),
    "progressive.jpg": (lambda p: COLOUR.save(p, **LOOSE), RGB, 6),
}
"""By the name of the file: what writes it, the plain form, and the mean difference that is allowed.

The plain form is made from arrays, without what reads images."""


@pytest.mark.parametrize("name", ODD)
def test_odd_images_give_their_plain_form(tmp_path, name):
    write, expected, allowed = ODD[name]
    write(tmp_path / name)
    found = load_image(tmp_path / name, 3)
    assert mean_difference(found, torch.from_numpy(expected.copy()).permute(2, 0, 1)) <= allowed
    assert find_damage(tmp_path / name, 3, DEFAULT_DECODING) is None


def test_opaque_pixels_and_older_runs_keep_their_colors(tmp_path):
    file = tmp_path / "a.png"
    with_alpha(COLOUR.copy()).save(file)
    opaque, colors = torch.from_numpy(ALPHA == 255), torch.from_numpy(RGB).permute(2, 0, 1)
    for background in (0, 90, 255):
        found = load_image(file, 3, Decoding((background,) * 3))
        assert torch.equal(found[:, opaque], colors[:, opaque])
        assert set(found[:, ALPHA == 0].unique().tolist()) == {background}
    assert torch.equal(load_image(file, 3, Decoding(background=None)), colors)


MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "I", "I;16", "F")


def of_mode(mode, folder):
    """A file of this mode."""
    path = folder / f"{mode.replace(';', '_')}.tif"
    if mode == "YCbCr":
        COLOUR.convert(mode).save(path, compression="jpeg")
    elif mode == "I;16":
        Image.fromarray(GREY.astype(np.uint16)).save(path)
    elif mode == "I;16B":
        Image.frombytes(mode, (24, 16), GREY.astype(">u2").tobytes()).save(path)
    elif mode == "P+tRNS":
        path = path.with_suffix(".png")
        palette_image().save(path, transparency=bytes(16))
    else:
        COLOUR.convert(mode).save(path)
    return path


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 5])
def test_what_the_check_passes_loads(tmp_path, channels):
    modes = {*MODES, "I;16B", "P+tRNS"}
    if channels not in (1, 3):
        pytest.importorskip("tifffile")
        modes -= {"YCbCr"}  # as JPEG in TIFF, which tifffile reads with another package
    readable = set()
    for mode in modes:
        path = of_mode(mode, tmp_path)
        reason = find_damage(path, channels, DEFAULT_DECODING)
        if reason is None:
            assert load_image(path, channels).shape == (channels, 16, 24)
            readable.add(mode)
            continue
        with pytest.raises(DataError) as caught:
            load_image(path, channels)
        assert reason in str(caught.value)
        assert "DATA.DATASET.CHANNELS" in reason
    if channels in (1, 3):
        assert readable == modes
    else:
        assert readable == {2: {"LA"}, 4: {"RGBA", "CMYK"}}.get(channels, set())


BANDS = np.random.default_rng(5).integers(0, 2**12, (5, 16, 24), dtype=np.uint16)


def write_bands(path, bands, layout="CHW"):
    """An array file or a TIFF file of channels [C, H, W]."""
    path.parent.mkdir(parents=True, exist_ok=True)
    values = np.ascontiguousarray(bands if layout == "CHW" else np.moveaxis(bands, 0, -1))
    if path.suffix == ".npy":
        np.save(path, values)
    else:
        tifffile = pytest.importorskip("tifffile")
        config = None if layout == "pages" else "separate" if layout == "CHW" else "contig"
        values = bands if layout == "pages" else values
        tifffile.imwrite(path, values, planarconfig=config, photometric="minisblack")
    return path


@pytest.mark.parametrize("name", ["CHW.npy", "HWC.npy", "CHW.tif", "HWC.tif", "pages.tif"])
def test_any_number_of_channels_is_read(tmp_path, name):
    path = write_bands(tmp_path / name, BANDS, Path(name).stem)
    found = load_image(path, 5, Decoding(bit_depth=12))
    assert torch.equal(found, torch.from_numpy((BANDS >> 4).astype(np.uint8)))
    assert find_damage(path, 5, DEFAULT_DECODING) is None
    for channels in (1, 3, 4):
        reason = find_damage(path, channels, DEFAULT_DECODING) or ""
        if name != "pages.tif" or channels == 4:  # else its first page
            assert "DATA.DATASET.CHANNELS" in reason
            assert "[5, 16, 24]" in reason or "[16, 24, 5]" in reason
    path.write_bytes(path.read_bytes()[:2000])
    assert find_damage(path, 5, DEFAULT_DECODING)


def test_a_missing_library_is_named(tmp_path, monkeypatch):
    path = of_mode("RGBA", tmp_path)
    monkeypatch.setitem(sys.modules, "tifffile", None)
    assert "pip install tifffile" in (find_damage(path, 4, DEFAULT_DECODING) or "")
    assert find_damage(path, 3, DEFAULT_DECODING) is None


def test_an_array_of_objects_is_refused(tmp_path):
    np.save(tmp_path / "a.npy", np.array([{}]))
    assert find_damage(tmp_path / "a.npy", 5, DEFAULT_DECODING)


def test_arrays_of_one_and_three_channels_are_converted(tmp_path):
    np.save(tmp_path / "rgb.npy", RGB)
    assert torch.equal(load_image(tmp_path / "rgb.npy", 3), as_tensor(COLOUR))
    assert torch.equal(load_image(tmp_path / "rgb.npy", 1), as_tensor(COLOUR, "L"))
    np.save(tmp_path / "grey.npy", GREY.astype(np.float32) / 255)
    assert torch.equal(load_image(tmp_path / "grey.npy", 3), as_tensor(SHADES))


def ends_at(path, channels):
    found = file_range(str(path), channels, DEFAULT_DECODING)
    return found[1]


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.float64])
def test_one_range_reads_a_dark_and_a_bright_file(tmp_path, dtype):
    decoding = Decoding(bit_depth=12, float_bits=12)
    for peak, expected in ((200, 12), (4095, 255), (9000, 255)):
        values = np.linspace(0, peak, 48 * 48).reshape(48, 48).astype(dtype)
        np.save(tmp_path / "a.npy", values)
        found = load_image(tmp_path / "a.npy", 1, decoding)
        assert int(found.max()) == expected
        assert int(found.min()) == 0


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.float32])
def test_a_file_of_no_measured_range_has_its_own(tmp_path, dtype):
    values = GREY.astype(dtype)
    np.save(tmp_path / "a.npy", values)
    assert torch.equal(load_image(tmp_path / "a.npy", 1), as_tensor(SHADES, "L"))
    saved = Decoding(bit_depth=16, float_bits=16)
    assert int(load_image(tmp_path / "a.npy", 1, saved).max()) <= 1, "a negative control"


def test_a_file_without_a_finite_value_is_damaged(tmp_path):
    values = np.full((16, 24), np.nan, np.float32)
    np.save(tmp_path / "a.npy", values)
    assert "NaN" in (find_damage(tmp_path / "a.npy", 1, DEFAULT_DECODING) or "")
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
    assert ends_at(tmp_path / "a.tif", 3) < 2**12
    assert torch.equal(load_image(tmp_path / "a.tif", 3, Decoding(bit_depth=12)), as_tensor(COLOUR))
    tifffile.imwrite(tmp_path / "b.tif", values * 16)
    assert 2**15 <= ends_at(tmp_path / "b.tif", 3) < 2**16
    assert torch.equal(load_image(tmp_path / "b.tif", 3), as_tensor(COLOUR))


def test_the_largest_image_is_a_key(tmp_path):
    path = write_image(tmp_path / "a.png")
    np.save(tmp_path / "a.npy", np.asarray(picture()))
    for file in (path, tmp_path / "a.npy"):
        assert find_damage(file, 3, Decoding(max_pixels=24 * 32)) is None
        assert "DATA.MAX_PIXELS" in (find_damage(file, 3, Decoding(max_pixels=24 * 32 - 1)) or "")


def test_no_image_within_the_limit_makes_pillow_warn(tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 500)
    path = write_image(tmp_path / "a.png")
    with pytest.warns(Image.DecompressionBombWarning), Image.open(path):
        pass
    with warnings.catch_warnings(record=True) as caught:
        assert load_image(path, 3).shape == (3, 24, 32)
        with pytest.raises(DataError, match=r"DATA\.MAX_PIXELS"):
            load_image(path, 3, Decoding(max_pixels=767))
    assert not caught


def test_heic_images_are_read_where_the_library_is(tmp_path):
    pillow_heif = pytest.importorskip("pillow_heif")
    pillow_heif.from_pillow(picture()).save(tmp_path / "a.heic", quality=95)
    assert mean_difference(load_image(tmp_path / "a.heic", 3), as_tensor(picture())) < 16
    damaged = tmp_path / "b.heic"
    damaged.write_bytes((tmp_path / "a.heic").read_bytes()[:40])
    assert find_damage(damaged, 3, DEFAULT_DECODING)


def test_no_image_file_starts_a_program(tmp_path, monkeypatch):
    path, ran = tmp_path / "photo.jpg", tmp_path / "ran"
    picture().save(path, format="EPS")
    ghostscript = tmp_path / "gs"
    ghostscript.write_text(f"#!/bin/sh\necho > '{ran}'\n")
    ghostscript.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)  # Pillow looks once for it
    assert find_damage(path, 3, DEFAULT_DECODING)
    with pytest.raises(DataError, match=r"photo\.jpg"):
        load_image(path, 3)
    assert not ran.exists()
    with Image.open(path) as image, suppress(OSError):
        image.load()
    assert ran.exists(), "a negative control"


def large_photo(path, size=(1200, 900), **options):
    """A JPEG file with fine and coarse structure."""
    noise = np.random.default_rng(6).integers(0, 256, (size[1] // 50, size[0] // 50, 3), np.uint8)
    Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC).save(path, quality=95, **options)
    return path


def test_large_photos_are_decoded_at_twice_the_size_needed(tmp_path):
    path = large_photo(tmp_path / "a.jpg")
    whole = load_image(path, 3)
    assert torch.equal(whole, as_tensor(Image.open(path)))
    fast = Decoding(fast=True)
    for side, scale in ((900, 1), (451, 1), (450, 2), (226, 2), (225, 4), (113, 4), (20, 8)):
        found = load_image(path, 3, fast, lambda *_, side=side: (side, side))
        assert found.shape == (3, -(-900 // scale), 1200 // scale)
        size = [side // 2, side * 2 // 3]  # of the model's input
        resized = [functional.resize(each, size, antialias=True) for each in (found, whole)]
        assert mean_difference(*resized) < 1.5
        exact = load_image(path, 3, DEFAULT_DECODING, lambda *_, side=side: (side, side))
        assert torch.equal(exact, whole)


def test_the_orientation_turns_the_size_needed(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    path, seen = large_photo(tmp_path / "a.jpg", exif=exif), []

    def smallest(height, width):
        seen.append((height, width))
        return 600, 225

    assert load_image(path, 3, Decoding(fast=True), smallest).shape == (3, 600, 450)
    assert seen == [(1200, 900)]
