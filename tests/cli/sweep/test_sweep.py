"""Whole sweeps through the command line, each run in a process of its own."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from linnaeus.cli.sweep.options import read as read_options
from linnaeus.errors import ConfigError
from linnaeus.files import STUDY
from linnaeus.launchers.jobs import active_jobs, lost_outcome
from linnaeus.launchers.outcome import OUTPUT, last_line
from tests.cli.sweep.gated import GATE, Gated
from tests.helpers.runs import SMALL, Child, Run, wait_until

TINY = (
    "DATA.DATASET._target_=tests.cli.tiny.Points", "MODEL._target_=tests.cli.tiny.Perceptron",
    "MODEL.width=4", "DATA.BATCH_SIZE=16", "TRAIN.EPOCHS=1", "EXPERIMENT.DEVICE=cpu", "EXPERIMENT.NAME=tiny",
)  # fmt: skip
GATED = (*TINY, f"DATA.DATASET._target_={Gated.__module__}.Gated", "DATA.BATCH_SIZE=8", "TRAIN.EPOCHS=3")
SVG = "{http://www.w3.org/2000/svg}"


def read(folder: Path) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = json.loads((folder / "sweep.json").read_text())["runs"]
    return runs


def test_a_sweep_with_a_run_that_fails(run_in_child: Run, run: Run, tmp_path: Path) -> None:
    """The second has a class that only the child can look for."""
    key, model = "MODEL._target_", "tests.cli.tiny.Perceptron"
    argv = ("sweep", *TINY, f"{key}={model},{model}s", "TRAIN.ACCUMULATION_STEPS=2", "--plot", "sweep.svg")
    outcome = run_in_child(*argv)
    assert outcome.code == 1
    folder = tmp_path / "runs/tiny"
    good, bad = read(folder)
    assert good["values"] == {key: model}
    assert (good["status"], good["exit_code"], good["effective_batch"]) == ("finished", 0, 32)
    own_folder = folder / f"{key}={model}"
    own = json.loads((own_folder / "result.json").read_text())
    last = (own_folder / "metrics.jsonl").read_text().splitlines()[-1]
    for name, value in good["metrics"].items():
        assert value == own["metrics"][name] == json.loads(last)[name]
    assert 0 < good["training_s"] <= good["seconds"]
    assert (bad["status"], bad["exit_code"], bad["metrics"]) == ("failed", 2, {})
    assert f"{model}s" in bad["reason"]
    assert bad["reason"] in outcome.out
    assert f"{model}s" in (folder / f"{key}={model}s/logs/output.txt").read_text()
    assert "Traceback" not in outcome.out + outcome.err
    first, second = csv.DictReader((folder / "sweep.csv").read_text().splitlines())
    for row, entry in ((first, good), (second, bad)):
        fields = {**entry["values"], **entry["metrics"]} | {
            name: entry[name] for name in ("status", "exit_code", "effective_batch", "training_s", "reason")
        }
        assert {name: row[name] for name in fields} == {
            name: "" if value is None else str(value) for name, value in fields.items()
        }
    svg = ElementTree.parse(tmp_path / "sweep.svg").getroot()
    texts = {text.text for text in svg.iter(f"{SVG}text")}
    assert {"learning curves", "validation top1/class", "training time"} <= texts

    by_hand = run("compare", "runs", "--output", "again.json")
    assert by_hand.code == 0, by_hand.err
    same, other = json.loads((tmp_path / "again.json").read_text())["runs"]
    assert (other["status"], other["reason"]) == ("failed", bad["reason"])
    assert {**same, "run": None} == {**good, "run": None}


@pytest.mark.e2e
def test_a_run_starts_its_search_where_another_one_ended(run_in_child: Run, tmp_path: Path) -> None:
    argv = (*TINY, "DATA.AUTOBATCH.ENABLED=True", "DATA.AUTOBATCH.MAX_BATCH_SIZE=48", "OPTIMIZER.LR=0.1,0.2")
    for name, start in (("tiny", ()), ("typed", ("DATA.AUTOBATCH.START=5",))):
        outcome = run_in_child("sweep", *argv, f"EXPERIMENT.NAME={name}", *start)
        assert outcome.code == 0, outcome.err
        tried: dict[str, list[list[int]]] = {"train": [], "val": []}
        for rate in ("0.1", "0.2"):
            found = json.loads((tmp_path / f"runs/{name}/OPTIMIZER.LR={rate}/autobatch.json").read_text())
            assert (found["train"]["batch_size"], found["val"]["batch_size"]) == (48, 64)
            for mode, runs in tried.items():
                runs.append([trial["batch_size"] for trial in found[mode]["trials"]])
        assert [sizes[0] for sizes in tried["train"]] == ([5, 5] if start else [16, 48])
        assert (tried["val"][0][0], tried["val"][1]) == (16, [64])


def test_a_whole_search(run_in_child: Run, run: Run, tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    search = ("--search", "optuna", "--jobs", "2", "--trials", "2", "--plot", "sweep.svg")
    outcome = run_in_child("sweep", *TINY, "OPTIMIZER.LR=interval(1e-4,1)", *search)
    assert outcome.code == 0, outcome.out + outcome.err
    folder = tmp_path / "runs/tiny"
    assert (folder / STUDY).exists()
    entries = read(folder)
    assert [entry["status"] for entry in entries] == ["finished"] * 2
    best = max(entry["metrics"]["top1/class"] for entry in entries)
    assert f" {best:.4f}" in outcome.out.splitlines()[-1]
    svg = ElementTree.parse(tmp_path / "sweep.svg").getroot()
    assert "best so far" in {text.text for text in svg.iter(f"{SVG}text")}
    assert run("sweep", "--status", "runs/tiny").out.count("finished") == 2


def validated(folder: Path) -> list[int]:
    """The steps at which a run was validated."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if line["split"] == "val"]


def times_resumed(folder: Path) -> int:
    return (folder / "logs/output.txt").read_text().count("resumed after")


@pytest.mark.e2e
def test_ctrl_c_stops_the_run_and_the_same_command_goes_on(run_in_child: Run, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / GATE)
    folder = tmp_path / "runs/tiny"
    argv = ("sweep", *GATED, "MODEL.width=4,8")
    child = Child(tmp_path, *argv)
    child.wait_for((folder / "MODEL.width=4/checkpoints/last.pt").exists)
    assert child.end(signal.SIGINT) == 130
    first, second = read(folder)
    assert (first["status"], first["exit_code"], second["status"]) == ("interrupted", 130, "not run")

    (tmp_path / GATE).unlink()
    outcome = run_in_child(*argv)
    assert outcome.code == 0, outcome.err
    assert [entry["status"] for entry in read(folder)] == ["finished", "finished"]
    folders = sorted(path.name for path in folder.iterdir() if path.is_dir())
    assert folders == ["MODEL.width=4", "MODEL.width=8"], "nothing was moved aside"
    assert times_resumed(folder / "MODEL.width=4") == 1
    assert validated(folder / "MODEL.width=4") == [8, 16, 24]
    assert (folder / "sweep.png").exists()


@pytest.mark.slow
def test_a_killed_sweep_is_joined(run_in_child: Run, tmp_path: Path) -> None:
    """Of three runs one lives on, one is killed with it, and one has not begun."""
    os.mkfifo(tmp_path / GATE)
    folder = tmp_path / "runs/tiny"
    argv = ("sweep", *GATED, "MODEL.width=4,8,16", "--jobs", "2")
    lives, killed, later = (folder / f"MODEL.width={width}" for width in (4, 8, 16))
    child = Child(tmp_path, *argv)
    for run in (lives, killed):
        child.wait_for((run / "checkpoints/last.pt").exists)
    refused = run_in_child(*argv)
    assert (refused.code, str(child.process.pid) in refused.err) == (2, True)
    assert child.end(signal.SIGKILL) == -signal.SIGKILL
    record = json.loads((killed / "job.json").read_text())
    for name in ("supervisor", "child"):
        os.kill(record[name][0], signal.SIGKILL)
    wait_until(lambda: lost_outcome(killed) is not None and killed not in active_jobs([killed]))

    status = run_in_child("sweep", "--status", "runs/tiny")
    assert status.code == 0, status.err
    shown = [line.split(":")[0] for line in status.out.splitlines() if ": MODEL.width=" in line]
    assert shown == ["running", "interrupted"], status.out
    assert not later.exists()

    with (tmp_path / GATE).open("w") as gate:
        gate.write("go")
        gate.flush()
        wait_until(lambda: lives not in active_jobs([lives]))
    (tmp_path / GATE).unlink()
    outcome = run_in_child(*argv)
    assert outcome.code == 0, outcome.err
    assert [entry["status"] for entry in read(folder)] == ["finished"] * 3
    for run, resumed in ((lives, 0), (killed, 1), (later, 0)):
        assert times_resumed(run) == resumed
        assert validated(run) == [8, 16, 24]
    assert not [path for path in folder.iterdir() if "earlier" in path.name]


@pytest.mark.parametrize(
    ("file", "search", "is_refused"),
    [("config.yaml", False, True), ("sweep.json", True, True), (STUDY, False, True), (STUDY, True, False)],
)
def test_runs_grids_and_searches_have_folders_of_their_own(
    tmp_path: Path, file: str, search: bool, is_refused: bool
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / file).touch()
    argv = ["TRAIN.EPOCHS=1,2", f"EXPERIMENT.OUTPUT_DIR={tmp_path}", "EXPERIMENT.NAME=mine"]
    argv += ["--search", "optuna", "--trials", "2"] if search else []
    if is_refused:
        with pytest.raises(ConfigError, match=r"EXPERIMENT\.NAME: .*/mine"):
            read_options(argv)
    else:
        assert read_options(argv)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == [file]


def test_a_folder_that_cannot_be_written_is_refused(run: Run) -> None:
    outcome = run("sweep", *SMALL, "DATA.BATCH_SIZE=16,8", "EXPERIMENT.OUTPUT_DIR=/proc/nowhere")
    assert outcome.code == 2
    assert "/proc/nowhere" in outcome.err


def test_the_status_of_a_damaged_sweep_or_of_none(run: Run, tmp_path: Path) -> None:
    for text in ("", "{}", '{"runs": [7]}', '{"runs": [{"folder": "x", "values": {"A": 0}}]}'):
        (tmp_path / "sweep.json").write_text(text)
        outcome = run("sweep", "--status", str(tmp_path))
        assert outcome.code == 2
        assert "sweep.json" in outcome.err
    for argv in (["--status"], ["--status", "runs/nope"], ["EXPERIMENT.NAME=s", "--status", "runs/nope"]):
        with pytest.raises(ConfigError, match="--status: ") as caught:
            read_options(argv)
        assert len(caught.value.problems) == 1


def test_a_dry_run_prints_what_would_be_started(run: Run, tmp_path: Path) -> None:
    outcome = run("sweep", *SMALL, "DATA.BATCH_SIZE=16,8", "--dry-run")
    assert outcome.code == 0, outcome.err
    assert len(re.findall(r"-m linnaeus.main --cfg runs/small/DATA.BATCH_SIZE=\d+/", outcome.out)) == 2
    assert not list(tmp_path.iterdir())


def test_a_search_that_sbatch_refuses_leaves_no_folder(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The study of a search would make it the folder of one."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    search = ("--search", "optuna", "--trials", "2")
    argv = (*SMALL, "EXPERIMENT.NAME=new", "DATA.BATCH_SIZE=16,8", "--launcher", "slurm", *search)
    assert "sbatch" in run("sweep", *argv).err
    assert not (tmp_path / "runs/new").exists(), "there is no sbatch"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/sbatch").write_text("#!/bin/sh\necho 'invalid partition specified: nope' >&2; exit 1\n")
    (tmp_path / "bin/sbatch").chmod(0o755)
    outcome = run("sweep", *argv)
    assert outcome.code == 2
    assert "nope" in outcome.err
    assert not (tmp_path / "runs/new").exists()


def test_the_last_line_of_a_run_is_found_however_long_its_output(tmp_path: Path) -> None:
    assert last_line(tmp_path) == "", "nothing has been written"
    output = tmp_path / OUTPUT
    output.parent.mkdir()
    output.write_text("epoch 1\n" * 100_000 + "epoch 2 \n\n")
    assert last_line(tmp_path) == "epoch 2"
    output.write_bytes(b"\xff epoch 3")
    assert last_line(tmp_path) == "\ufffd epoch 3"
