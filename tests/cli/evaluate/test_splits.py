"""The splits of a run afterwards: `split.csv`, the test split's metrics, and the commands that read them."""

import csv
from pathlib import Path

from linnaeus.main import cli
from tests.cli.evaluate.test_evaluate import BIRDS, FOLDERS, content_of, write_images


def rows_of(file):
    with file.open(newline="") as text:
        return list(csv.reader(text))


def command(name, *words):
    """The exit code of a command on the run."""
    return cli([name, "runs/tiny", "--trust-code", *words])


def test_evaluate_and_predict_read_the_split_that_was_trained(tmp_path, monkeypatch):
    """Also after images were added, which a new division would move between the splits."""
    monkeypatch.chdir(tmp_path)
    for seed, split in enumerate(("Training", "Validation", "Testing")):
        write_images(Path("birds", split), FOLDERS, 3 - seed // 2, seed)
    assert cli([*BIRDS, "TRAIN.EPOCHS=2"]) == 0
    folder = Path("runs/tiny")
    test = content_of(folder / "result.json")["test"]
    assert command("evaluate", "DATA.DATASET.ROOT=birds/Testing") == 0
    [file] = folder.glob("evaluations/best_*.json")
    assert content_of(file)["metrics"].items() >= test.items(), "it is the best checkpoint"
    header, *rows = rows_of(folder / "split.csv")
    assert header == ["path", "split", "level1", "level2"]
    assert [row[1] for row in rows] == ["train"] * 12 + ["val"] * 12 + ["test"] * 8
    assert all(Path(row[0]).parts[-3:-1] == tuple(row[2:]) for row in rows)
    write_images(Path("birds/Validation"), FOLDERS[:1], 9, 7)
    assert command("evaluate") == 0
    assert content_of(folder / "evaluations/best.json")["data"]["samples"] == 12
    for split in ("val", "test"):
        output = ["--output", f"{split}.csv", "--device", "cpu"]
        assert command("predict", "--split", split, *output) == 0
        named = [row[0] for row in rows_of(Path(f"{split}.csv"))[1:]]
        assert named == [row[0] for row in rows if row[1] == split]
    saved = (folder / "split.csv").read_text()
    (folder / "split.csv").write_text(saved.replace(",test,", ",val,"))
    assert command("predict", "--split", "test") == 2
    (folder / "split.csv").unlink()
    assert command("predict", "--split", "val") == 2
