"""Files, folders, classes and names of timm that are not there, found with all other mistakes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from linnaeus.cli.train import read
from linnaeus.runtime.errors import ConfigError
from tests.helpers.children import ROOT

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
HINTS = {"ROOT": "moths", "MODEL.NAME": "resnet18", "LOSS": "own_package.MyLoss"}
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


def keys(line):
    try:
        read(line.split())
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
    wrong = "EXPERIMENT.DEVICE=cudo MODEL.NAME=resnet1o8"
    assert keys(wrong) == ["MODEL.NAME", "EXPERIMENT.DEVICE"]
    assert keys(f"{wrong} --launcher=slurm") == ["MODEL.NAME"]


DATA = "data=imagefolder DATA.DATASET.ROOT=moths DATA.DATASET.TRAIN=train"


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        (f"{DATA} MODEL.NAME=resnet50.a1_in1k OPTIMIZER.NAME=AdamW", []),
        (f"{DATA} DATA.DATASET.VAL=val", ["DATA.DATASET.VAL"]),
        ("LOSS._target_=own_package.MyLoss MODEL._target_=builtins.dict", []),
        ("MODEL._target_=own_package.Anything", ["MODEL._target_"]),
        ("MODEL._target_=own_dynamic.Anything", []),  # a name that the module makes while it runs
        ("MODEL.WEIGHTS=w.yaml LOSS.CLASS_WEIGHTS=w.yaml MODEL.NAME=hf-hub:a/b", []),
        ("LOSS.CLASS_WEIGHTS=effective", []),
    ],
)
def test_what_is_there_is_no_mistake(line, wrong):
    Path("moths/train").mkdir()
    Path("w.yaml").touch()
    Path("own_dynamic.py").write_text("def __getattr__(name): ...\n")
    assert keys(line) == wrong


def test_a_configuration_of_another_machine_can_be_printed():
    assert read(["data=imagefolder", "DATA.DATASET.ROOT=/nowhere", "--print-config"])
