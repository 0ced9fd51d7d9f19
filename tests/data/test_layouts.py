"""How the layout of a data set gives its splits and labels, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from linnaeus.errors import ConfigError
from tests.helpers.layouts import CLASSES, build, folders, levels, sizes

FLAT = {"class": CLASSES}


@pytest.mark.parametrize(
    ("train", "val"),
    [
        ("Train", "Val"),
        ("Training", "Testing"),
        ("training", "validation"),
        ("train", "dev"),
        ("TRAIN", "eval"),
        ("train_set", "test_set"),
        ("trainset", "ValSet"),
        ("train_images", "val_images"),
        ("train2017", "val2017"),
        ("cub_train", "cub_test"),
        ("Train-Birds", "Test-Birds"),
        ("seg_train/seg_train", "seg_test/seg_test"),
        ("{}/train", "{}/val"),
        ("{}/Training", "{}/Testing"),
        ("{}/{}_train", "{}/{}_val"),
    ],
)
def test_folders_of_splits_are_no_level(tmp_path: Path, train: str, val: str) -> None:
    for each in CLASSES:
        folders(tmp_path, [train.replace("{}", each) if "{}" in train else f"{train}/{each}"], [""])
        name = val.replace("{}", each) if "{}" in val else f"{val}/{each}"
        folders(tmp_path, [name], [""], num=2)
    bundle = build(tmp_path)
    assert levels(bundle) == FLAT
    assert sizes(bundle) == [12, 6]
    assert sorted(bundle.val.targets[:, 0].tolist()) == [0, 0, 1, 1, 2, 2]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("names", "classes"),
    [
        (["{}"], ("car", "plane", "train")),
        (["{}"], ("car", "train", "val")),
        (["{}"], ("test_tube", "train_station")),
        (["{}"], ("test", "train", "bus")),
    ],
)
def test_classes_called_like_splits_are_classes(
    tmp_path: Path, names: list[str], classes: tuple[str, ...]
) -> None:
    bundle = build(folders(tmp_path, names, classes, num=5))
    assert levels(bundle) == {"class": tuple(sorted(classes))}


def test_a_level_of_two_classes_stays_a_level(tmp_path: Path) -> None:
    folders(tmp_path, ["Animals"], ["cat", "dog", "unknown"])
    folders(tmp_path, ["Plants"], ["elm", "oak", "unknown"])
    assert [len(names) for names in levels(build(tmp_path)).values()] == [2, 6]


def test_folders_that_hold_the_same_classes_are_refused(tmp_path: Path) -> None:
    folders(tmp_path, ["part1", "part2"])
    with pytest.raises(ConfigError, match=r"part1.*DATA\.DATASET\.TRAIN.*RANKS"):
        build(tmp_path)
    assert sizes(build(tmp_path, TRAIN="part1", VAL="part2")) == [12, 12]
    assert list(levels(build(tmp_path, RANKS=["part", "animal"]))) == ["part", "animal"]


def test_several_folders_of_a_split_are_refused(tmp_path: Path) -> None:
    folders(tmp_path, ["train", "dev", "eval"])
    with pytest.raises(ConfigError, match=r"DATA\.DATASET\.VAL.*dev, eval"):
        build(tmp_path)
    assert sizes(build(tmp_path, VAL="dev")) == [12, 12]
    folders(tmp_path, ["val"], num=1)
    assert sizes(build(tmp_path)) == [12, 3]


def test_a_third_split_is_for_the_end(tmp_path: Path) -> None:
    """Images in it without a label, as in a competition, are not evaluated."""
    folders(tmp_path / "three", ["train", "val", "test"])
    assert sizes(build(tmp_path / "three")) == [12, 12, 12]
    folders(tmp_path / "three", ["other"], num=1)
    assert sizes(build(tmp_path / "three", TEST="other")) == [12, 12, 3]
    for name, unlabelled in {"flat": "test", "unknown": "test/unknown"}.items():
        folders(tmp_path / name, ["train"], num=5)
        folders(tmp_path / name, [unlabelled], [""])
        assert sizes(build(tmp_path / name)) == [12, 3]
        assert any("test" in line for line in build(tmp_path / name).report[1:])
