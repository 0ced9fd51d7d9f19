"""What is offered at the cursor of a command line, and the answer to a shell."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from linnaeus.cli.completion import candidates
from linnaeus.cli.main import COMMANDS
from linnaeus.config.keys import KEYS, available, dotted
from tests.helpers.forks import ROOT


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("an", ["analyze"]),
        ("mod", ["model="]),
        ("DATA.AUTOBATCH.STRA", ["DATA.AUTOBATCH.STRATEGY="]),
        ("train TRAIN.AMP=", ["TRAIN.AMP=off", "TRAIN.AMP=bf16", "TRAIN.AMP=fp16"]),
        ("TRAIN.AMP b", ["bf16"]),
        (
            "EXPERIMENT.WANDB.ENABLED=",
            [f"EXPERIMENT.WANDB.ENABLED={value}" for value in (True, False)],
        ),
        ("MODEL._", ["MODEL._target_="]),
        ("~DATA.BATCH_SIZE_", ["~DATA.BATCH_SIZE_VAL"]),
        ("++DATA.BATCH_SIZE_", ["++DATA.BATCH_SIZE_VAL="]),
        ("--cf", ["--cfg"]),
        ("--cfg my", ["my_experiment.yaml"]),
        ("--cfg a.yaml --cfg=my", ["--cfg=my_experiment.yaml"]),
        ("DATA.DATASET.ROOT=my", ["DATA.DATASET.ROOT=my_experiment.yaml"]),
        ("analyze --frac", ["--fractions"]),
        ("train --launcher s", ["slurm"]),
        ("analyze --strategy g", ["guided"]),
        ("analyze --modes=train,v", ["--modes=train,val"]),
        ("analyze --gpu t4,rtx-50", ["t4,rtx-5090"]),
        ("predict runs/a --checkpoint l", ["last"]),
        ("export runs/a --format=on", ["--format=onnx"]),
        ("sweep TRAIN.AMP=off,b", ["TRAIN.AMP=off,bf16"]),
        ("evaluate my", ["my_experiment.yaml"]),
        ("evaluate runs/a TRAIN.AM", ["TRAIN.AMP="]),
        ("compare TRAIN.AM", []),
        ("analyze an", []),
    ],
)
def test_what_may_follow(
    line: str, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_experiment.yaml").touch()
    monkeypatch.chdir(tmp_path)
    *words, word = line.split(" ")
    assert list(candidates(words, word)) == expected


def test_every_command_key_and_preset_is_offered(tmp_path: Path) -> None:
    found = candidates([], "")
    assert {
        *COMMANDS,
        *(f"{dotted(path)}=" for path in KEYS),
        *(f"{group}=" for group in available()),
    } <= {*found}
    assert all(found.values()), "each has a text"
    for group, names in available().items():
        assert list(candidates([], f"{group}=")) == [f"{group}={name}" for name in names]
    (tmp_path / "model").mkdir()
    (tmp_path / "model/mine.yaml").touch()
    for words in ([f"--config-dir={tmp_path}"], ["-cd", str(tmp_path)]):
        assert [*candidates(words, "model=mi")] == ["model=mine"]
    assert candidates([], "model=mi") == {}


def test_the_program_answers_the_shell(tmp_path: Path) -> None:
    """In bash, whose line of `register-python-argcomplete` asks for what replaces the text after `=`."""
    line = "linnaeus --cfg a.yaml DATA.AUTOBATCH.STRATEGY=b"
    asked = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "answer"),
        "_ARGCOMPLETE_IFS": "\n",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "_ARGCOMPLETE_COMP_WORDBREAKS": "\"'><=;|&(:",
    }
    code = "from linnaeus.main import console; raise SystemExit(console())"
    env = {**os.environ, **asked, "PYTHONPATH": str(ROOT)}
    assert (
        subprocess.run([sys.executable, "-c", code], env=env, cwd=tmp_path, check=False).returncode
        == 0
    )
    assert (tmp_path / "answer").read_text().split("\n") == ["binary", "binsearch"]
    without = f"import sys; sys.modules['argcomplete'] = None; {code}"
    assert (
        subprocess.run(
            [sys.executable, "-c", without], env=env, cwd=tmp_path, check=False
        ).returncode
        == 1
    )
