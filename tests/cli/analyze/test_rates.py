"""The range test of learning rates, `linnaeus analyze --lr`."""

import csv
import json
import re
from pathlib import Path

import pytest

from tests.helpers.predictions import NARROW, POINTS, content_of
from tests.helpers.runs import SMALL
from tests.helpers.small_runs import lines_of
from tests.training.test_trainer import OVERFLOWING


def test_the_loss_falls_and_rises_and_the_suggestion_lies_below(run, tmp_path):
    options = (
        *POINTS,
        "MODEL._target_=tests.cli.tiny.Perceptron",
        "MODEL.width=16",
        "DATA.BATCH_SIZE=16",
        "OPTIMIZER.LR_SCALING=sqrt",
        "EXPERIMENT.DEVICE=cpu",
    )
    outcome = run("analyze", *options, "--lr", "--plot", "rates.svg")
    found = content_of(outcome, Path("learning_rates.json"))
    rows = found["results"]
    assert 30 < len(rows) < 100, "it ends where training diverges"
    assert rows[0]["OPTIMIZER.LR"] == pytest.approx(1e-6 * 4)  # of 256 samples, for batches of 16
    assert rows[-1]["smoothed"] > 4 * min(row["smoothed"] for row in rows)
    lowest = min(rows, key=lambda row: row["smoothed"])
    assert lowest["smoothed"] < 0.7 * rows[0]["smoothed"]
    assert found["suggestion"] == pytest.approx(lowest["OPTIMIZER.LR"] / 10)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["learning_rates.json", "rates.svg"]


@pytest.mark.parametrize(("amp", "num_rows"), [("fp16", 28), ("off", 30)])
def test_a_step_that_the_scaler_skips_is_left_out(run, monkeypatch, amp, num_rows):
    monkeypatch.setattr("linnaeus.cli.analyze.rates.NUM_STEPS", 30)
    monkeypatch.setattr("linnaeus.cli.analyze.rates.LAST", 1e-3)
    options = (*OVERFLOWING, "MODEL.num_passes=2", f"TRAIN.AMP={amp}")
    outcome = run("analyze", *options, "--lr", "--output=a.json")
    assert len(content_of(outcome, Path("a.json"))["results"]) == num_rows


def test_ctrl_c_keeps_the_steps_and_says_a_word(run, tmp_path):
    """The model sends it in step 21; two lines of the log tell of the steps before."""
    more = ("MODEL.interrupt_at=21", "DATA.BATCH_SIZE=8")
    outcome = run("analyze", *NARROW, *more, "--lr")
    assert (outcome.code, "SIGINT" in outcome.err) == (130, True)
    assert len(re.findall("step [0-9]+ of 100", outcome.out)) == 2
    found = json.loads((tmp_path / "learning_rates.json").read_text())
    assert (found["interrupted"], len(found["results"])) == (True, 20)


def test_steps_are_those_of_training(run, tmp_path, monkeypatch):
    monkeypatch.setattr("linnaeus.cli.analyze.rates.NUM_STEPS", 2)
    options = (
        *SMALL,
        "DATA.BATCH_SIZE=24",
        "TRAIN.ACCUMULATION_STEPS=2",
        "SCHEDULE.NAME=constant",
        "TRAIN.LOG_EVERY=1",
        "OPTIMIZER.LR=1e-3",
        "MODEL.DROP_RATE=0.3",
        "TRAIN.EPOCHS=1",
        "OPTIMIZER.LAYER_DECAY=0.5",
        "DATA.DATASET.NUM_SAMPLES_VAL=8",
    )
    run(*options).ok()
    losses = [line["loss"] for line in lines_of(tmp_path / "runs/small")]
    monkeypatch.setattr("linnaeus.cli.analyze.rates.FIRST", 1e-3)
    monkeypatch.setattr("linnaeus.cli.analyze.rates.LAST", 1.000001e-3)
    run("analyze", *options, "--lr", "--output=a.csv").ok()
    rows = csv.DictReader((tmp_path / "a.csv").read_text().splitlines())
    assert [float(row["loss"]) for row in rows] == pytest.approx(losses[:2], rel=1e-5)
