"""Keys whose null follows the data and the command line."""

import os
from pathlib import Path

import pytest
import yaml

from linnaeus.cli.sweep import read as sweep
from linnaeus.config.dump import to_yaml
from tests.helpers.configs import load, write

FILES = ("DATA.DATASET.ROOT=/data/birds",)
OWN = "DATA.DATASET._target_=my_package.MyDataset"
PHOTOGRAPHS = ([0.35, 1.0], 0.5)
NAMES = [
    ((), "digits"),
    (("data=imagefolder",), "imagefolder"),
    (("data=imagefolder", *FILES), "birds"),
    (("data=imagefolder", "DATA.DATASET.ROOT=/"), "imagefolder"),
    (("data=imagefolder", "DATA.DATASET.ROOT=/data/${EXPERIMENT.SEED}"), "0"),
    (("data=imagefolder", "DATA.DATASET.ROOT=/data/${EXPERIMENT.NAME}"), "imagefolder"),
    (("data=manifest", "DATA.DATASET.TRAIN=lists/birds.csv", "DATA.DATASET.ROOT=/moths"), "birds"),
    (("data=manifest", "DATA.DATASET.TRAIN=train.csv", "DATA.DATASET.ROOT=/moths"), "moths"),
    ((OWN, *FILES), "MyDataset"),
    (("--cfg", "moths.v2.yaml", "--cfg", "lr.yaml"), "lr"),
    (("--config-dir=.", "--config-name=lr"), "lr"),
    (("--cfg", "lr.yaml", "EXPERIMENT.NAME=mine"), "mine"),
    (("--cfg", "named.yaml"), "given"),
]


@pytest.fixture(autouse=True)
def _files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write({"moths.v2": "", "lr": "OPTIMIZER: {LR: 0.1}", "named": "EXPERIMENT: {NAME: given}"})


@pytest.mark.parametrize(("argv", "name"), NAMES)
def test_a_run_without_a_name_has_that_of_its_file_or_data(argv, name):
    experiment = load(*argv).EXPERIMENT
    assert (experiment.NAME, experiment.folder) == (name, Path("runs") / name)


def test_the_current_folder_names_a_run_of_its_images(tmp_path):
    folder = tmp_path / "moths"
    folder.mkdir()
    os.chdir(folder)
    for root in (".", "../moths", "x/..", "./"):
        assert load("data=imagefolder", f"DATA.DATASET.ROOT={root}").EXPERIMENT.NAME == "moths"


def test_other_keys_may_follow_the_name_that_a_run_gets():
    config = load("--cfg", "lr.yaml", "EXPERIMENT.WANDB.GROUP=${EXPERIMENT.NAME}-1")
    assert config.EXPERIMENT.WANDB.GROUP == "lr-1"
    Path("again.yaml").write_text(to_yaml(config))
    assert load("--cfg", "again.yaml") == config


@pytest.mark.parametrize(
    ("name", "more", "left_out"),
    [
        ("imagefolder", "ROOT=x", {"NOISE", "NUM_CLASSES", "IMAGE_COLUMN", "UNKNOWN_FRACTION"}),
        ("synthetic", "NOISE=3", {"ROOT", "FOLD", "VAL"}),
    ],
)
def test_keys_that_a_dataset_does_not_read_are_not_printed(name, more, left_out):
    config = load(f"DATA.DATASET.NAME={name}", f"DATA.DATASET.{more}")
    shown = yaml.safe_load(to_yaml(config))["DATA"]["DATASET"]
    assert not left_out & {*shown}
    assert {"NAME", "LEVELS", more.partition("=")[0]} <= {*shown}
    Path("again.yaml").write_text(to_yaml(config))
    assert load("--cfg", "again.yaml") == config


def test_runs_of_a_sweep_share_its_folder():
    for argv, name in (
        (("--cfg", "lr.yaml", "EXPERIMENT.SEED=0,1"), "lr"),
        (("data=digits,synthetic",), "digits"),
        (("data=digits,synthetic", "EXPERIMENT.NAME=both"), "both"),
    ):
        _, found, plans = sweep([*argv, "--dry-run"])  # type: ignore[misc]
        assert found.folder == Path("runs") / name
        assert {config.EXPERIMENT.folder.parent for _, config in plans} == {found.folder}


@pytest.mark.parametrize("kind", ["imagefolder", "manifest", "digits"])
def test_photographs_are_augmented_as_such_unless_set(kind):
    def augmentation(*argv):
        augment = load(f"DATA.DATASET.NAME={kind}", *argv).DATA.AUGMENT
        return augment.CROP_SCALE, augment.HFLIP

    is_files = kind in ("imagefolder", "manifest")
    expected = PHOTOGRAPHS if is_files else ([0.8, 1.0], 0.0)
    assert augmentation() == augmentation("DATA.AUGMENT.HFLIP=null") == expected
    if is_files:
        assert augmentation(f"data={kind}") == expected
    assert augmentation("DATA.AUGMENT.HFLIP=0") == (expected[0], 0.0)
    assert augmentation("DATA.AUGMENT.CROP_SCALE=[1,1]") == ([1.0, 1.0], expected[1])
    own = load(OWN, f"DATA.DATASET.NAME={kind}").DATA.AUGMENT
    assert (own.CROP_SCALE, own.HFLIP) == ([0.8, 1.0], 0.0)
