"""What is measured over the training files: the range of values, and mean and deviation of other channels."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from linnaeus.config.schema import AugmentConfig, DataConfig, DatasetConfig
from linnaeus.data.checked import MOST_IMAGES, measure_ranges
from linnaeus.data.datasets import build_data
from linnaeus.data.image import DEFAULT_DECODING, Decoding
from linnaeus.inference.evaluation_data import EvaluationRequest, build_evaluation_data
from linnaeus.inference.images import Reader
from linnaeus.models.model_spec import ModelSpec
from linnaeus.runtime.errors import DataError
from tests.helpers.datasets import write_image


def build(root, channels=1, reads_images=True, **keys):
    dataset = DatasetConfig(NAME="imagefolder", ROOT=str(root), CHANNELS=channels)
    keys = {"AUGMENT": AugmentConfig(CROP_SCALE=[1.0, 1.0]), **keys}
    config = DataConfig(DATASET=dataset, IMG_SIZE=16, **keys)
    return build_data(config, seed=0, reads_images=reads_images)


def decoding_of(bundle):
    return bundle.preprocessing.decoding


def depth(bundle):
    return decoding_of(bundle).bit_depth


def range_lines(bundle):
    return [line for line in bundle.report if "are scaled to" in line]


def clipped_lines(bundle):
    return [line for line in bundle.report if "are clipped" in line]


def grey16(root, peaks):
    """16-bit files whose largest values are these."""
    for name, peak in peaks.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        values = np.linspace(0, peak, 16 * 16).reshape(16, 16).astype(np.uint16)
        Image.fromarray(values).save(path)
    return root


def test_one_file_decides_on_the_significant_bits(tmp_path):
    names = [f"train/{'ab'[i % 2]}/{i}.png" for i in range(40)]
    peaks = dict.fromkeys([*names, "val/a/0.png", "val/b/0.png"], 900)
    root = grey16(tmp_path, peaks | {names[17]: 4095})
    write_image(root / "train/a/photo.jpg")
    bundle = build(root)
    assert depth(bundle) == 12
    [line] = range_lines(bundle)
    assert {"40", "4095"} <= {*re.findall(r"\d+", line)}
    for number, peak in ((3, 900 // 16), (17, 255)):
        position = bundle.train.files.index(f"{root}/{names[number]}")
        assert int(bundle.train[position][0].max()) == peak
    assert depth(build(root, BIT_DEPTH=14)) == 14
    grey16(root, {names[3]: 65535})
    assert depth(build(root)) == 16
    assert depth(build(root, reads_images=False)) is None


def test_of_many_files_an_even_part_is_measured(tmp_path):
    root = grey16(tmp_path, {"12.tif": 4095, "16.tif": 65535})
    twelve, sixteen = (str(root / f"{bits}.tif") for bits in (12, 16))
    for repeats, bits in ((1, 16), (2, 12)):
        files = [twelve, sixteen] * (MOST_IMAGES // 2 * repeats)
        found, _ = measure_ranges({"train": files}, 1, DEFAULT_DECODING)
        assert found.bit_depth == bits


def test_files_of_8_bits_and_damaged_ones_are_not_measured(tmp_path):
    for i in range(8):
        write_image(tmp_path / "ab"[i % 2] / f"{i}.png")
    (tmp_path / "a/bad.png").write_text("no image")
    assert depth(build(tmp_path, ON_BAD_IMAGE="skip")) is None


def arrays(root, make, number=8):
    """Array files of two classes; `make` gives the values of one from a random generator."""
    for i in range(number):
        path = root / "ab"[i % 2] / f"{i}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, make(np.random.default_rng(i)))
    return root


def integers(low, high, dtype):
    return lambda generator: generator.integers(low, high, (40, 40)).astype(dtype)


@pytest.mark.parametrize(
    ("make", "white"),
    [
        (integers(0, 256, np.int64), 255),
        (lambda generator: generator.random((40, 40)) * 1.004 - 0.001, 1),  # rounded
        (integers(0, 4096, np.float16), 4095),
    ],
)
def test_one_range_is_measured_for_all_files(tmp_path, make, white):
    root = arrays(tmp_path, make)
    bundle = build(root)
    [line] = range_lines(bundle)
    assert {str(white), "8"} <= {*re.findall(r"\d+", line)}
    images = bundle.train
    pixels = torch.stack([images[i][0] for i in range(len(images))])
    assert pixels.float().mean().item() == pytest.approx(127.5, rel=0.1)
    hot = np.load(images.files[0])
    for side in (1, 20):  # one pixel, and more
        hot[:side, :side] = 30_000
        np.save(images.files[0], hot)
        assert (decoding_of(build(root)) == decoding_of(bundle)) == (side == 1)


@pytest.mark.parametrize(
    ("make", "values"),
    [
        (integers(-1000, 3000, np.int16), r"-\d+ to 29\d\d"),
        (lambda generator: generator.random((40, 40)) * 1.5, r"0\.\d+ to 1\.4\d+"),
        (integers(0, 2, np.int64), "0 to 1"),
        (lambda generator: generator.random((40, 40)) * 1e38, r"\S+ to \S+e\+37"),
    ],
)
def test_values_of_no_range_end_training_and_check(run, tmp_path, make, values):
    root = arrays(tmp_path / "images", make)
    message = rf"{root}/[ab]/\d\.npy: .*values, {values},"
    with pytest.raises(DataError, match=message):
        build(root)
    outcome = run("check-data", "data=imagefolder", f"DATA.DATASET.ROOT={root}")
    assert outcome.code == 1
    assert re.search(message, outcome.err)


def test_a_split_above_the_range_is_noted_and_clipped(tmp_path):
    for split in ("train", "val"):
        arrays(tmp_path / split, integers(0, 4096, np.uint16))
    assert clipped_lines(build(tmp_path)) == []
    arrays(tmp_path / "val", integers(0, 60_000, np.uint16))
    bundle = build(tmp_path)
    assert depth(bundle) == 12
    [line] = clipped_lines(bundle)
    assert line.startswith("val")
    assert str(tmp_path / "val") in line
    assert int(bundle.val[0][0].max()) == 255
    assert [line[:5] for line in clipped_lines(build(tmp_path, BIT_DEPTH=10))] == ["train", "val: "]


def test_the_bit_depth_sets_the_range_of_integers_alone(tmp_path):
    arrays(tmp_path, integers(-100, 256, np.int32))
    bundle = build(tmp_path, BIT_DEPTH=8)
    assert (depth(bundle), range_lines(bundle)) == (8, [])
    with pytest.raises(DataError):
        build(tmp_path)
    arrays(tmp_path, lambda generator: generator.random((40, 40)))
    found = decoding_of(build(tmp_path, BIT_DEPTH=12))
    assert (found.bit_depth, found.float_bits) == (12, 1)


@pytest.mark.e2e
def test_five_channels_train_validate_and_predict(run, tmp_path):
    arrays(tmp_path / "bands", lambda generator: generator.integers(0, 256, (5, 20, 24), np.uint8))
    train = (
        *("train", "data=imagefolder", "DATA.DATASET.ROOT=bands", "DATA.DATASET.CHANNELS=5"),
        *("DATA.IMG_SIZE=32", "DATA.BATCH_SIZE=4", "MODEL.NAME=test_resnet", "TRAIN.EPOCHS=1"),
        *("EXPERIMENT.NAME=bands", "EXPERIMENT.DEVICE=cpu"),
    )
    predict = ("predict", "runs/bands", "bands", "--output", "found.csv")
    for command in (train, predict, ("evaluate", "runs/bands")):
        outcome = run(*command)
        assert outcome.code == 0, outcome.err
    spec = json.loads((tmp_path / "runs/bands/model.json").read_text())
    assert len(spec["preprocessing"]["mean"]) == spec["preprocessing"]["channels"] == 5
    assert len((tmp_path / "found.csv").read_text().splitlines()) == 9


def photo(path, seed=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(0, 256, (15, 20, 3), np.uint8)
    Image.fromarray(noise).resize((400, 300), Image.Resampling.BICUBIC).save(path)


def spec_of(bundle):
    return ModelSpec({}, bundle.index, bundle.in_chans, (16, 16), bundle.preprocessing)


def loaded(content):
    """The spec of a file that holds this."""
    return ModelSpec.from_dict(json.loads(json.dumps(content)), Path("last.pt"))


def test_the_range_is_saved_and_older_decodings_load(tmp_path):
    arrays(tmp_path, integers(0, 4096, np.float32))
    bundle = build(tmp_path)
    content = spec_of(bundle).as_dict()
    saved = loaded(content)
    assert saved.preprocessing == bundle.preprocessing
    dark = tmp_path / "dark.npy"
    np.save(dark, np.full((16, 16), 255, np.float32))
    assert Reader(saved)(dark).max() < -0.8
    del content["preprocessing"]["decoding"]["float_bits"]
    assert Reader(loaded(content))(dark).min() == 1
    del content["preprocessing"]["decoding"]
    assert loaded(content).preprocessing.decoding == Decoding(background=None)


def test_all_commands_read_a_large_photo_alike(tmp_path):
    for name in ("train/a/0", "train/b/1", "val/a/2", "val/b/3"):
        photo(tmp_path / f"{name}.jpg", seed=ord(name[-1]))
    clear = Image.new("RGBA", (40, 30), (200, 0, 0, 90))
    clear.save(tmp_path / "val/a/4.png")
    grey16(tmp_path, {"train/a/5.png": 4000, "val/b/6.png": 4000})
    bundle = build(tmp_path, 3, DECODE="fast", BACKGROUND=[10, 250, 90])
    spec = loaded(spec_of(bundle).as_dict())
    assert spec.preprocessing.decoding.bit_depth == 12
    node = DatasetConfig(NAME="imagefolder", ROOT=str(tmp_path))
    request = EvaluationRequest(DataConfig(DATASET=node), spec.index, spec.preprocessing, 0, True)
    evaluated, read = build_evaluation_data(request).bundle.val, Reader(spec)
    for position, file in enumerate(bundle.val.files):
        pixels = bundle.val[position][0]
        assert torch.equal(pixels, evaluated[position][0])
        assert torch.equal(spec.preprocessing.normalise()(pixels), read(file))
