"""Files in a folder of runs that no run has written, or that are damaged, end no listing of runs."""

import json
import os
from pathlib import Path

from linnaeus.runtime.run_folder import CLAIMS
from tests.helpers.run_files import write_run

FILES = ("run.json", "result.json", "metrics.jsonl", "config.yaml")
DAMAGED = (
    lambda path: path.write_bytes(b"\xff\x00\xfe\n"),
    lambda path: path.write_text("[" * 100_000 + "\n"),
    lambda path: path.write_text('["val"]\n'),
    lambda path: path.write_text("null\n"),
    lambda path: path.mkdir(),
    lambda path: path.symlink_to(path.name),
    lambda path: os.mkfifo(path),
    lambda path: [path.touch(), os.truncate(path, 1 << 40)],
)
"""Make what is no file of a run; each is told."""
HUGE = "9" * 400
FOREIGN = {
    "run.json": (
        '{"ended": 3}',
        '{"ended": {"exit_code": "x", "reason": [1]}, "seconds": "long"}',
        '{"ended": {"exit_code": null}, "pid": [], "host": {}}',
        f'{{"ended": {{"exit_code": {HUGE}}}, "seconds": {HUGE}}}',
    ),
    "result.json": (
        '{"metrics": [1], "headline": ["a"]}',
        f'{{"metrics": {{"a": "good", "b": [1], "c": {HUGE}}}, "headline": "zzz"}}',
        '{"metrics": {"a": NaN}, "training_s": "x", "batch_size": {}, "images_per_s": null}',
        f'{{"metrics": null, "effective_batch": {HUGE}, "learning_rate": Infinity}}',
    ),
    "metrics.jsonl": (
        '{"split": "val", "epoch": []}',
        '{"split": "val", "epoch": "2", "loss": 1}',
        f'{{"split": "val", "epoch": {HUGE}, "loss": 1}}',
        f'{{"split": "val", "epoch": 3, "loss": [], "x": "y", "z": {HUGE}, "u": true}}',
        '{"split": ["val"], "epoch": 3}',
        '{"split": "val", "epoch": -1, "loss": Infinity}',
    ),
    "config.yaml": (
        "{PLAN: [3], TRAIN: 3}",
        "PLAN: {MICRO_BATCH: many, LEARNING_RATE: [1]}",
        f"{{DATA: {{BATCH_SIZE: {HUGE}}}, OPTIMIZER: {{LR: null}}}}",
        "{DATA: {BATCH_SIZE: a, BATCH_SIZE_VAL: a}, TRAIN: {EPOCHS: [[1], {}]}}",
        "? [a]\n: 1",
        "a: [{1: x, b: y}]",
        "a: &a {b: *a}",
        "a: 2024-13-45",
        "\t",
    ),
    f"{CLAIMS}/1": ("[]", '{"host": 3, "pid": "x"}', '{"token": {}}'),
}
"""Texts that others have written; what is of the right type may count."""


def write_finished(folder):
    write_run(folder, "OPTIMIZER.LR=0.1")
    (folder / "run.json").write_text("{}")
    return folder


def test_damaged_files_are_named_and_the_others_compared(run, tmp_path):
    damaged = {}
    for file in FILES:
        for number, damage in enumerate(DAMAGED):
            name = f"{file[:3]}{number}"
            path = write_finished(tmp_path / "runs" / name) / file
            path.unlink()
            damage(path)
            damaged[name] = file
    for file, texts in FOREIGN.items():
        for number, text in enumerate(texts):
            path = write_finished(tmp_path / f"runs/foreign-{file[:3]}{number}") / file
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"{text}\n")
    (write_finished(tmp_path / "runs/foreign-claims") / CLAIMS).symlink_to(CLAIMS)
    write_finished(tmp_path / "runs/whole")
    for more in (
        ["--sort", "metric", "--output", "a.csv"],
        ["--output", "a.json", "--plot", "a.svg"],
    ):
        outcome = run("compare", "runs", *more)
        assert (outcome.code, outcome.err) == (0, "")
    notes = [line for line in outcome.out.splitlines() if line.startswith("note: ")]
    for name, file in damaged.items():
        assert [note for note in notes if note.startswith(f"note: {name}: ") and file in note], name
    assert not [note for note in notes if note.startswith("note: whole")]
    rows = {row["run"]: row for row in json.loads(Path("a.json").read_text())["runs"]}
    assert (rows["whole"]["status"], rows["whole"]["top1/kind"]) == ("finished", 0.5)
