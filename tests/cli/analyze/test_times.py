"""What a run takes with each size: values worked out by hand, and whole plans through the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from linnaeus.cli.analyze.results import Analysis, Goal, Row, Speeds, timed_size
from linnaeus.cli.tables import UNITS, read_duration, show_duration
from tests.helpers.predictions import MEASURED, NARROW, SVG, content_of
from tests.helpers.runs import Run

RATES = {32: 640.0, 64: 980.0, 128: 1000.0, 256: 990.0}


def speeds_of(goal: Goal, rates: dict[int, float] = RATES, **plan: Any) -> Speeds:
    plan = {"learning_rate": 0.1, **plan}
    return Speeds({size: timed_size(size, rate, goal, **plan) for size, rate in rates.items()})


def test_without_a_noise_scale_the_smallest_fast_size_is_recommended() -> None:
    goal = Goal(dataset_length=10_000, epochs=9, time_budget_s=94)
    found = {row["batch_size"]: row for row in speeds_of(goal).as_dict()["timings"]}
    assert {size: row["marks"] for size, row in found.items()} == {
        32: "",
        64: "recommended",
        128: "fastest",
        256: "largest",
    }
    assert (found[128]["epoch_s"], found[128]["run_s"], found[128]["seconds_per_step"]) == (
        10,
        90,
        0.128,
    )
    assert [row["in_time"] for row in found.values()] == [
        False,
        True,
        True,
        True,
    ]  # 140.6, 91.8, 90, 90.9 s
    assert found[128]["relative_time"] is None


def test_with_a_noise_scale_the_least_time_to_the_same_loss_is_recommended() -> None:
    """(1 + 1000 / B) B / speed: 32 -> 1.6125, 64 -> 1.0857, 128 -> 1.128, 256 -> 1.2687 seconds."""
    found = speeds_of(Goal(dataset_length=10_000, epochs=9, noise_scale=1000)).as_dict()
    assert found["recommended"] == 64
    relative = [row["relative_time"] for row in found["timings"]]
    expected = [1032 / 640, 1064 / 980, 1128 / 1000, 1256 / 990]
    assert relative == pytest.approx([value / (1064 / 980) for value in expected])
    assert [row["relative_steps"] for row in found["timings"]] == [32.25, 16.625, 8.8125, 4.90625]


def test_a_size_that_ends_in_time_is_recommended() -> None:
    goal = Goal(dataset_length=10_000, epochs=9, time_budget_s=91)
    assert speeds_of(goal).recommended.batch_size == 128, "64 takes 91.8 s"
    assert speeds_of(replace(goal, time_budget_s=9)).recommended.batch_size == 64, "where none does"


def test_processes_add_up() -> None:
    size = timed_size(
        8, 100.0, Goal(dataset_length=8000, epochs=2, world_size=4, noise_scale=64), 2
    )
    assert (size.effective_batch, size.samples_per_s, size.seconds_per_step) == (64, 400, 0.16)
    assert (size.epoch_s, size.run_s) == (20, 40)
    assert size.relative_steps == 2


def test_a_size_that_the_configuration_refuses_is_not_recommended() -> None:
    goal = Goal(dataset_length=10_000, epochs=9)
    refused = speeds_of(goal, {32: 1000.0}, learning_rate=None)
    allowed = speeds_of(goal, {64: 1000.0})
    assert Speeds(refused.sizes | allowed.sizes).recommended.batch_size == 64


def test_the_table_has_every_size_once() -> None:
    """Those of fractions with their memory and speed, and the others that were timed."""
    analysis = Analysis(rows=[Row("train", 0.8, 64), Row("train", 0.9, 128), Row("val", 0.9, 64)])
    analysis.speeds = speeds_of(Goal(dataset_length=10_000, epochs=9))
    rows = analysis.scalars()
    assert [(row["mode"], row.get("memory_fraction"), row["batch_size"]) for row in rows] == [
        ("train", 0.8, 64),
        ("train", 0.9, 128),
        ("val", 0.9, 64),
        ("train", None, 32),
        ("train", None, 256),
    ]
    assert [row.get("run_s") is not None for row in rows] == [True, True, False, True, True]
    assert {name for row in rows for name in row} == {*analysis.columns}


def test_lengths_of_time() -> None:
    lengths = {"90s": 90, "30m": 1800, "2h": 7200, "1d": 86400, "1.5h": 5400, "1h30m": 5400}
    assert {text: read_duration(text) for text in lengths} == lengths
    for text in ("", "2", "h", "2 h", "2w", "-1h", "0s", "1h30", "h2", "9" * 400 + "d"):
        with pytest.raises(ValueError, match="90s"):
            read_duration(text)


@given(st.floats(0.001, 1e8))
@example(134_546.0)
def test_lengths_of_time_are_shown_to_half_of_the_smaller_unit(seconds: float) -> None:
    parts = show_duration(seconds).split()
    shown = sum(float(parts[i]) * UNITS[parts[i + 1]] for i in range(0, len(parts), 2))
    smallest = UNITS[parts[-1]] if len(parts) == 4 else 0.01 * seconds
    assert abs(shown - seconds) <= 0.5 * smallest * (1 + 1e-9)


@pytest.mark.usefixtures("few_timed_steps")
def test_a_noise_scale_and_the_batch_plan(run: Run, tmp_path: Path) -> None:
    """Four processes, linear scaling from a base of 32: rate, steps and warnings are those of training."""
    outcome = run(
        "plan",
        *MEASURED,
        "MODEL._target_=tests.cli.tiny.Normed",
        "--sizes",
        "1,4,8,16,99",
        "--max-bs",
        "16",
        "--world-size",
        "4",
        "--noise-scale",
        "500",
        "--dataset-length",
        "6400",
        "--epochs",
        "3",
        "--time-budget",
        "0.001s",
        "--plot",
        "plan.svg",
        "OPTIMIZER.LR=0.1",
        "OPTIMIZER.LR_SCALING=linear",
        "OPTIMIZER.BASE_BATCH_SIZE=32",
    )
    content = content_of(outcome, tmp_path / "batch_sizes.json")
    assert [(row["mode"], row["memory_fraction"]) for row in content["results"]] == [("train", 0.8)]
    found = content["throughput"]["train"]
    rows = {row["batch_size"]: row for row in found["timings"]}
    assert list(rows) == [4, 8, 16]
    assert [*found["left_out"]] == ["1", "99"]
    assert [row["effective_batch"] for row in rows.values()] == [16, 32, 64]
    assert [row["learning_rate"] for row in rows.values()] == pytest.approx([0.05, 0.1, 0.2])
    assert [row["total_steps"] for row in rows.values()] == [1200, 600, 300]
    assert [row["relative_steps"] for row in rows.values()] == [32.25, 16.625, 8.8125]
    times = {size: row["relative_steps"] * row["seconds_per_step"] for size, row in rows.items()}
    best = min(times, key=lambda size: times[size])
    assert found["recommended"] == best
    for size, row in rows.items():
        assert row["relative_time"] == pytest.approx(times[size] / times[best], rel=1e-3)
        assert row["in_time"] is False
        assert row["run_s"] == pytest.approx(3 * 6400 / row["samples_per_s"], rel=1e-3)
    assert any("BatchNorm" in text for text in rows[4]["warnings"])
    assert not any("BatchNorm" in text for text in rows[16]["warnings"])
    svg = ElementTree.parse(tmp_path / "plan.svg").getroot()
    assert f"recommended for training: {best}" in {text.text for text in svg.iter(f"{SVG}text")}


def test_ctrl_c_writes_what_has_been_timed(run: Run, tmp_path: Path) -> None:
    """The model sends the signal while it is timed: the search takes 4 steps at least."""
    outcome = run("plan", *NARROW, "MODEL.interrupt_at=16", "--sizes", "1,2,3", "--max-bs", "4")
    assert outcome.code == 130
    found = json.loads((tmp_path / "batch_sizes.json").read_text())
    assert found["interrupted"] is True
    assert found["results"][0]["batch_size"] == 4
    assert len(found.get("throughput", {}).get("train", {}).get("timings", [])) < 4
