"""Runs in processes of their own: killed, interrupted, resumed, and several at once under torchrun."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.helpers import forks
from tests.helpers.forks import ROOT
from tests.helpers.runs import SMALL, Child, Run, assert_same_bits, weights

RESUMABLE = (
    *SMALL,
    "TRAIN.EPOCHS=12",
    "DATA.DATASET.NUM_SAMPLES=120",
    "TRAIN.AUTO_RESUME=True",
    "TRAIN.EMA.ENABLED=True",
    "MODEL.DROP_RATE=0.2",
    "DATA.NUM_WORKERS=1",
    "DATA.AUTOBATCH.ENABLED=True",
    "DATA.AUTOBATCH.MAX_BATCH_SIZE=16",
)


@pytest.fixture(scope="module", params=["fork", pytest.param("new interpreter", marks=pytest.mark.slow)])
def never_killed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("never_killed")
    # The same number of threads as the runs it is compared with: sums depend on it.
    env = {"OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", "PYTHONPATH": str(ROOT)}
    command = ["-m", "linnaeus.train", *RESUMABLE]
    if request.param == "fork":
        outcome = forks.python(*command, cwd=folder, env=env)
        assert outcome.code == 0, outcome.err
    else:
        env = {**os.environ, **env}
        subprocess.run([sys.executable, *command], cwd=folder, env=env, check=True, capture_output=True)
    return folder / "runs/small"


def size_of(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def lines_of(run: Path) -> list[tuple[int, str]]:
    """What the metrics are about."""
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(record["step"], record["split"]) for record in records]


@pytest.mark.slow
def test_killed_at_any_moment_and_resumed(never_killed: Path, tmp_path: Path) -> None:
    moments = random.Random(time.time_ns())
    run = tmp_path / "runs/small"
    for _ in range(3):
        child = Child(tmp_path, *RESUMABLE)
        before = size_of(run / "metrics.jsonl")
        child.wait_for(lambda size=before: size_of(run / "metrics.jsonl") > size)
        time.sleep(moments.random() * 0.5)
        assert child.end(signal.SIGKILL) in (-signal.SIGKILL, 0)
    child = Child(tmp_path, *RESUMABLE)
    assert child.process.wait(timeout=240) == 0, child.log.read_text()
    assert_same_bits(weights(run), weights(never_killed))
    assert lines_of(run) == lines_of(never_killed)
    assert "batch sizes are kept" in child.log.read_text()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_a_hundred_times_and_resumed(tmp_path: Path) -> None:
    """While it starts, trains, validates and writes checkpoints, within epochs too."""
    options = (
        *(option for option in SMALL if not option.startswith("MODEL.")),
        "MODEL._target_=tests.helpers.odd_ranks.Perceptron",
        "DATA.DATASET._target_=tests.helpers.odd_ranks.Dataset",
        "DATA.IMG_SIZE=8", "TRAIN.EPOCHS=1500", "TRAIN.AUTO_RESUME=True", "TRAIN.CHECKPOINT_EVERY_STEPS=4",
        "TRAIN.EMA.ENABLED=True",
    )  # fmt: skip
    options = tuple(option for option in options if not option.startswith("DATA.DATASET.N"))
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    assert forks.python("-m", "linnaeus.train", *options, cwd=whole, env=env).code == 0
    moments, run, num_kills = random.Random(time.time_ns()), killed / "runs/small", 0
    while num_kills < 100:
        child = Child(killed, *options)
        before = size_of(run / "metrics.jsonl")
        if moments.random() < 0.5:
            child.wait_for(lambda size=before: size_of(run / "metrics.jsonl") > size)
            time.sleep(moments.random() * 0.1)
        else:
            time.sleep(moments.random() * 0.8)
        code = child.end(signal.SIGKILL)
        assert code == -signal.SIGKILL, f"ended after {num_kills} kills: {child.log.read_text()[-2000:]}"
        num_kills += 1
    child = Child(killed, *options)
    assert child.process.wait(timeout=240) == 0, child.log.read_text()
    assert_same_bits(weights(run), weights(whole / "runs/small"))
    assert lines_of(run) == lines_of(whole / "runs/small")


def test_interrupted_and_resumed(never_killed: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs/small"
    child = Child(tmp_path, *RESUMABLE)
    child.wait_for((run / "checkpoints/last.pt").exists)
    assert child.end(signal.SIGINT) == 130, child.log.read_text()
    progress = torch.load(run / "checkpoints/last.pt", weights_only=True)["progress"]
    assert 0 < progress["epoch"] < 12
    assert "Traceback" not in child.log.read_text()
    child = Child(tmp_path, *RESUMABLE)
    assert child.process.wait(timeout=240) == 0, child.log.read_text()
    assert_same_bits(weights(run), weights(never_killed))


def test_truncated_checkpoint_is_reported_and_the_one_before_used(run: Run, tmp_path: Path) -> None:
    assert run(*RESUMABLE, "TRAIN.EPOCHS=3").code == 0
    last = tmp_path / "runs/small/checkpoints/last.pt"
    last.write_bytes(last.read_bytes()[: last.stat().st_size // 2])
    outcome = run(*RESUMABLE, "TRAIN.EPOCHS=3")
    assert outcome.code == 0, outcome.err
    assert "last.pt is damaged" in outcome.out
    assert "epoch 3/3" in outcome.out


def test_resuming_a_finished_run_changes_nothing(run: Run, tmp_path: Path) -> None:
    assert run(*SMALL, "TRAIN.AUTO_RESUME=True").code == 0
    before = weights(tmp_path / "runs/small")
    assert run(*SMALL, "TRAIN.AUTO_RESUME=True").code == 0
    assert_same_bits(weights(tmp_path / "runs/small"), before)


def test_resuming_another_model_is_refused(run: Run) -> None:
    assert run(*SMALL, "TRAIN.AUTO_RESUME=True").code == 0
    outcome = run(*SMALL, "TRAIN.AUTO_RESUME=True", "MODEL.NAME=test_vit")
    assert outcome.code == 1
    assert "checkpoint" in outcome.err
    assert "EXPERIMENT.NAME" in outcome.err
    assert "Traceback" not in outcome.err


@pytest.mark.distributed
@pytest.mark.parametrize(
    "new_interpreters", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["forks", "new interpreters"]
)
def test_two_processes(torchrun: Run, tmp_path: Path, new_interpreters: bool) -> None:
    options = ("DATA.AUTOBATCH.ENABLED=True", "DATA.AUTOBATCH.MAX_BATCH_SIZE=8")
    outcome = torchrun(2, *SMALL, *options, new_interpreters=new_interpreters)
    assert outcome.code == 0, outcome.err
    run = tmp_path / "runs/small"
    found = json.loads((run / "autobatch.json").read_text())
    assert (found["train"]["batch_size"], found["val"]["batch_size"]) == (8, 16)
    assert found["val"]["limited_by"] in ("dataset", "max_batch_size")
    assert (run / "logs/rank1.log").is_file()
    assert "rank 1" not in outcome.out
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps[-1] == 2 * (96 // 2 // 8)


@pytest.mark.distributed
def test_one_process_and_two_validate_alike(torchrun: Run, run: Run, tmp_path: Path) -> None:
    """31 samples do not divide by two: none may be counted twice, none left out."""
    options = (*SMALL, "TRAIN.AUTO_RESUME=True", "OPTIMIZER._target_=torch.optim.SGD", "OPTIMIZER.lr=0.0")
    assert run(*options, "TRAIN.EPOCHS=1", "DATA.BATCH_SIZE_VAL=31").code == 0
    outcome = torchrun(2, *options, "TRAIN.EPOCHS=2", "DATA.BATCH_SIZE_VAL=5")
    assert outcome.code == 0, outcome.err
    lines = map(json.loads, (tmp_path / "runs/small/metrics.jsonl").read_text().splitlines())
    one, two = [line for line in lines if line["split"] == "val"]
    # BatchNorm's running statistics moved in between; the number of samples behind a share did not.
    for record in (one, two):
        assert abs(record["consistent"] * 31 - round(record["consistent"] * 31)) < 1e-4


@pytest.mark.distributed
def test_sync_batchnorm_needs_an_accelerator(torchrun: Run) -> None:
    outcome = torchrun(2, *SMALL, "TRAIN.SYNC_BATCHNORM=True")
    assert outcome.code != 0
    assert "TRAIN.SYNC_BATCHNORM" in outcome.err


@pytest.mark.distributed
def test_an_error_ends_all_processes_with_its_code_and_no_noise(torchrun: Run) -> None:
    outcome = torchrun(2, *SMALL, "MODEL.NAME=resnet5O")
    assert outcome.code != 0
    assert "'resnet5O' is not a timm model" in outcome.err
    outcome = torchrun(2, *SMALL, "DATA.BATCHSIZE=3")
    assert len(re.findall("did you mean DATA.BATCH_SIZE", outcome.err)) == 1
