"""Runs of all kinds through the command line, from the files that they leave."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import psutil
import pytest
from rich.console import Console

from linnaeus.commands.compare.output import EXPENDABLE, print_runs
from linnaeus.commands.compare.plot import save_plot
from linnaeus.commands.compare.results import Comparison, Row, compared
from linnaeus.commands.compare.runs import read_runs
from linnaeus.commands.compare.series import groups_by
from linnaeus.config.load import load_config, to_yaml
from linnaeus.files import FolderLock, process_start
from linnaeus.launchers.interface import Job, JobKind
from linnaeus.launchers.outcome import Outcome, read_outcome
from linnaeus.launchers.record import open_locked
from tests.commands.compare.test_results import result, write_validations
from tests.helpers.forks import ROOT
from tests.helpers.runs import Run, wait_until

SVG = "{http://www.w3.org/2000/svg}"
PLAN = {"MICRO_BATCH": 8, "EFFECTIVE_BATCH": 16, "LEARNING_RATE": 0.5, "ACCUMULATION_STEPS": 2}


def write_run(
    folder: Path, *argv: str, values: tuple[float | None, ...] = (0.25, 0.75, 0.5), finished: bool = True,
    checkpoint: bool = True, **more: Any,
) -> Path:  # fmt: skip
    """The files of a run as training writes them."""
    write_validations(folder, [*values])
    (folder / "config.yaml").write_text(to_yaml(load_config(argv).config, PLAN))
    if checkpoint:
        (folder / "checkpoints").mkdir()
        (folder / "checkpoints" / "last.pt").touch()
    if finished:
        content = result(8, values[-1] or 0.0, effective_batch=16, learning_rate=0.5, **more)
        (folder / "result.json").write_text(json.dumps(content))
    return folder


def lines_with(text: str, *words: str) -> list[str]:
    return [line for line in text.splitlines() if all(word in line for word in words)]


def test_runs_started_by_hand_side_by_side(run: Run, tmp_path: Path) -> None:
    write_run(tmp_path / "runs/slow", "OPTIMIZER.LR=0.1")
    write_run(tmp_path / "runs/fast", "OPTIMIZER.LR=0.2", "EXPERIMENT.SEED=1", values=(0.5, 0.875))
    outcome = run("compare", "runs", "--output", "a.json", "--plot", "a.svg", "--sort", "metric")
    assert (outcome.code, outcome.err) == (0, "")
    [heading] = lines_with(outcome.out, "LR", "SEED")
    assert "AMP" not in heading
    first, second = lines_with(outcome.out, "finished")
    assert [cell.strip() for cell in first.split("│")[1:-1]] == [
        "fast", "1", "0.2", "8", "16", "0.5", "0.8750", "0.8750 @2", "12.5", "7", "finished",
    ]  # fmt: skip
    assert "slow" in second
    assert "0.5000 │ 0.7500 @2" in second

    content = json.loads((tmp_path / "a.json").read_text())
    assert content["differences"] == ["EXPERIMENT.SEED", "OPTIMIZER.LR"]
    assert content["metric"] == "top1/kind"
    entry = content["runs"][1]
    assert entry["values"] == {"EXPERIMENT.SEED": "0", "OPTIMIZER.LR": "0.1"}
    assert entry["best"]["top1/kind"] == {"value": 0.75, "epoch": 2}
    assert entry["curve"] == [[1, 0.25], [2, 0.75], [3, 0.5]]
    assert (entry["run"], entry["status"], entry["epoch"]) == ("slow", "finished", 3)

    root = ElementTree.parse(tmp_path / "a.svg").getroot()
    titles = {title.text for title in root.iter(f"{SVG}title")}
    assert {"LR=0.1: epoch 2, top1/kind 0.75", "fast: top1/kind 0.875", "slow: training_s 12.5"} <= titles


def test_the_csv_file_holds_the_best_and_the_last_value_of_every_metric(run: Run, tmp_path: Path) -> None:
    write_run(tmp_path / "one")
    assert run("compare", "one", "--output", "a.csv").code == 0
    [row] = csv.DictReader((tmp_path / "a.csv").read_text().splitlines())
    wanted = ("run", "top1/kind", "best top1/kind", "best top1/kind epoch", "loss")
    assert [row[name] for name in wanted] == ["one", "0.5", "0.75", "2", "0.5"]


def test_runs_are_found_below_folders_by_patterns_and_once(run: Run, tmp_path: Path) -> None:
    for name in ("runs/lr/LR=10", "runs/lr/LR=2", "runs/other", "runs/lr/LR=2.earlier-1"):
        write_run(tmp_path / name)
    (tmp_path / "runs/conf").mkdir()
    (tmp_path / "runs/conf/config.yaml").write_text("TRAIN.EPOCHS: 3")  # somebody's, not a run's

    def named(*argv: str) -> list[str]:
        outcome = run("compare", *argv, "--output", "a.json")
        assert outcome.code == 0, outcome.err
        return [entry["run"] for entry in json.loads((tmp_path / "a.json").read_text())["runs"]]

    assert named("runs") == ["lr/LR=2", "lr/LR=10", "other"]
    assert named("runs/other", "runs/*", "runs/lr/LR=2") == ["other", "lr/LR=2", "lr/LR=10"]
    assert named("runs/lr/LR=2.earlier-1", "runs/lr") == ["LR=2.earlier-1", "LR=2", "LR=10"]
    assert named("runs/other") == ["other"]


def test_what_cannot_be_used_is_named_at_once(run: Run, tmp_path: Path) -> None:
    write_run(tmp_path / "runs/one")
    (tmp_path / "empty").mkdir()
    argv = ["runs/onee", "x*", "empty", "runs/one/config.yaml", "--metrik", "a", "-v", "--plot", "a.gif"]
    outcome = run("compare", *argv)
    assert outcome.code == 2
    for text in (
        "runs/onee: no such folder; did you mean runs/one?", "x*: no folder of this pattern holds a run",
        "empty: holds no run", "runs/one/config.yaml: is a file; name the folder of the run, runs/one",
        "--metrik: no such option; did you mean --metric?", "-v: no such option", "--plot: 'a.gif'",
    ):  # fmt: skip
        assert text in outcome.err
    assert "there is nothing to compare" in run("compare").err
    assert (
        "--metric: no run has 'top1/knid'; did you mean top1/kind?; there are"
        in run("compare", "runs", "--metric", "top1/knid").err
    )
    assert "--sort: 'lr' is neither" in run("compare", "runs", "--sort", "lr").err
    assert "cannot be written" in run("compare", "runs", "--output", "missing/a.json").err


def test_what_is_not_known_of_a_run_is_said(run: Run, tmp_path: Path) -> None:
    write_run(tmp_path / "good", "OPTIMIZER.LR=0.1")
    write_run(tmp_path / "other", "OPTIMIZER.LR=0.2")
    write_run(tmp_path / "broken", "OPTIMIZER.LR=0.3")
    (tmp_path / "broken/config.yaml").write_text("A: [1")
    write_run(tmp_path / "missing")
    (tmp_path / "missing/config.yaml").unlink()
    metrics = tmp_path / "broken/metrics.jsonl"
    metrics.write_text(metrics.read_text() + '[1]\n{"split": "val", "epoch": 9, "top1\n')
    outcome = run("compare", "good", "other", "broken", "missing", "--plot", "a.html")
    assert outcome.code == 0
    assert "note: broken: config.yaml cannot be read: while parsing" in outcome.out
    assert "note: missing: there is no config.yaml; what differs is not known of it" in outcome.out
    assert "finished" in lines_with(outcome.out, "missing │")[0]
    assert lines_with(outcome.out, "LR", "BATCH_SIZE") == [], "nothing is told apart by what is unknown"


@pytest.mark.parametrize(
    ("argv", "is_noted"),
    [(("DATA.DATASET.NAME=synthetic",), True), (("DATA.DATASET.NUM_SAMPLES=9",), False), ((), False)],
)
def test_metrics_of_different_data_are_not_compared_silently(
    run: Run, tmp_path: Path, argv: tuple[str, ...], is_noted: bool
) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", *argv)
    text = "the runs have different data (DATA.DATASET.NAME): a metric of one cannot be compared"
    assert (text in run("compare", "a", "b").out) == is_noted


def test_different_losses_and_missing_metrics_are_noted(run: Run, tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", "LOSS.LABEL_SMOOTHING=0.1")
    write_run(tmp_path / "c", finished=False)
    write_validations(tmp_path / "c", [0.5], metric="top1/species")
    outcome = run("compare", "a", "b", "c")
    assert "top1/kind: not measured by c; --metric compares another one of" in outcome.out
    assert "different losses" not in outcome.out
    assert "different losses (LOSS.LABEL_SMOOTHING)" in run("compare", "a", "b", "--metric", "loss").out


def test_a_narrow_terminal_does_without_columns_but_not_without_the_metric(tmp_path: Path) -> None:
    for name, rate in (("one-with-a-long-name", "0.1"), ("another-with-a-long-name", "0.2")):
        write_run(tmp_path / name, f"OPTIMIZER.LR={rate}", "EXPERIMENT.SEED=1", warmup_steps=3)
    read = compared(read_runs(sorted(tmp_path.iterdir())), ["one-with-a-long-name", "other"])

    def shown(width: int) -> str:
        console = Console(file=io.StringIO(), width=width)
        print_runs(read, console)
        return console.file.getvalue()  # type: ignore[attr-defined]

    assert all(heading in shown(200) for heading in EXPENDABLE)
    narrow = shown(60)
    assert "…" not in narrow
    assert narrow.count("0.5000 │ 0.7500 @2 │") == 2
    assert narrow.count("finished") == 2
    assert "warm-up" not in narrow


def table_of(rows: list[Row], width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_runs(Comparison(rows), console)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [70, *range(76, 90), 200])
def test_no_value_is_cut_to_keep_a_column_of_figures(tmp_path: Path, width: int) -> None:
    plan = result(64, 0.5, effective_batch=64, learning_rate=0.00443, warmup_steps=20)
    rows = [
        Row({"OPTIMIZER.LR": "0.00443038", "MODEL.NAME": name}, tmp_path, Outcome(0, 9.0, None, plan))
        for name in ("test_resnet", "test_vit")
    ]
    text = table_of(rows, width)
    assert lines_with(text, "│ 0.00443038 │ test_resnet │", "finished")
    assert "training s" in text or width < 200


def test_the_keys_with_the_most_values_have_the_columns(tmp_path: Path) -> None:
    """One run by hand beside a sweep differs from it in many keys, of which each has two values."""
    odd = {f"MODEL.KEY_WITH_A_LONG_NAME_{number}": "x" for number in range(12)}
    rows = [
        Row(
            dict.fromkeys(odd, "y" if number else "x") | {"OPTIMIZER.LR": f"0.{number}1"},
            tmp_path,
            name=f"run{number}",
        )
        for number in range(4)
    ]
    for width, num_others in ((80, 11), (400, 5)):
        text = table_of(rows, width)
        assert f"{num_others} more keys differ" in " ".join(text.split())
        assert all(lines_with(text, f"│ run{number} ", f" 0.{number}1 ") for number in range(4))


def test_labels_of_runs_that_differ_in_many_keys_are_their_names(tmp_path: Path) -> None:
    few, many = {"A.B": "1"}, {f"MODEL.KEY{number}": "a long value" for number in range(9)}
    labels = [
        group.label
        for values in (few, many)
        for name in ("short", "long" * 30)
        for group in groups_by([Row(values, tmp_path, name=name)], frozenset())
    ]
    assert labels == ["B=1", "B=1", "short", f"…{('long' * 30)[-47:]}"]


@pytest.mark.filterwarnings("error")
def test_a_picture_of_runs_that_differ_in_many_keys_has_room_for_its_panels(tmp_path: Path) -> None:
    rows = []
    for number in range(4):
        write_validations(tmp_path / str(number), [0.25, 0.5])
        odd = {
            f"MODEL.KEY_{key}": "a long value" if number else f"another long value {key}" for key in range(12)
        }
        outcome = Outcome(0, 9.0, None, result(8))
        values = {**odd, "OPTIMIZER.LR": str(number)}
        rows.append(Row(values, tmp_path / str(number), outcome, name=f"rates/LR={number}"))
    save_plot(Comparison(rows), tmp_path / "a.svg")
    labels = (tmp_path / "a.svg").read_text()
    assert "4 of 4 runs finished over 13 keys" in labels
    assert "rates/LR=1 and 2 more" in labels, "runs of one line against the rate"


def test_a_reason_of_many_lines_is_one_line_below_the_table(tmp_path: Path) -> None:
    jobs: dict[JobKind, str] = {"unknown": "squeue: error: no\n  answer\n", "pending": "Resources"}
    rows = [
        Row({}, tmp_path, job=Job(kind, "SLURM job 1", reason), name=kind) for kind, reason in jobs.items()
    ]
    console = Console(file=io.StringIO(), width=200)
    print_runs(Comparison(rows), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "unknown: unknown: SLURM job 1: squeue: error: no answer\n" in text
    assert lines_with(text, "│ unknown ", "│ unknown │")
    assert lines_with(text, "│ pending ", "pending (Resources)")


def test_a_picture_that_cannot_be_written_is_an_error_in_words(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    write_run(tmp_path / "one")
    monkeypatch.setattr("linnaeus.commands.picture.write_atomically", full)
    outcome = run("compare", "one", "--plot", "a.png")
    assert (outcome.code, "a.png cannot be written: the disk is full" in outcome.err) == (1, True)
    assert "finished" in outcome.out, "the table comes first"


def test_a_damaged_file_of_the_sweep_leaves_its_part_unknown(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one", finished=False)
    for runs in (3, None, ["x"], [{"status": "pruned"}], [{"status": "pruned", "folder": 3}]):
        (tmp_path / "sweep.json").write_text(json.dumps({"runs": runs}))
        assert status_of(folder) == "interrupted"


@pytest.mark.parametrize(
    "damage",
    [
        {"metrics": 3}, {"metrics": [1]}, {"metrics": {"loss": "x", "top1/kind": [1]}}, {"headline": None},
        {"training_s": "abc", "images_per_s": [1]}, {"effective_batch": 8.5, "learning_rate": {"a": 1}},
    ],
)  # fmt: skip
def test_a_damaged_result_leaves_its_part_unknown(run: Run, tmp_path: Path, damage: dict[str, Any]) -> None:
    sound = write_run(tmp_path / "runs/sound")
    other = write_run(tmp_path / "runs/other")
    content = json.loads((sound / "result.json").read_text()) | damage
    (sound / "result.json").write_text(json.dumps(content))
    (other / "result.json").unlink()
    (other / "outcome.json").write_text(json.dumps({"exit_code": 0, "seconds": 1, "result": content}))
    outcome = run("compare", "runs", "--output", "a.json", "--plot", "a.svg")
    assert (outcome.code, outcome.out.count("finished")) == (0, 2)
    rows = json.loads(Path("a.json").read_text())["runs"]
    known = result(8, 0.5, effective_batch=16, learning_rate=0.5)
    for name in {"training_s", "images_per_s", "effective_batch", "learning_rate"} - damage.keys():
        assert [each[name] for each in rows] == [known[name]] * 2, "the rest is shown"


def status_of(folder: Path) -> str:
    [run] = read_runs([folder])
    return Row.of(run, {}).status


def test_how_far_a_run_has_come(tmp_path: Path) -> None:
    assert status_of(write_run(tmp_path / "done")) == "finished"
    stopped = write_run(tmp_path / "stopped", finished=False)
    assert status_of(stopped) == "interrupted"
    assert status_of(write_run(tmp_path / "dead", finished=False, checkpoint=False)) == "failed"
    lock = FolderLock(stopped)
    assert status_of(stopped) == "running"
    lock.release()
    assert status_of(stopped) == "interrupted"
    here, ended = socket.gethostname(), subprocess.Popen(["true"])
    wait_until(lambda: psutil.Process(ended.pid).status() == psutil.STATUS_ZOMBIE)
    (stopped / ".lock").write_text(f"process {ended.pid} on {here}")
    assert status_of(stopped) == "interrupted", "it has ended, and nobody has asked how"
    ended.wait()
    for holder, expected in (
        (f"process {os.getpid()} on {here}", "running"),
        (f"process {ended.pid} on {here}", "interrupted"),
        (f"process {os.getpid()} on elsewhere", "running?"),
        ("", "interrupted"),
    ):
        (stopped / ".lock").write_text(holder)
        assert status_of(stopped) == expected
    start = int(process_start(os.getpid()))
    for ticks, expected in ((start, "running"), (start - 1, "interrupted")):
        (stopped / ".lock").write_text(f"process {os.getpid()} on {here}\n{ticks}\n")
        os.utime(stopped / ".lock", (0, 0))  # the clock of a file server
        assert status_of(stopped) == expected, "another process has the number now"


def test_how_a_run_of_a_sweep_ended(run: Run, tmp_path: Path) -> None:
    outcomes = {"signal": (130, None), "failed": (1, "no such model"), "gone on": (130, None), "odd": None}
    for name, outcome in outcomes.items():
        folder = write_run(tmp_path / name, finished=name == "gone on")
        content = {"exit_code": outcome[0], "seconds": 1.0, "reason": outcome[1]} if outcome else {"a": 1}
        (folder / "outcome.json").write_text(json.dumps(content))
    os.utime(tmp_path / "gone on/outcome.json", (0, 0))  # the result is of somebody who went on by hand
    begun = tmp_path / "begun"
    begun.mkdir()
    (begun / "asked.yaml").write_text(to_yaml(load_config(["OPTIMIZER.LR=0.5"]).config))
    out = run("compare", *outcomes, "begun").out
    for name, status in (
        ("signal", "interrupted"), ("failed", "failed"), ("gone on", "finished"), ("odd", "interrupted"),
        ("begun", "not run"),
    ):  # fmt: skip
        assert status in lines_with(out, f"│ {name} ")[0]
    assert "failed: failed: no such model" in out
    descriptor = open_locked(begun, {"launcher": "local", "host": socket.gethostname(), "slot": 0})
    assert status_of(begun) == "running", "whoever runs it holds the lock"
    os.close(descriptor)
    assert status_of(begun) == "interrupted"
    shutil.copytree(begun, tmp_path / "other")
    (tmp_path / "sweep.json").write_text(json.dumps({"runs": [{"folder": "begun", "status": "pruned"}]}))
    assert [status_of(begun), status_of(tmp_path / "other")] == ["pruned", "interrupted"]


def test_compare_and_the_sweep_agree_on_which_runs_have_finished(tmp_path: Path) -> None:
    """The process of a run may be killed after it has written its result."""
    folder = write_run(tmp_path / "run")
    (folder / "outcome.json").write_text(json.dumps({"exit_code": -9, "seconds": 1.0}))
    for result_at in (10, 30):
        os.utime(folder / "result.json", (result_at, result_at))
        os.utime(folder / "outcome.json", (20, 20))
        outcome = read_outcome(folder)
        assert outcome is not None
        assert (status_of(folder) == "finished") == outcome.finished
    assert outcome.finished, "somebody has gone on with it"


def test_a_lock_that_a_killed_process_of_another_machine_left_is_no_run(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", finished=False)
    (folder / ".lock").write_text("process 1 on elsewhere")
    assert status_of(folder) == "running?"
    (folder / "outcome.json").write_text(json.dumps({"exit_code": -9, "seconds": 1.0}))
    os.utime(folder / ".lock", (0, 0))
    assert status_of(folder) == "interrupted"
    os.utime(folder / "outcome.json", (0, 0))
    os.utime(folder / ".lock", (9, 9))
    assert status_of(folder) == "running?", "somebody goes on with it"


def test_the_status_of_a_sweep_is_the_comparison_of_its_runs(run: Run, tmp_path: Path) -> None:
    folders = {rate: tmp_path / f"runs/rates/OPTIMIZER.LR={rate}" for rate in ("0.1", "0.2", "0.3", "0.4")}
    for rate, folder in folders.items():
        write_run(folder, f"OPTIMIZER.LR={rate}", finished=rate == "0.1")
    stopped = {"exit_code": 130, "seconds": 1.0, "reason": "stopped by SIGINT"}
    (folders["0.2"] / "outcome.json").write_text(json.dumps(stopped))
    (folders["0.3"] / "outcome.json").write_text(json.dumps(stopped))
    entries = [
        {"values": {"OPTIMIZER.LR": rate}, "folder": f"elsewhere/{folder.name}", "status": "pruned"}
        for rate, folder in folders.items()
    ]
    del entries[1]["status"]
    (tmp_path / "runs/rates/sweep.json").write_text(json.dumps({"runs": entries}))
    record = {"launcher": "local", "host": "node7", "slot": 0, "supervisor": [12, 0.0]}
    descriptor = open_locked(folders["0.4"], record)
    status, compared = run("sweep", "--status", "runs/rates"), run("compare", "runs/rates")
    os.close(descriptor)
    assert (status.code, status.err, status.out) == (0, "", compared.out)
    for rate, text in zip(folders, ("finished", "interrupted", "pruned", "running"), strict=True):
        assert text in lines_with(status.out, f"│ {rate} ")[0]
    assert "interrupted: OPTIMIZER.LR=0.2: stopped by SIGINT" in status.out
    assert "running: OPTIMIZER.LR=0.4: process 12 on node7" in status.out


def test_a_sweep_whose_figures_are_damaged_has_no_status(run: Run, tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text("{")
    outcome = run("sweep", "--status", ".")
    assert outcome.code == 2
    assert "--status: sweep.json holds no runs; give the command of the sweep instead" in outcome.err


@pytest.mark.slow
def test_hundreds_of_runs_and_a_long_one(run: Run, tmp_path: Path) -> None:
    template = write_run(tmp_path / "runs/run0", "OPTIMIZER.LR=0.5")
    text = (template / "config.yaml").read_text()
    for number in range(1, 200):
        folder = tmp_path / f"runs/run{number}"
        write_validations(folder, [number / 200])
        (folder / "config.yaml").write_text(text.replace("LR: 0.5", f"LR: 0.{number + 100}"))
    with (template / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "epoch": 1, "split": "train", "time": 1.0, "loss": 1.0}\n' * 100_000)
    outcome = run("compare", "runs", "--sort", "metric", "--plot", "a.svg")
    assert outcome.code == 0
    rows = lines_with(outcome.out, "│ run")
    assert len(rows) == 200
    assert rows[0].startswith("│ run199")
    labels = {
        "".join(text.itertext()).strip() for text in ElementTree.parse("a.svg").getroot().iter(f"{SVG}text")
    }
    assert "the best 10; 190 more in grey" in labels


WITHOUT_TORCH = """
import sys
from linnaeus.main import cli
codes = [cli(["compare", *argv]) for argv in (["--help"], ["one"], ["one", "--plot", "x"])]
print(codes, {"torch", "matplotlib", "timm", "sklearn"} & set(sys.modules))
"""


def test_a_comparison_does_not_wait_for_torch(tmp_path: Path) -> None:
    write_run(tmp_path / "one")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "[0, 0, 2] set()"
