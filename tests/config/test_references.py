"""Files, folders, classes and names of timm that are not there, found with all other mistakes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from linnaeus.cli.train import read
from linnaeus.runtime.errors import ConfigError
from tests.helpers.forks import ROOT

MISTAKES = {
    "TRAIN.AMP=x": "TRAIN.AMP",
    "DATA.DATASET.NAME=imagefolder": "",
    "DATA.DATASET.ROOT=mots": "DATA.DATASET.ROOT",
    "MODEL.NAME=resnet1o8": "MODEL.NAME",
    "MODEL.WEIGHTS=nowhere.pt": "MODEL.WEIGHTS",
    "OPTIMIZER.NAME=adamv": "OPTIMIZER.NAME",
    "SCHEDULE.NAME=cosin": "SCHEDULE.NAME",
    "LOSS._target_=own_package.MyLos": "LOSS._target_",
    "TRAIN.CALLBACKS=[{_target_: no_package.X}]": "TRAIN.CALLBACKS.0._target_",
    "EPOCHS=3": "EPOCHS",
}
HINTS = {"ROOT": "moths", "MODEL.NAME": "resnet18", "LOSS": "own_package.MyLoss", "EPOCHS": "TRAIN"}
IN_A_PROCESS = """
import json, sys
from linnaeus.cli.train import read
from linnaeus.runtime.errors import ConfigError
try:
    read(json.loads(sys.argv[1]))
except ConfigError as error:
    print(json.dumps([error.problems, sorted({"torch", "timm", "own_package"} & {*sys.modules})]))
"""


@pytest.fixture(autouse=True)
def _package(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "moths").mkdir()
    (tmp_path / "own_package.py").write_text("import torch\n\n\nclass MyLoss: ...\n")


def keys(*argv):
    try:
        read(argv)
    except ConfigError as error:
        return [problem.partition(":")[0] for problem in error.problems]
    return []


def test_all_mistakes_are_found_at_once_without_torch(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", IN_A_PROCESS, json.dumps([*MISTAKES])],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"},
        capture_output=True,
        text=True,
        check=True,
    )
    told, imported = json.loads(done.stdout)
    assert {problem.partition(":")[0] for problem in told} == {*MISTAKES.values()} - {""}
    assert imported == []
    for key, hint in HINTS.items():
        assert any(key in line.partition(":")[0] and hint in line for line in told), (key, told)


def test_a_device_is_checked_with_all_else_unless_a_job_has_it():
    wrong = ("EXPERIMENT.DEVICE=cudo", "MODEL.NAME=resnet1o8")
    assert keys(*wrong) == ["MODEL.NAME", "EXPERIMENT.DEVICE"]
    assert keys(*wrong, "--launcher=slurm") == ["MODEL.NAME"]


def test_what_is_there_is_no_mistake():
    Path("moths/train").mkdir()
    Path("w.yaml").touch()
    data = ("data=imagefolder", "DATA.DATASET.ROOT=moths", "DATA.DATASET.TRAIN=train")
    assert not keys(*data, "MODEL.NAME=resnet50.a1_in1k", "OPTIMIZER.NAME=AdamW")
    assert not keys("LOSS._target_=own_package.MyLoss", "MODEL._target_=torch.nn.Linear")
    assert not keys("MODEL.WEIGHTS=w.yaml", "LOSS.CLASS_WEIGHTS=w.yaml", "MODEL.NAME=hf-hub:a/b")
    assert not keys("MODEL._target_=builtins.dict", "LOSS._target_=tests.helpers.forks.ROOT")
    assert not keys("LOSS.CLASS_WEIGHTS=effective")
    assert keys(*data, "DATA.DATASET.VAL=val") == ["DATA.DATASET.VAL"]


def test_names_that_a_module_makes_while_it_runs_are_left_to_the_run(tmp_path):
    (tmp_path / "own_dynamic.py").write_text("def __getattr__(name): ...\n")
    assert not keys("MODEL._target_=own_dynamic.Anything")
    assert keys("MODEL._target_=own_package.Anything") == ["MODEL._target_"]


def test_a_configuration_of_another_machine_can_be_printed():
    assert read(["data=imagefolder", "DATA.DATASET.ROOT=/nowhere", "--print-config"])
