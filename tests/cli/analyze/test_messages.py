from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from linnaeus.autobatch.predict.gpus import GIB
from linnaeus.cli.analyze.measure import device_sentence
from linnaeus.cli.analyze.options import Options, read, read_plan
from linnaeus.cli.analyze.predict import gpus_of
from linnaeus.cli.analyze.results import Analysis, Breakdown, Goal, Remedy, Row, Speeds, timed_size
from linnaeus.cli.analyze.show import show
from tests.helpers.consoles import plain_console
from tests.helpers.messages import Golden, error_of
from tests.helpers.predictions import POINTS, WIDE, predicted, row_of

MIB = 1024**2
LINES: dict[str, tuple[Any, list[str]]] = {
    "values of options": (
        read,
        [
            "--fractions=0,nan",
            "--fractions=1.5",
            "--fractions=0.5,nan",
            "--fractions=half",
            "--modes=tset",
            "--output=a",
            "--plot=a.pdf",
            "--steps=0",
            "--strategy=guide",
            "--memory-limit-gb=inf",
            "--memory-limit-gb=-1",
            "--max-bs=1.5",
            "--gpu=t4,rtx409",
            "--gpu=a100",
            "--device-memory-gb=8,24GB",
            "--throughput=1",
            "--foo",
            "DATA.BATCHSIZE=3",
        ],
    ),
    "values of options of a run": (
        read_plan,
        [
            "--sizes=8,0",
            "--noise-scale=-1",
            "--time-budget=2",
            "--world-size=1.5",
            "--fractions=2",
        ],
    ),
    "options that need --predict": (
        read,
        [
            "--gpu=t4",
            "--device-memory-gb=24",
            "--sharding=full",
            "--world-size=1,2",
        ],
    ),
    "options that do not go with --predict": (
        read,
        [
            "--predict",
            "--throughput",
            "--steps=3",
            "--plot=a.svg",
            "--strategy=guided",
            "--epochs=3",
        ],
    ),
    "mistakes in a sharded prediction": (
        read,
        [
            "--predict",
            "--world-size=0",
            "--sharding=ful",
        ],
    ),
    "remedies for several numbers of processes": (
        read,
        ["--predict", "--world-size=1,2", "--remedies"],
    ),
    "options that do not go with --lr": (read, ["--lr", "--predict", "--fractions=1"]),
    "language models": (read, ["--hf", "config.json", "--sequence=64"]),
    "files that cannot be written": (read, ["--output", "missing/a.csv", "--plot", "folder.png"]),
}
SETTINGS = {
    "model": "vit",
    "parameters": 5000,
    "frozen_parameters": 0,
    "image_size": [32, 48],
    "num_classes": [2, 6],
    "precision": "bf16 autocast over float32",
    "optimizer": "AdamW",
    "gradient_checkpointing": True,
    "accumulation_steps": 4,
    "ema": True,
    "memory_limit_gb": 8.0,
}
RATES = ((8, 500.0), (16, 970.0), (32, 1000.0))


def shown(analysis: Analysis) -> str:
    console, output = plain_console()
    show(analysis, console)
    return output.getvalue()


def measured() -> Analysis:
    """Two fractions of each mode, of which one does not fit."""
    rows = []
    for mode in ("train", "val"):
        parts = Breakdown(parameters=MIB, activations=3 * MIB, rest=MIB)
        row = Row(mode, 0.9, 121, True, "max_batch_size", 5 * MIB, 6 * MIB, breakdown=parts)
        row.samples_per_s = 100.0
        rows += [row, Row(mode, 0.5, reason=f"AutoBatch ({mode}): no batch size fits")]
    rows[0].remedies = [
        Remedy({"TRAIN.AMP": "bf16"}, 121, 500 * MIB, 300 * MIB, 150.0),
        Remedy({"TRAIN.ACCUMULATION_STEPS": 2}, 60, 5 * MIB, reason="no memory"),
    ]
    return Analysis(rows=rows)


def timed(goal: Goal) -> Analysis:
    sizes = [
        timed_size(size, rate, goal, learning_rate=0.1, warnings=("so small",))
        for size, rate in RATES
    ]
    speeds = Speeds({size.batch_size: size for size in sizes}, {64: "above 32"})
    rows = [Row("train", 0.8, 32, True, "memory", 5 * GIB, 6 * GIB)]
    return Analysis(rows=rows, speeds=speeds, goal=goal)


def test_messages(golden: Golden, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder.png").mkdir()
    said = {title: error_of(function, argv) for title, (function, argv) in LINES.items()}
    said["an analysis"] = shown(measured())
    environment = {
        "device": "cuda",
        "device_name": "H100",
        "total_bytes": 80 * GIB,
        "torch": "2.9.0",
        **SETTINGS,
    }
    said["the line above an analysis"] = device_sentence(environment)
    goal = Goal(dataset_length=1000, epochs=60, noise_scale=500, time_budget_s=9)
    said["a run with a noise scale, too late"] = shown(timed(goal))
    _, config = read(["--predict", "--gpu", "t4", *WIDE])  # type: ignore[misc]
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    said["a prediction without a device"] = error_of(gpus_of, Options(), config)
    untraceable = error_of(predicted, "train", "MODEL._target_=tests.cli.tiny.Peeking", *POINTS)
    said["a step that cannot be traced"] = re.sub(r"line \d+", "line N", untraceable)
    hybrid = ("--sharding=hybrid", "--world-size=12", *WIDE)
    said["nodes that are not full"] = error_of(predicted, "train", *hybrid)
    said["sharding with a key against it"] = error_of(
        predicted, "train", "--sharding=full", "--world-size=2", "TRAIN.COMPILE=True", *WIDE
    )
    reasons = {
        "no size on a device": row_of("train", *WIDE, gib=1, fraction=0.5).reason,
        "no size within a limit": row_of("train", *WIDE, fraction=0.5, limit_gb=0.01).reason,
    }
    for title, reason in reasons.items():  # a prediction differs from torch to torch
        said[title] = re.sub(r"(takes|a device of) [\d.]+ GiB", r"\1 N GiB", str(reason))
    parts = Breakdown(parameters=MIB, activations=500 * MIB, rest=100 * MIB)
    row = Row(
        "train",
        0.9,
        64,
        limited_by="memory",
        peak_bytes=601 * MIB,
        budget_bytes=GIB,
        breakdown=parts,
    )
    row.device, row.device_bytes, row.safe_batch_size = "24 GiB", 24 * GIB, 50
    row.remedies = [Remedy({"TRAIN.AMP": "bf16"}, 64, 601 * MIB, 400 * MIB, safe_batch_size=90)]
    said["a predicted analysis"] = shown(Analysis(rows=[row]))
    golden("analyze", said, folder=tmp_path)
