"""What the commands say: mistakes of their command lines, and their reports."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from linnaeus.autobatch.predict.gpus import find_gpu
from linnaeus.cli import export, predict, train
from linnaeus.cli.compare import options as compare
from linnaeus.cli.compare.runs import Row as RunRow
from linnaeus.cli.compare.runs import compared, read_runs
from linnaeus.cli.compare.session import print_runs, sort_rows
from linnaeus.cli.evaluate import options as evaluate
from linnaeus.cli.evaluate.report import compare_with_logged, logged_sentence
from linnaeus.cli.sweep import options as sweep
from linnaeus.cli.sweep.folder import lock_folder
from linnaeus.cli.sweep.predict import check_predictions
from linnaeus.launchers.interface import Job
from linnaeus.launchers.record import write_slurm_record
from tests.helpers.consoles import plain_console
from tests.helpers.messages import Golden, error_of
from tests.helpers.predictions import GROWING
from tests.helpers.run_files import write_run, write_validations
from tests.helpers.sweeps import Queue, Sweep

LINES: dict[str, tuple[Any, list[str]]] = {
    "the run of evaluate": (evaluate, ["DATA.BATCH_SIZE_VAL=3"]),
    "a checkpoint of a checkpoint": (evaluate, ["runs/one/checkpoints/last.pt", "--checkpoint=best"]),
    "a run that is not there": (evaluate, ["runs/tin"]),
    "keys of evaluate": (evaluate, [
        "runs/one", "TRAIN.EPOCHS=3", "DATA.BATCH_SIZE=3", "data=imagefolder", "--cfg=a.yaml",
        "--unknown=drop", "--plot=a.pdf",
    ]),
    "words of predict": (predict, [
        "runs/othr", "photo", "https://example.org/a.jpg", "x*.jpg", "-", "-", "--pat", "-x.png",
        "--top=0", "--workers=x", "--output=a.txt",
    ]),
    "a run among the images": (predict, ["runs", "runs/one"]),
    "predict alone": (predict, []),
    "predict without images": (predict, ["runs/one"]),
    "words of export": (export, ["run/other", "--format=onyx", "--outputs=p", "--images", "x.jpg", "-"]),
    "export without a format": (export, ["runs/one", "runs/other"]),
    "names of compare": (compare, [
        "runs/onee", "x*", "folder.png", "runs/one/config.yaml", "--metrik", "--plot=a.gif",
        "--output=a.xlsx",
    ]),
    "compare alone": (compare, []),
    "values of options of sweep": (sweep, [
        "--plot=a.pdf", "--trials=0", "--search=grid", "--predict-gpu=rtx-409",
    ]),
    "a grid without values": (sweep, ["DATA.BATCH_SIZE=32"]),
    "values of a grid": (sweep, [
        "DATA.BATCH_SIZE=32,64,", "EXPERIMENT.NAME=a,b", "OPTIMIZER.LR=interval(0,1)", "--trials=3",
        "--no-prune",
    ]),
    "a wrong combination of two": (sweep, ["DATA.BATCH_SIZE=0,8", "TRAIN.AMP=off,bf16"]),
    "a search without trials": (sweep, ["--search=optuna", "OPTIMIZER.LR=1,2"]),
    "a search without axes": (sweep, ["--search=optuna", "--trials=3", "TRAIN.EPOCHS=2"]),
    "intervals": (sweep, [
        "--search=optuna", "--trials=3", "OPTIMIZER.LR=interval(2,1)", "LOSS.LABEL_SMOOTHING=interval(1e-4)",
        "OPTIMIZER.WEIGHT_DECAY=tag(log,interval(0,1))", "DATA.BATCH_SIZE=interval(8.2,8.8)",
        "MODEL.NAME=interval(1,2)",
    ]),
    "the folder of a run for a sweep": (sweep, ["EXPERIMENT.NAME=one", "EXPERIMENT.SEED=1,2"]),
    "the folder of a grid for a search": (sweep, [
        "EXPERIMENT.NAME=grid", "EXPERIMENT.SEED=1,2", "--search=optuna", "--trials=2",
    ]),
    "a status without a folder": (sweep, ["--status"]),
    "the status of a folder that is not there": (sweep, ["--status", "runs/nope"]),
    "the status of a folder of no sweep": (sweep, ["--status", "runs/one"]),
    "keys beside the folder of a status": (sweep, ["EXPERIMENT.NAME=s", "--status", "runs/nope"]),
    "completion": (train, ["--install-completion", "bash"]),
    "a URL": (train, ["--cfg", "https://example.org/a.yaml"]),
    "a dry run here": (train, ["--dry-run"]),
}  # fmt: skip


def test_messages(
    golden: Golden, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    Path("folder.png").mkdir()
    write_run(Path("runs/one"), "OPTIMIZER.LR=0.1")
    write_run(Path("runs/other"), "OPTIMIZER.LR=0.2", "DATA.DATASET.NAME=synthetic", finished=False)
    Path("runs/grid").mkdir()
    Path("runs/grid/sweep.json").touch()
    said = {title: error_of(module.read, argv) for title, (module, argv) in LINES.items()}
    said |= evaluations()
    said |= of_runs()
    said |= of_sweeps(caplog)
    golden("cli", said, folder=tmp_path)


def evaluations() -> dict[str, str]:
    """Of figures beside those that were logged."""
    metrics = {"loss": 1.5, "top1/a": 0.5}
    same = compare_with_logged(metrics, metrics, [])
    other_settings = ["TRAIN.AMP off (bf16 in the run)"]
    other = compare_with_logged({"loss": 1.5, "consistent": 1.0}, metrics, other_settings)
    changed = compare_with_logged({"loss": 1.25, "top1/a": 0.5}, metrics, [])
    sentences = [logged_sentence(each, metrics) for each in (same, other, changed)]
    return {"figures beside those of training": "\n".join(sentences)}


def of_runs() -> dict[str, str]:
    """Of runs side by side."""
    write_run(Path("runs/failed"), finished=False, checkpoint=False)
    write_run(Path("runs/third"), finished=False)
    write_validations(Path("runs/third"), [0.5], metric="top1/species")
    Path("runs/third/config.yaml").unlink()
    names = ["one", "other", "failed", "third"]
    found = compared(read_runs([Path("runs", name) for name in names]), names)
    found.rows.append(
        RunRow(found.rows[0].values, Path("none"), job=Job("pending", "SLURM job 1", "Resources"))
    )
    console, output = plain_console()
    print_runs(found, console)
    return {
        "runs side by side": output.getvalue(),
        "a metric that no run has": str(compared(found.rows, [*names, "x"], "top1/knid").unknown_metric),
        "what runs cannot be sorted by": error_of(sort_rows, found, "lr"),
    }


def of_sweeps(caplog: pytest.LogCaptureFixture) -> dict[str, str]:
    """Of a sweep that joins runs, and of one for which nothing fits."""
    lock = lock_folder(Path("runs/s"))
    said = {"a folder of another sweep": error_of(lock_folder, Path("runs/s"))}
    said["a folder of another sweep"] = said["a folder of another sweep"].partition("(")[0]
    lock.release()
    argv = [*GROWING, "DATA.BATCH_SIZE=100000,8", "DATA.DATASET.length=200000"]
    runs = sweep.read([*argv, "EXPERIMENT.NAME=new"])[1]
    said["nothing fits"] = error_of(check_predictions, runs, [find_gpu("t4")], plain_console()[0])
    watched = Sweep(Queue(), seeds="0,1")
    watched.start_before(0)
    write_slurm_record(watched.folders[0], "7")
    with caplog.at_level(logging.INFO, "linnaeus.sweep"):
        caplog.clear()
        watched.watch.join()
    said["a run that may go on"] = "\n".join(record.getMessage() for record in caplog.records)
    return said
