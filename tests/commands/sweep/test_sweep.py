"""Whole sweeps through the command line, each run in a process of its own."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from torch.utils.data import Dataset

from linnaeus.launchers.jobs import active_jobs, lost_outcome
from linnaeus.launchers.outcome import OUTPUT, last_line
from tests.helpers.forks import ROOT
from tests.helpers.runs import SMALL, Child, Run, wait_until

SLEEPY = (
    f"DATA.DATASET._target_={__name__}.Sleepy", "MODEL._target_=tests.test_run.Perceptron",
    "MODEL.width=4,8", "DATA.BATCH_SIZE=8", "TRAIN.EPOCHS=3", "EXPERIMENT.DEVICE=cpu",
    "EXPERIMENT.NAME=sleepy",
)  # fmt: skip
SVG = "{http://www.w3.org/2000/svg}"


class Sleepy(Dataset[tuple[torch.Tensor, int]]):
    """Samples that take so long that there is time to interrupt."""

    classes = ("a", "b")

    def __init__(self, split: str) -> None:
        self.seconds = 0.01 if split == "train" else 0.0

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(self.seconds)
        return torch.tensor([index / 64, 1.0]), index % 2


def read(folder: Path) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = json.loads((folder / "sweep.json").read_text())["runs"]
    return runs


def test_a_sweep_with_a_run_that_fails(run_in_child: Run, tmp_path: Path) -> None:
    """The middle one has a name that only the child can check."""
    argv = ("sweep", *SMALL, "MODEL.NAME=test_resnet,resnet5O", "TRAIN.EPOCHS=1", "--plot", "sweep.svg")
    argv = (*argv, "TRAIN.ACCUMULATION_STEPS=2", "EXPERIMENT.NAME=models")
    outcome = run_in_child(*argv)
    folder = tmp_path / "runs/models"
    assert outcome.code == 1
    good, bad = read(folder)
    assert good["values"] == {"MODEL.NAME": "test_resnet"}
    assert (good["status"], good["exit_code"], good["effective_batch"]) == ("finished", 0, 32)
    own = json.loads((folder / "MODEL.NAME=test_resnet/result.json").read_text())
    last = (folder / "MODEL.NAME=test_resnet/metrics.jsonl").read_text().splitlines()[-1]
    for name, value in good["metrics"].items():
        assert value == own["metrics"][name] == json.loads(last)[name]
    assert 0 < good["training_s"] <= good["seconds"]
    assert good["images_per_s"] == pytest.approx(96 / good["training_s"], rel=0.05)
    assert (bad["status"], bad["exit_code"], bad["metrics"]) == ("failed", 2, {})
    assert "resnet5O" in bad["reason"]
    assert f"failed: MODEL.NAME=resnet5O: {bad['reason']}" in outcome.out
    assert "resnet5O" in (folder / "MODEL.NAME=resnet5O/logs/output.txt").read_text()
    assert "Traceback" not in outcome.out + outcome.err

    check_table(outcome.out, good)
    check_csv(folder / "sweep.csv", [good, bad])
    svg = ElementTree.parse(tmp_path / "sweep.svg").getroot()
    titles = {title.text for title in svg.iter(f"{SVG}title")}
    top1 = good["metrics"]["top1/rank2"]
    assert titles == {
        f"MODEL.NAME=test_resnet: top1/rank2 {top1:.4g}",
        f"MODEL.NAME=test_resnet: training_s {good['training_s']:.4g}",
        f"NAME=test_resnet: epoch 1, top1/rank2 {top1:.4g}",
    }
    labels = {"".join(text.itertext()).strip() for text in svg.iter(f"{SVG}text")}
    assert {"learning curves", "epoch"} <= labels
    assert {"validation top1/rank2", "training time", "effective batch size", "32"} <= labels

    by_hand = run_in_child("compare", "runs", "--output", "again.json")
    assert by_hand.code == 0, by_hand.err
    check_table(by_hand.out, good)
    [other, same] = json.loads((tmp_path / "again.json").read_text())["runs"]
    assert (other["status"], other["reason"]) == ("failed", bad["reason"])
    assert same["run"] == "MODEL.NAME=test_resnet"
    assert {**same, "run": None} == {**good, "run": None}

    before = {path: path.stat().st_mtime_ns for path in (folder / "MODEL.NAME=test_resnet").rglob("*")}
    again = run_in_child(*argv)
    assert again.code == 1
    assert "has ended well before" in again.out
    after = {path: path.stat().st_mtime_ns for path in (folder / "MODEL.NAME=test_resnet").rglob("*")}
    assert after == before
    assert read(folder)[0] == good
    assert (folder / "MODEL.NAME=resnet5O.earlier-1").is_dir(), "what failed is tried again"


def check_table(text: str, good: dict[str, Any]) -> None:
    metrics = good["metrics"]
    top1 = f"{metrics['top1/rank2']:.4f}"
    cells = ("test_resnet", "16", "32", "0.002", "0", top1, f"{top1} @1")
    assert re.search(" +│ +".join(cells) + r" │ .* │ finished │", text)
    assert re.search(r"resnet5O +│ +│ +│ +│ +│ +│ +│ +│ +│ failed +│", text)


def check_csv(path: Path, runs: list[dict[str, Any]]) -> None:
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert len(rows) == len(runs)
    for row, entry in zip(rows, runs, strict=True):
        fields = {**entry["values"], **entry["metrics"]}
        fields |= {
            name: entry[name] for name in ("status", "exit_code", "effective_batch", "training_s", "reason")
        }
        assert {name: row[name] for name in fields} == {
            name: "" if value is None else str(value) for name, value in fields.items()
        }


@pytest.mark.slow
def test_ctrl_c_stops_the_run_and_the_same_command_goes_on(run_in_child: Run, tmp_path: Path) -> None:
    folder = tmp_path / "runs/sleepy"
    child = Child(tmp_path, "sweep", *SLEEPY)
    child.wait_for((folder / "MODEL.width=4/checkpoints/last.pt").exists)
    assert child.end(signal.SIGINT) == 130
    first, second = read(folder)
    assert (first["status"], first["exit_code"], second["status"]) == ("interrupted", 130, "not run")
    assert "interrupted; the same command goes on" in child.log.read_text()
    output = folder / "MODEL.width=4/logs/output.txt"
    assert "stopping after this step and saving a checkpoint" in output.read_text()

    outcome = run_in_child("sweep", *SLEEPY)
    assert outcome.code == 0, outcome.err
    assert output.read_text().count("resumed after") == 1
    runs = read(folder)
    assert [entry["status"] for entry in runs] == ["finished", "finished"]
    for entry in runs:
        assert entry["training_s"] >= 3 * 64 * 0.01, "the part before the interruption counts"
    folders = sorted(path.name for path in folder.iterdir() if path.is_dir())
    assert folders == ["MODEL.width=4", "MODEL.width=8"], "nothing was moved aside"
    assert validated(folder / "MODEL.width=4") == [8, 16, 24]
    image = np.asarray(Image.open(folder / "sweep.png").convert("RGBA"))
    assert image.shape[0] > 300


def validated(folder: Path) -> list[int]:
    """The steps at which a run was validated."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if line["split"] == "val"]


@pytest.mark.slow
def test_a_killed_sweep_is_joined(run_in_child: Run, tmp_path: Path) -> None:
    """Of three runs one lives on, one is killed with it, and one has not begun."""
    folder = tmp_path / "runs/sleepy"
    argv = ("sweep", *SLEEPY, "MODEL.width=4,8,16", "TRAIN.EPOCHS=24", "--jobs", "2")
    lives, killed, later = (folder / f"MODEL.width={width}" for width in (4, 8, 16))
    child = Child(tmp_path, *argv)
    for run in (lives, killed):
        child.wait_for((run / "checkpoints/last.pt").exists)
    refused = run_in_child(*argv)
    assert refused.code == 2
    assert f"another sweep is at work here (process {child.process.pid} on " in refused.err
    assert child.end(signal.SIGKILL) == -signal.SIGKILL
    record = json.loads((killed / "job.json").read_text())
    for name in ("supervisor", "child"):
        os.kill(record[name][0], signal.SIGKILL)
    wait_until(lambda: "killed" in str(lost_outcome(killed)) and killed not in active_jobs([killed]))

    status = run_in_child("sweep", "--status", "runs/sleepy")
    assert status.code == 0, status.err
    shown = [line.split(":")[0] for line in status.out.splitlines() if ": MODEL.width=" in line]
    assert shown == ["running", "interrupted"], status.out
    assert not later.exists()

    outcome = run_in_child(*argv)
    assert outcome.code == 0, outcome.err
    assert "run 1 of 3, MODEL.width=4: goes on, process" in outcome.out
    assert [entry["status"] for entry in read(folder)] == ["finished"] * 3
    for run, resumed in ((lives, 0), (killed, 1), (later, 0)):
        assert (run / "logs/output.txt").read_text().count("resumed after") == resumed
        assert validated(run) == [8 * epoch for epoch in range(1, 25)]
    assert not [path for path in folder.iterdir() if "earlier" in path.name]


def test_nothing_runs_when_one_combination_is_wrong(run: Run, tmp_path: Path) -> None:
    outcome = run("sweep", *SMALL, "DATA.BATCH_SIZE=16,0", "OPTIMIZER.LR=nan,1")
    assert outcome.code == 2
    assert "DATA.BATCH_SIZE" in outcome.err
    assert "OPTIMIZER.LR" in outcome.err
    assert list(tmp_path.iterdir()) == []


def test_a_picture_that_cannot_be_written_is_refused_first(run: Run, tmp_path: Path) -> None:
    outcome = run("sweep", *SMALL, "DATA.BATCH_SIZE=16,8", "--plot", "missing/a.png")
    assert outcome.code == 2
    assert "--plot: missing/a.png cannot be written" in outcome.err
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_a_run_is_no_place_for_a_sweep(run: Run, tmp_path: Path) -> None:
    argv = ("sweep", "TRAIN.EPOCHS=1,2", f"EXPERIMENT.OUTPUT_DIR={tmp_path}", "EXPERIMENT.NAME=mine")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.yaml").write_text("")
    outcome = run(*argv)
    assert outcome.code == 2
    assert f"EXPERIMENT.NAME: {tmp_path / 'mine'} is the folder of a run" in outcome.err
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["config.yaml"]


def test_a_folder_that_cannot_be_written_is_refused(run: Run) -> None:
    outcome = run("sweep", *SMALL, "DATA.BATCH_SIZE=16,8", "EXPERIMENT.OUTPUT_DIR=/proc/nowhere")
    assert outcome.code == 2
    assert "/proc/nowhere" in outcome.err


@pytest.mark.parametrize(
    "text",
    [
        "", "{}", '{"runs": 3}', '{"runs": [{"folder": "x"}]}', '{"runs": [7]}',
        '{"runs": [{"folder": "x", "values": {"A": 0}}]}',
    ],
)  # fmt: skip
def test_the_status_of_a_damaged_sweep(run: Run, tmp_path: Path, text: str) -> None:
    (tmp_path / "sweep.json").write_text(text)
    outcome = run("sweep", "--status", str(tmp_path))
    assert outcome.code == 2
    assert "holds no runs; give the command of the sweep instead" in outcome.err


def test_the_status_of_nothing(run: Run) -> None:
    outcome = run("sweep", "--status")
    assert outcome.code == 2
    assert "--status: give the folder of a sweep, such as runs/my_exp" in outcome.err
    assert "there is no folder runs/nope" in run("sweep", "--status", "runs/nope").err
    outcome = run("sweep", "EXPERIMENT.NAME=s", "--status", "runs/nope")
    assert outcome.err.count("--status: is followed by the folder of a sweep alone") == 1
    assert "nothing to sweep" not in outcome.err


@pytest.mark.slow
def test_a_dry_run_predicts_too(run: Run, tmp_path: Path) -> None:
    outcome = run("sweep", *SMALL, "DATA.BATCH_SIZE=16,8", "--dry-run", "--predict-gpu", "a100-40gb")
    assert outcome.code == 0, outcome.err
    assert "Predicted batch sizes" in outcome.out
    assert outcome.out.count("-m linnaeus.main --cfg runs/") == 2
    assert "# 1 run at once: " in outcome.out
    assert not list(tmp_path.iterdir())


def test_a_refused_sweep_leaves_no_folder(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    outcome = run("sweep", *SMALL, "EXPERIMENT.NAME=new", "DATA.BATCH_SIZE=16,8", "--launcher", "slurm")
    assert outcome.code == 2
    assert "there is no sbatch here" in outcome.err
    assert not (tmp_path / "runs/new").exists()


@pytest.mark.parametrize("is_search", [False, True])
def test_a_sweep_that_sbatch_refuses_leaves_no_folder(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_search: bool
) -> None:
    """The study of a search would make it the folder of one."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/sbatch").write_text("#!/bin/sh\necho 'invalid partition specified: nope' >&2; exit 1\n")
    (tmp_path / "bin/sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin:/usr/bin")
    search = ("--search", "optuna", "--trials", "2") if is_search else ()
    argv = (*SMALL, "EXPERIMENT.NAME=new", "DATA.BATCH_SIZE=16,8", "--launcher", "slurm", *search)
    outcome = run("sweep", *argv)
    assert "invalid partition" in outcome.err
    assert not (tmp_path / "runs/new").exists()


@pytest.mark.parametrize(("name", "kind"), [("sweep.json", "grid"), ("study.journal", "search")])
def test_a_grid_and_a_search_have_different_folders(run: Run, tmp_path: Path, name: str, kind: str) -> None:
    (tmp_path / "runs/new").mkdir(parents=True)
    (tmp_path / "runs/new" / name).touch()
    search = ("--search", "optuna", "--trials", "2")
    argv = ("sweep", *SMALL, "EXPERIMENT.NAME=new", "DATA.BATCH_SIZE=16,8", "--dry-run")
    refused, control = ((), search) if kind == "search" else (search, ())
    outcome = run(*argv, *refused)
    assert outcome.code == 2
    assert f"runs/new is the folder of a {kind}; give this sweep another name" in outcome.err
    assert run(*argv, *control).code == 0


def test_print_config_prints_every_configuration(run: Run, tmp_path: Path) -> None:
    outcome = run("sweep", *SMALL, "DATA.BATCH_SIZE=16,8", "--print-config")
    assert outcome.code == 0
    sizes = [config["DATA"]["BATCH_SIZE"] for config in yaml.safe_load_all(outcome.out)]
    assert sizes == [16, 8]
    assert list(tmp_path.iterdir()) == []


def test_a_process_of_torchrun_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    outcome = run("sweep", "DATA.BATCH_SIZE=16,8")
    assert outcome.code == 2
    assert "run it without torchrun: python -m linnaeus.main sweep DATA.BATCH_SIZE=16,8" in outcome.err


def test_help_names_every_option(run: Run) -> None:
    outcome = run("sweep", "--help")
    assert outcome.code == 0
    for text in ("--metric", "--plot", "examples:", "range("):
        assert text in outcome.out


WITHOUT_TORCH = """
import sys
from linnaeus.main import cli
codes = [cli(["sweep", *argv]) for argv in (["--help"], ["--plot", "x"], ["DATA.BATCHSIZE=1,2"])]
print(codes, {"torch", "matplotlib"} & set(sys.modules))
"""


def test_help_and_mistakes_do_not_wait_for_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.splitlines()[-1] == "[0, 2, 2] set()"


def test_the_last_line_of_a_run_is_found_however_long_its_output(tmp_path: Path) -> None:
    assert last_line(tmp_path) == "", "nothing has been written"
    output = tmp_path / OUTPUT
    output.parent.mkdir()
    output.write_text("epoch 1\n" * 100_000 + "epoch 2 \n\n")
    assert last_line(tmp_path) == "epoch 2"
    output.write_bytes(b"\xff epoch 3")
    assert last_line(tmp_path) == "\ufffd epoch 3"
