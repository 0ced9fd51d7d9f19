import re
from dataclasses import replace
from pathlib import Path

from linnaeus.autobatch.predict.gpus import GIB
from linnaeus.cli.analyze.measure import sentence
from linnaeus.cli.analyze.options import read
from linnaeus.cli.analyze.results import Analysis, Row
from tests.helpers.consoles import plain_console
from tests.helpers.messages import error_of
from tests.helpers.predictions import POINTS, WIDE, predicted, row_of

MIB = 1024**2
LINES = {
    "values of options": (
        "--fractions=0,nan --fractions=1.5 --fractions=0.5,nan --fractions=half "
        "--modes=tset --output=a --plot=a.pdf --max-bs=3 --memory-limit-gb=2 "
        "--gpu=t4,rtx409 --gpu=a100 --gpu=8,24GB --variants=bf16,compiled --predict=1 "
        "--foo DATA.BATCHSIZE=3"
    ),
    "options of earlier versions": "--remedies --throughput --device-memory-gb=24 --hf config.json",
    "options that need --predict": "--gpu=t4 --sharding=full --world-size=1,2",
    "options that do not go with --predict": "--predict --plot=a.svg",
    "mistakes in a sharded prediction": "--predict --world-size=0 --sharding=ful",
    "options that do not go with --lr": "--lr --predict --fractions=1",
    "a prediction for no GPU": "--predict",
    "files that cannot be written": "--output missing/a.csv --plot folder.png",
}
ENVIRONMENT = {
    "model": "vit",
    "parameters": 5000,
    "image_size": [32, 48],
    "precision": "bf16 autocast over float32",
    "optimizer": "AdamW",
    "device_name": "H100",
    "total_bytes": 80 * GIB,
    "torch": "2.9.0",
}


def shown(analysis):
    console, output = plain_console()
    analysis.show(console)
    return output.getvalue()


def measured():
    """Two fractions of each mode, of which one does not fit."""
    row = Row("train", 0.9, batch_size=121, limited_by="max_batch_size", samples_per_s=100.0)
    row.peak_bytes, row.budget_bytes = 5 * MIB, 6 * MIB
    reason = "AutoBatch: no batch size fits"
    rows = [
        row,
        Row("train", 0.5, reason=reason),
        replace(row, mode="val"),
        Row("val", 0.5, reason=reason),
        replace(row, variant="bf16", batch_size=150, samples_per_s=130.0),
        Row("train", 0.9, "compile", limited_by="failed", reason="compile: no compiler"),
    ]
    analysis = Analysis(rows=rows)
    analysis.compare_speeds()
    return analysis


def test_messages(golden, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("folder.png").mkdir()
    said = {title: error_of(read, line.split()) for title, line in LINES.items()}
    said["an analysis"] = shown(measured())
    said["the line above an analysis"] = sentence(ENVIRONMENT)
    small = Analysis(rows=[Row("train", 0.9, device="t4", batch_size=8, limited_by="memory")])
    said["a required size that does not fit"] = "\n".join(small.too_small(9))
    untraceable = error_of(predicted, "train", "MODEL._target_=tests.cli.tiny.Peeking", *POINTS)
    said["a step that cannot be traced"] = re.sub(r"line \d+", "line N", untraceable)
    hybrid = ("--sharding=hybrid", "--world-size=12", *WIDE)
    said["nodes that are not full"] = error_of(predicted, "train", *hybrid)
    said["sharding with a key against it"] = error_of(
        predicted, "train", "--sharding=full", "--world-size=2", "TRAIN.COMPILE=True", *WIDE
    )
    reason = row_of("train", *WIDE, gib=1, fraction=0.5).reason
    # a prediction differs from torch to torch
    said["no size on a device"] = re.sub(r"(takes|a device of) [\d.]+ GiB", r"\1 N GiB", reason)
    row = Row("train", 0.9, device="24 GiB", batch_size=50, limited_by="memory")
    row.size_without_margin, row.peak_bytes = 64, 601 * MIB
    said["a predicted analysis"] = shown(Analysis(rows=[row]))
    golden("analyze", said, folder=tmp_path)
