import os
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from linnaeus.config.schema import DataConfig, DatasetConfig
from linnaeus.data.checked import find_damaged
from linnaeus.data.datasets import build_data
from linnaeus.data.image import DEFAULT_DECODING
from linnaeus.runtime.errors import DataError
from tests.helpers.datasets import write_image


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.usefixtures("cache")
def test_images_are_checked_once_and_all_damaged_ones_named(run, tmp_path):
    for i in range(20):
        write_image(tmp_path / f"images/{'ab'[i % 2]}/{i}.jpg", seed=i)
    bad = [tmp_path / f"images/a/{i}.jpg" for i in (2, 4)]

    def known():
        outcome = run("check-data", "data=imagefolder", "DATA.DATASET.ROOT=images")
        assert outcome.code == any(path.name in outcome.err for path in bad)
        found = re.search(r"^20 images checked in .* s, (\d+) of them", outcome.out, re.M)
        return int(found[1])

    assert known() == 0
    for path in bad:
        path.write_bytes(path.read_bytes()[:200])
    assert known() == 18
    assert run("check-data", "data=digits").code == 2


def test_a_cache_that_fails_does_not_fail_the_check(tmp_path, cache):
    write_image(tmp_path / "a.png")
    files = [str(tmp_path / "a.png"), str(tmp_path / "gone.png")]
    cache.write_text("not a folder")
    for _ in range(2):
        damaged, num_known = find_damaged(files, 3, DEFAULT_DECODING)
        assert (list(damaged), num_known) == ([1], 0)
    cache.unlink()
    assert [find_damaged(files, 3, DEFAULT_DECODING)[1] for _ in range(2)] == [0, 1]


def test_a_file_that_changed_is_read_again(tmp_path, cache):
    file = tmp_path / "a.png"
    write_image(file)
    whole = file.read_bytes()
    assert find_damaged([str(file)], 3, DEFAULT_DECODING) == ({}, 0)
    file.write_bytes(whole[:-30] + bytes(30))  # of the same size
    os.utime(file, ns=(1, 1))
    assert list(find_damaged([str(file)], 3, DEFAULT_DECODING)[0]) == [0]
    file.write_bytes(whole)
    assert [find_damaged([str(file)], 3, DEFAULT_DECODING) for _ in range(2)] == [({}, 0), ({}, 1)]


@pytest.mark.usefixtures("cache")
def test_no_command_prints_warnings_of_pillow(run, tmp_path):
    for i in range(4):
        folder = tmp_path / "images" / "ab"[i % 2]
        write_image(folder / f"{i}.jpg", exif=b"Exif\0\0MM\0*garbage")
    Image.new("1", (9500, 9500)).save(tmp_path / "images/a/huge.png")
    words = ("data=imagefolder", "DATA.DATASET.ROOT=images", "DATA.DATASET.CHANNELS=1")
    outcome = run("check-data", *words)
    assert (outcome.code, outcome.err) == (0, "")
    outcome = run("check-data", *words, "DATA.MAX_PIXELS=90000000")
    assert outcome.code == 1
    assert re.search("(?s)huge.png.*DATA.MAX_PIXELS 90000000", outcome.err)


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("channels", [3, 5])
def test_check_and_skip_judge_as_training_does(run, tmp_path, channels):
    for i in range(8):
        write_image(tmp_path / f"images/{'ab'[i % 2]}/{i}.png", mode="RGBA" if i else "LA")
        np.save(tmp_path / f"images/{'ab'[i % 2]}/{i}.npy", np.zeros((5, 9, 9), np.uint8))
    words = ("data=imagefolder", "DATA.DATASET.ROOT=images", f"DATA.DATASET.CHANNELS={channels}")
    outcome = run("check-data", *words)
    assert outcome.code == 1
    node = DatasetConfig(NAME="imagefolder", ROOT="images", CHANNELS=channels)
    whole, kept = (
        build_data(DataConfig(DATASET=node, IMG_SIZE=8, ON_BAD_IMAGE=choice), seed=0)
        for choice in ("raise", "skip")
    )
    for split in (whole.train, whole.val):
        for position, file in enumerate(split.files):
            is_bad = (Path(file).suffix == ".npy") != (channels == 5)
            assert (file.removeprefix(str(tmp_path)) in outcome.err) == is_bad
            if is_bad:
                with pytest.raises(DataError):
                    split[position]
            else:
                assert split[position][0].shape == (channels, 8, 8)
    assert len(kept.train) + len(kept.val) == 8
