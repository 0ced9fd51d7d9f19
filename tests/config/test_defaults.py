"""Keys whose null follows the data and the command line."""

import os
from pathlib import Path

import pytest
import yaml

from linnaeus.cli.sweep import read as sweep
from linnaeus.config.dump import to_yaml
from tests.helpers.configs import load, write

OWN = "DATA.DATASET._target_=my_package.MyDataset"
NAMES = [
    ("", "digits"),
    ("data=imagefolder", "imagefolder"),
    ("data=imagefolder DATA.DATASET.ROOT=/data/birds", "birds"),
    ("data=imagefolder DATA.DATASET.ROOT=/", "imagefolder"),
    ("data=imagefolder DATA.DATASET.ROOT=.", "here"),
    ("data=imagefolder DATA.DATASET.ROOT=/data/${EXPERIMENT.SEED}", "0"),
    ("data=imagefolder DATA.DATASET.ROOT=/data/${EXPERIMENT.NAME}", "imagefolder"),
    ("data=manifest DATA.DATASET.TRAIN=lists/birds.csv DATA.DATASET.ROOT=/moths", "birds"),
    ("data=manifest DATA.DATASET.TRAIN=train.csv DATA.DATASET.ROOT=/moths", "moths"),
    (f"{OWN} DATA.DATASET.ROOT=/data/birds", "MyDataset"),
    ("--cfg moths.v2.yaml --cfg lr.yaml", "lr"),
    ("--config-dir=. --config-name=lr", "lr"),
    ("--cfg lr.yaml EXPERIMENT.NAME=mine", "mine"),
    ("--cfg named.yaml", "given"),
]


@pytest.fixture(autouse=True)
def _files(tmp_path):
    (tmp_path / "here").mkdir()
    os.chdir(tmp_path / "here")
    write({"moths.v2": "", "lr": "OPTIMIZER: {LR: 0.1}", "named": "EXPERIMENT: {NAME: given}"})


@pytest.mark.parametrize(("line", "name"), NAMES)
def test_a_run_without_a_name_has_that_of_its_file_or_data(line, name):
    experiment = load(*line.split()).EXPERIMENT
    assert (experiment.NAME, experiment.folder) == (name, Path("runs") / name)


def test_other_keys_may_follow_the_name_that_a_run_gets():
    config = load("--cfg", "lr.yaml", "EXPERIMENT.WANDB.GROUP=${EXPERIMENT.NAME}-1")
    assert config.EXPERIMENT.WANDB.GROUP == "lr-1"
    Path("again.yaml").write_text(to_yaml(config))
    assert load("--cfg", "again.yaml") == config


def test_keys_that_a_dataset_does_not_read_are_not_printed():
    """Unless they are set."""
    config = load("DATA.DATASET.NAME=synthetic", "DATA.DATASET.NOISE=3", "DATA.DATASET.FOLD=1")
    shown = yaml.safe_load(to_yaml(config))["DATA"]["DATASET"]
    assert not {"ROOT", "VAL"} & {*shown}
    assert {"NAME", "LEVELS", "NOISE", "FOLD"} <= {*shown}
    Path("again.yaml").write_text(to_yaml(config))
    assert load("--cfg", "again.yaml") == config


@pytest.mark.parametrize(
    ("line", "name"),
    [("--cfg lr.yaml EXPERIMENT.SEED=0,1", "lr"), ("data=digits,synthetic", "digits")],
)
def test_runs_of_a_sweep_share_its_folder(line, name):
    _, found, plans = sweep([*line.split(), "--dry-run"])
    assert found.folder == Path("runs") / name
    assert {config.EXPERIMENT.folder.parent for _, config in plans} == {found.folder}


@pytest.mark.parametrize(
    ("data", "scale", "flip"),
    [
        ("DATA.DATASET.NAME=imagefolder", [0.35, 1.0], 0.5),
        ("data=manifest", [0.35, 1.0], 0.5),
        ("DATA.DATASET.NAME=digits", [0.8, 1.0], 0.0),
        (f"DATA.DATASET.NAME=imagefolder {OWN}", [0.8, 1.0], 0.0),
    ],
)
def test_photographs_are_augmented_as_such_unless_set(data, scale, flip):
    def augmentation(*argv):
        augment = load(*data.split(), *argv).DATA.AUGMENT
        return augment.CROP_SCALE, augment.HFLIP

    assert augmentation() == augmentation("DATA.AUGMENT.HFLIP=null") == (scale, flip)
    assert augmentation("DATA.AUGMENT.HFLIP=0") == (scale, 0.0)
    assert augmentation("DATA.AUGMENT.CROP_SCALE=[1,1]") == ([1.0, 1.0], flip)
