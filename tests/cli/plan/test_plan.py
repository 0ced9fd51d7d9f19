"""Whole plans through the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.helpers.predictions import MEASURED, NARROW, SVG, content_of
from tests.helpers.runs import Run


def by_size(found: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return {row["batch_size"]: row for row in found["sizes"]}


@pytest.mark.usefixtures("few_timed_steps")
def test_a_noise_scale_and_the_batch_plan(run: Run, tmp_path: Path) -> None:
    """Four processes, linear scaling from a base of 32: rate, steps and warnings are those of training."""
    outcome = run(
        "plan", *MEASURED, "MODEL._target_=tests.cli.tiny.Normed", "--sizes", "1,4,8,16,99",
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
    assert outcome.out.count("BatchNorm") == 1, "warnings that differ in numbers alone are one line"
    svg = ElementTree.parse(tmp_path / "plan.svg").getroot()
    titles = " ".join(title.text or "" for title in svg.iter(f"{SVG}title"))
    for row in rows.values():
        assert f"{row['samples_per_s']:.4g}" in titles
        assert f"{row['relative_time']:.2f}" in titles


def test_ctrl_c_writes_what_has_been_timed(run: Run, tmp_path: Path) -> None:
    """The model sends the signal while it is timed: the search takes 4 steps at least."""
    outcome = run("plan", *NARROW, "MODEL.interrupt_at=16", "--sizes", "1,2,3", "--max-bs", "4")
    assert outcome.code == 130
    found = json.loads((tmp_path / "batch_plan.json").read_text())
    assert found["interrupted"] is True
    assert found["search"]["batch_size"] == 4
    assert len(found["sizes"]) < 4
