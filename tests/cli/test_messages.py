"""What the commands say: mistakes of their command lines, and their reports."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest

from linnaeus.autobatch.predict.gpus import GIB, find_gpu
from linnaeus.autobatch.predict.prediction import MARGIN
from linnaeus.autobatch.result import Mode, Timing
from linnaeus.cli import export, predict, train
from linnaeus.cli.analyze import options as analyze
from linnaeus.cli.analyze.breakdown import Breakdown
from linnaeus.cli.analyze.output import show
from linnaeus.cli.analyze.predict import target_of
from linnaeus.cli.analyze.results import Analysis, Predicted, Remedy, Row
from linnaeus.cli.compare import options as compare
from linnaeus.cli.compare.runs import Row as RunRow
from linnaeus.cli.compare.runs import compared, read_runs
from linnaeus.cli.compare.session import print_runs, sort_rows
from linnaeus.cli.environment import device_sentence
from linnaeus.cli.evaluate import options as evaluate
from linnaeus.cli.evaluate.report import compare_with_logged, logged_sentence
from linnaeus.cli.measure import Speeds
from linnaeus.cli.plan import options as plan
from linnaeus.cli.plan.output import notes, results_table
from linnaeus.cli.plan.results import Goal, Plan
from linnaeus.cli.plan.results import Row as PlanRow
from linnaeus.cli.sweep import options as sweep
from linnaeus.cli.sweep.folder import lock_folder
from linnaeus.cli.sweep.predict import check_predictions
from linnaeus.launchers.interface import Job
from linnaeus.launchers.record import write_slurm_record
from tests.helpers.consoles import plain_console
from tests.helpers.messages import Golden, error_of
from tests.helpers.predictions import GROWING, POINTS, WIDE, predicted, row_of
from tests.helpers.run_files import write_run, write_validations
from tests.helpers.sweeps import Queue, Sweep

MIB = 1024**2
LINES: dict[str, tuple[Any, list[str]]] = {
    "values of options of analyze": (analyze, [
        "--fractions=0,nan", "--fractions=1.5", "--fractions=0.5,nan", "--fractions=half", "--modes=tset",
        "--output=a", "--plot=a.pdf", "--steps=0",
        "--strategy=guide", "--memory-limit-gb=inf", "--memory-limit-gb=-1", "--max-bs=1.5",
        "--gpu=b20,rtx409,t4,a100", "--device-memory-gb=8,24GB,9e9", "--throughput=1", "--max-bs",
        "--foo", "DATA.BATCHSIZE=3",
    ]),
    "options that need --predict": (analyze, ["--gpu=t4", "--device-memory-gb=24", "--world-size=2"]),
    "options that do not go with --predict": (analyze, [
        "--predict", "--throughput", "--steps=3", "--strategy=guided",
    ]),
    "files that cannot be written": (analyze, ["--output", "missing/a.csv", "--plot", "folder.png"]),
    "values of options of plan": (plan, [
        "--sizes=8,0", "--noise-scale=-1", "--time-budget=2", "--world-size=1.5",
    ]),
    "the run of evaluate": (evaluate, ["DATA.BATCH_SIZE_VAL=3"]),
    "a run that is not there": (evaluate, ["runs/tin"]),
    "keys of evaluate": (evaluate, [
        "runs/one", "TRAIN.EPOCHS=3", "DATA.BATCH_SIZE=3", "data=imagefolder", "--cfg=a.yaml",
        "--unknown=drop", "--plot=a.pdf",
    ]),
    "words of predict": (predict, [
        "runs/othr", "photo", "https://example.org/a.jpg", "x*.jpg", "-", "-", "--pat", "-x.png",
        "--top=0", "--workers=x", "--output=a.txt",
    ]),
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
SETTINGS = {
    "model": "vit", "parameters": 5000, "frozen_parameters": 0, "image_size": [32, 48], "num_classes": [2, 6],
    "precision": "bf16 autocast over float32", "optimizer": "AdamW", "gradient_checkpointing": True,
    "accumulation_steps": 4, "ema": True, "memory_limit_gb": 8.0,
}  # fmt: skip


def shown(analysis: Analysis) -> str:
    console, output = plain_console()
    show(analysis, console)
    return output.getvalue()


def measured() -> Analysis:
    """Two fractions of each mode, of which one does not fit."""
    speeds = Speeds({size: Timing(size, 1.0, rate) for size, rate in ((64, 96.0), (121, 100.0), (61, 97.0))})
    speeds.covers_knee = True
    of_mode: dict[Mode, Speeds] = {"train": speeds, "val": Speeds()}
    rows = []
    for mode in of_mode:
        parts = Breakdown(parameters=MIB, activations=3 * MIB, rest=MIB)
        row = Row(mode, 0.9, 121, True, "memory", peak_bytes=5 * MIB, budget_bytes=6 * MIB, breakdown=parts)
        row.samples_per_s = 100.0
        row.remedies = [
            Remedy("bf16", {"TRAIN.AMP": "bf16"}, 121, 5 * MIB, 3 * MIB, 150.0),
            Remedy("accumulation", {"TRAIN.ACCUMULATION_STEPS": 2}, 60, 5 * MIB, reason="no memory"),
        ]  # fmt: skip
        rows += [row, Row(mode, 0.5, reason=f"AutoBatch ({mode}): no batch size fits")]
    return Analysis(rows=rows, speeds=of_mode)


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
    said |= reports(monkeypatch)
    said |= of_runs()
    said |= of_sweeps(caplog)
    golden("cli", said, folder=tmp_path)


def reports(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Of sizes, measured and predicted, and of plans and evaluations."""
    said = {"an analysis": shown(measured())}
    environment = {
        "device": "cuda",
        "device_name": "H100",
        "total_bytes": 80 * GIB,
        "torch": "2.9.0",
        **SETTINGS,
    }
    said["the line above an analysis"] = device_sentence(environment)
    _, config = analyze.read(["--predict", "--gpu", "t4", *WIDE])  # type: ignore[misc]
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    said["a prediction without a device"] = error_of(target_of, analyze.Options(), config)
    peeking = ("MODEL._target_=tests.cli.tiny.Peeking", *POINTS)
    untraceable = error_of(predicted, "train", *peeking)
    said["a step that cannot be traced"] = re.sub(r"line \d+", "line N", untraceable)
    said["no size on a device"] = str(row_of("train", *WIDE, gib=1, fraction=0.5).reason)
    said["no size within a limit"] = str(row_of("train", *WIDE, fraction=0.5, limit_gb=0.01).reason)
    said["no size with the margin"] = "\n".join(row_of("val", *WIDE, gib=0.7).notes)
    parts = Breakdown(parameters=MIB, rest=600 * MIB)
    row = Row("train", 0.9, 64, limited_by="memory", peak_bytes=601 * MIB, budget_bytes=GIB, breakdown=parts)
    row.predicted = Predicted("24 GiB", 24 * GIB, MARGIN, 50, 500 * MIB, memory_limit_gb=2.0)
    said["a predicted analysis"] = shown(Analysis(rows=[row], speeds={"train": Speeds()}))

    console, output = plain_console()
    for budget_s in (60, 59):
        goal = Goal(
            num_samples=1000, epochs=60, noise_scale=500 if budget_s == 60 else None, time_budget_s=budget_s
        )
        rows = [PlanRow(goal, size, 1, rate, 0.1) for size, rate in ((8, 500.0), (16, 970.0), (32, 1000.0))]
        found = Plan(goal, rows=rows)
        console.print(results_table(found), *notes(found), sep="\n")
    said["plans"] = output.getvalue()

    metrics = {"loss": 1.5, "top1/a": 0.5}
    same = compare_with_logged(metrics, metrics, [])
    other_settings = ["TRAIN.AMP off (bf16 in the run)"]
    other = compare_with_logged({"loss": 1.5, "consistent": 1.0}, metrics, other_settings)
    changed = compare_with_logged({"loss": 1.25, "top1/a": 0.5}, metrics, [])
    said["figures beside those of training"] = "\n".join(
        logged_sentence(each, metrics) for each in (same, other, changed)
    )
    return said


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
