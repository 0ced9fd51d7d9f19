"""Whole plans through the command line."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from linnaeus.commands.plan.options import Options, read
from tests.commands.analyze.test_analyze import GROWING, SVG, content_of, limit
from tests.helpers.runs import Run

POINTS = (*GROWING, "MODEL.width=64")


def test_everything_can_be_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = read(
        [
            "--fraction=0.5", "--sizes", "8,4,8", "--dataset-length", "1000", "--epochs", "7",
            "--noise-scale", "1e3", "--world-size=4", "--time-budget", "90s", "--output", "a.csv",
            "--plot=a.SVG", "--min-bs=2", "--max-bs", "99", "--memory-limit-gb", "1.5", "TRAIN.AMP", "bf16",
        ]
    )  # fmt: skip
    assert not isinstance(found, str)
    options, config = found
    assert options == Options(
        sizes=[4, 8], dataset_length=1000, noise_scale=1000, world_size=4, time_budget=90,
        output=Path("a.csv"), plot=Path("a.SVG"),
    )  # fmt: skip
    autobatch = config.DATA.AUTOBATCH
    assert (autobatch.TARGET_MEMORY_FRACTION, autobatch.MEMORY_LIMIT_GB) == (0.5, 1.5)
    assert (autobatch.MIN_BATCH_SIZE, autobatch.MAX_BATCH_SIZE) == (2, 99)
    assert (config.TRAIN.EPOCHS, config.TRAIN.AMP) == (7, "bf16")


def by_size(found: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return {row["batch_size"]: row for row in found["sizes"]}


def marked(found: dict[str, Any], name: str) -> list[int]:
    return [row["batch_size"] for row in found["sizes"] if name in row["marks"]]


@pytest.mark.slow
@pytest.mark.usefixtures("few_timed_steps")
def test_where_memory_limits(run: Run, tmp_path: Path) -> None:
    outcome = run("plan", *GROWING, *limit(60), "--fraction", "0.95", "--epochs", "4", "--time-budget", "1d")
    found = content_of(outcome, tmp_path / "batch_plan.json")
    rows, search = by_size(found), found["search"]
    largest = search["batch_size"]
    assert (search["limited_by"], found["largest"], max(rows)) == ("memory", largest, largest)
    ran = {trial["batch_size"]: trial["peak_bytes"] for trial in search["trials"]}
    assert ran[largest] <= search["budget_bytes"]
    assert list(rows) == sorted(rows)
    assert {2**exponent for exponent in range(largest.bit_length())} <= {*rows, largest}
    assert found["fastest"] == max(rows, key=lambda size: rows[size]["samples_per_s"])
    best = rows[found["fastest"]]["samples_per_s"]
    fast = [size for size, row in rows.items() if row["samples_per_s"] >= 0.95 * best]
    assert found["recommended"] == min(fast)
    for name in ("largest", "fastest", "recommended"):
        assert marked(found, name) == [found[name]]
    for size, row in rows.items():
        assert row["effective_batch"] == size
        assert row["samples_per_s"] * row["seconds_per_step"] == pytest.approx(size, rel=1e-3)
        assert row["epoch_s"] == pytest.approx(5000 / row["samples_per_s"], rel=1e-3)
        assert row["run_s"] == pytest.approx(4 * row["epoch_s"])
        assert row["in_time"] is True
        assert row["relative_steps"] is None
        assert row["learning_rate"] == 0.002
        assert row["total_steps"] in (4 * (5000 // size), 4 * -(-5000 // size)), "the rest may be left out"


@pytest.mark.usefixtures("few_timed_steps")
def test_a_noise_scale_and_the_batch_plan(run: Run, tmp_path: Path) -> None:
    """Four processes, linear scaling from a base of 32: rate, steps and warnings are those of training."""
    outcome = run(
        "plan", *GROWING, "MODEL._target_=tests.commands.tiny.Normed", "--sizes", "1,4,8,16,99",
        "--max-bs", "16", "--world-size", "4",
        "--noise-scale", "500", "--dataset-length", "6400", "--epochs", "3", "--time-budget", "0.001s",
        "--plot", "plan.svg", "OPTIMIZER.LR=0.1", "OPTIMIZER.LR_SCALING=linear",
        "OPTIMIZER.BASE_BATCH_SIZE=32",
    )  # fmt: skip
    found = content_of(outcome, tmp_path / "batch_plan.json")
    rows = by_size(found)
    assert list(rows) == [4, 8, 16]
    assert {size: reason.split()[:2] for size, reason in found["left_out"].items()} == {
        "1": ["below", "2,"], "99": ["above", "16,"],
    }  # fmt: skip
    assert [row["effective_batch"] for row in rows.values()] == [16, 32, 64]
    assert [row["learning_rate"] for row in rows.values()] == pytest.approx([0.05, 0.1, 0.2])
    assert [row["total_steps"] for row in rows.values()] == [1200, 600, 300]
    assert [row["relative_steps"] for row in rows.values()] == [32.25, 16.625, 8.8125]
    assert [row["relative_samples"] for row in rows.values()] == [516, 532, 564]
    times = {size: row["relative_steps"] * row["seconds_per_step"] for size, row in rows.items()}
    best = min(times, key=lambda size: times[size])
    assert found["recommended"] == best
    for size, row in rows.items():
        assert row["relative_time"] == pytest.approx(times[size] / times[best], rel=1e-3)
        assert row["in_time"] is False
        assert row["run_s"] == pytest.approx(3 * 6400 / row["samples_per_s"], rel=1e-3)
    assert any("BatchNorm" in text for text in rows[4]["warnings"])
    assert not any("BatchNorm" in text for text in rows[16]["warnings"])
    assert outcome.out.count("BatchNorm") == 1
    svg = ElementTree.parse(tmp_path / "plan.svg").getroot()
    titles = " ".join(title.text or "" for title in svg.iter(f"{SVG}title"))
    for row in rows.values():
        assert f"{row['samples_per_s']:.4g}" in titles
        assert f"{row['relative_time']:.2f}" in titles


@pytest.mark.e2e
@pytest.mark.usefixtures("few_timed_steps")
def test_an_effective_batch_that_is_set_stays(run: Run, tmp_path: Path) -> None:
    outcome = run("plan", *POINTS, "--max-bs", "16", "--output", "plan.csv", "TRAIN.EFFECTIVE_BATCH_SIZE=24")
    assert outcome.code == 0, outcome.err
    rows = list(csv.DictReader((tmp_path / "plan.csv").read_text().splitlines()))
    assert {row["effective_batch"] for row in rows} == {"24"}
    for row in rows:
        assert int(row["batch_size"]) * int(row["accumulation_steps"]) == 24
    assert max(int(row["batch_size"]) for row in rows) == 12


@pytest.mark.e2e
def test_nothing_fits(run: Run, tmp_path: Path) -> None:
    outcome = run("plan", *POINTS, "--memory-limit-gb", "0.05", "--plot", "a.png")
    assert outcome.code == 3
    assert "Traceback" not in outcome.err
    found = json.loads((tmp_path / "batch_plan.json").read_text())
    assert (found["sizes"], found["recommended"], found["interrupted"]) == ([], None, True)
    assert (tmp_path / "a.png").exists()


def test_ctrl_c_writes_what_has_been_timed(run: Run, tmp_path: Path) -> None:
    """The model sends the signal while it is timed: the search takes 4 steps at least."""
    outcome = run("plan", *POINTS, "MODEL.interrupt_at=16", "--sizes", "1,2,3", "--max-bs", "4")
    assert outcome.code == 130
    found = json.loads((tmp_path / "batch_plan.json").read_text())
    assert found["interrupted"] is True
    assert found["search"]["batch_size"] == 4
    assert len(found["sizes"]) < 4
