"""Files in a folder of runs that no run has written, or that are damaged, end no listing of runs."""

import json
import os
from pathlib import Path

import pytest

from linnaeus.runtime.run_folder import CLAIMS
from tests.helpers.run_files import planned_sweep, write_run

FILES = ("run.json", "result.json", "metrics.jsonl", "config.yaml")
DAMAGED = {
    "binary": lambda path: path.write_bytes(b"\xff\x00\xfe\n"),
    "deep": lambda path: path.write_text("[" * 100_000 + "\n"),
    "a folder": lambda path: path.mkdir(),
    "a loop": lambda path: path.symlink_to(path.name),
    "a pipe": lambda path: os.mkfifo(path),
    "a list": lambda path: path.write_text('["val"]\n'),
    "a number": lambda path: path.write_text('7 # "val"\n'),
    "null": lambda path: path.write_text("null\n"),
    "huge": lambda path: [path.touch(), os.truncate(path, 1 << 40)][0],
}
"""What is no file of a run, by a name; each is told."""
HUGE = 10**400
FOREIGN = {
    "run.json": [
        {"ended": 3},
        {"ended": {"exit_code": "x", "reason": [1]}, "seconds": "long"},
        {"ended": {"exit_code": None}, "pid": [], "host": {}},
        {"ended": {"exit_code": HUGE}, "seconds": HUGE},
    ],
    "result.json": [
        {"metrics": [1], "headline": ["a"]},
        {"metrics": {"a": "good", "b": [1], "c": HUGE}, "headline": "zzz"},
        {"metrics": {"a": float("nan")}, "training_s": "x", "batch_size": {}, "images_per_s": None},
        {"metrics": None, "effective_batch": HUGE, "learning_rate": float("inf")},
    ],
    "metrics.jsonl": [
        {"loss": 1, "part": "val"},
        {"split": "val", "epoch": []},
        {"split": "val", "epoch": "2", "loss": 1},
        {"split": "val", "epoch": HUGE, "loss": 1},
        {"split": "val", "epoch": 3, "loss": [], "x": "y", "z": HUGE, "u": True},
        {"split": ["val"], "epoch": 3},
        {"split": "val", "epoch": -1, "loss": float("inf")},
    ],
    "config.yaml": [
        {"PLAN": [3], "TRAIN": 3},
        {"PLAN": {"MICRO_BATCH": "many", "LEARNING_RATE": [1]}},
        {"DATA": {"BATCH_SIZE": HUGE}, "OPTIMIZER": {"LR": None}},
        {"DATA": {"BATCH_SIZE": "a", "BATCH_SIZE_VAL": "a"}, "TRAIN": {"EPOCHS": [[1], {}]}},
    ],
}
"""Objects that others have written; what is of the right type may count."""
YAML = ("? [a]\n: 1", "a: [{1: x, b: y}]", "a: &a {b: *a}", "a: 2024-13-45", "\t")


def write_finished(folder):
    write_run(folder, "OPTIMIZER.LR=0.1")
    (folder / "run.json").write_text("{}")
    return folder


def write_damaged(root):
    """The name of each run that has a damaged file, and the file."""
    found = {}
    for file in FILES:
        for number, damage in enumerate(DAMAGED.values()):
            run = write_finished(root / f"{file[:3]}{number}")
            (run / file).unlink()
            damage(run / file)
            found[run.name] = file
    return found


def write_foreign(root):
    for file, contents in FOREIGN.items():
        for number, content in enumerate(contents):
            run = write_finished(root / f"foreign-{file[:3]}{number}")
            (run / file).write_text(json.dumps(content) + "\n")
    for number, text in enumerate(YAML):
        (write_finished(root / f"foreign-yaml{number}") / "config.yaml").write_text(text)
    for number, content in enumerate(([], {"host": 3, "pid": "x"}, {"token": {}})):
        run = write_finished(root / f"foreign-claim{number}")
        (run / CLAIMS).mkdir()
        (run / CLAIMS / "1").write_text(json.dumps(content))
    (write_finished(root / "foreign-claims") / CLAIMS).symlink_to(CLAIMS)


def test_damaged_files_are_named_and_the_others_compared(run, tmp_path):
    damaged = write_damaged(tmp_path / "runs")
    write_finished(tmp_path / "runs/whole")
    outcome = run("compare", "runs", "--output", "a.json", "--plot", "a.svg")
    assert (outcome.code, outcome.err) == (0, "")
    notes = [line for line in outcome.out.splitlines() if line.startswith("note: ")]
    for name, file in damaged.items():
        assert [note for note in notes if note.startswith(f"note: {name}: ") and file in note], name
    assert not [note for note in notes if note.startswith("note: whole")]
    [whole] = [
        row for row in json.loads(Path("a.json").read_text())["runs"] if row["run"] == "whole"
    ]
    assert (whole["status"], whole["top1/kind"]) == ("finished", 0.5)


def test_what_others_have_written_ends_no_comparison(run, tmp_path):
    write_foreign(tmp_path / "runs")
    write_finished(tmp_path / "runs/whole")
    for more in ([], ["--sort", "metric", "--output", "a.csv"], ["--plot", "a.svg"]):
        outcome = run("compare", "runs", *more)
        assert (outcome.code, outcome.err) == (0, "")
    assert "whole" in Path("a.csv").read_text()


@pytest.mark.parametrize(
    "change",
    [
        {"argv": 3},
        {"runs": [3]},
        {"runs": [{"name": 1, "values": {}, "config": ""}]},
        {"runs": [{"name": "../x", "values": {}, "config": ""}]},
        {"runs": [{"name": "x", "values": ["a"], "config": ""}]},
        {"metric": 3},
        {"trials": "many"},
        {},
    ],
)
def test_a_foreign_sweep_is_a_mistake(run, tmp_path, change):
    planned_sweep("EXPERIMENT.NAME=s", "EXPERIMENT.SEED=1,2")
    file = tmp_path / "runs/s/sweep.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    assert run("sweep", "--status", "runs/s").code == (2 if change else 0)
