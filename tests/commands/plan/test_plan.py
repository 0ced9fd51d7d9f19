"""Whole plans through the command line."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.commands.analyze.test_analyze import SVG, WIDE, limit
from tests.helpers import forks
from tests.helpers.forks import ROOT
from tests.helpers.runs import SMALL, Outcome, Run


def read(outcome: Outcome, path: Path) -> dict[str, Any]:
    assert outcome.code == 0, outcome.err
    return dict(json.loads(path.read_text()))


def by_size(found: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return {row["batch_size"]: row for row in found["sizes"]}


def marked(found: dict[str, Any], name: str) -> list[int]:
    return [row["batch_size"] for row in found["sizes"] if name in row["marks"]]


@pytest.mark.slow
@pytest.mark.usefixtures("few_timed_steps")
def test_where_memory_limits(run: Run, tmp_path: Path) -> None:
    outcome = run(
        "plan", *WIDE, *limit(60), "--fraction", "0.95", "--epochs", "4", "--time-budget", "1d", "--plot",
        "plan.html",
    )  # fmt: skip
    found = read(outcome, tmp_path / "batch_plan.json")
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
        assert f"│ {size:>10} │ " in outcome.out
    assert f"recommended: DATA.BATCH_SIZE={found['recommended']}" in outcome.out
    assert "no size ends the run" not in outcome.out, "all do"
    page = (tmp_path / "plan.html").read_text()
    assert f"recommended: {found['recommended']}" in page
    assert all(f"<td>{size}</td>" in page for size in rows)


@pytest.mark.usefixtures("few_timed_steps")
def test_a_noise_scale_and_the_batch_plan(run: Run, tmp_path: Path) -> None:
    """Four processes, linear scaling from a base of 32: rate, steps and warnings are those of training."""
    outcome = run(
        "plan", *SMALL, "--sizes", "4,8,16,99", "--max-bs", "16", "--world-size", "4", "--noise-scale", "500",
        "--dataset-length", "6400", "--epochs", "3", "--time-budget", "0.001s", "--plot", "plan.svg",
        "OPTIMIZER.LR=0.1", "OPTIMIZER.LR_SCALING=linear", "OPTIMIZER.BASE_BATCH_SIZE=32",
    )  # fmt: skip
    found = read(outcome, tmp_path / "batch_plan.json")
    rows = by_size(found)
    assert list(rows) == [4, 8, 16]
    assert found["left_out"] == {
        "99": "above 16, the largest that was found to fit (limited by max_batch_size)"
    }
    assert "batch size 99 is left out: above 16" in outcome.out
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
    assert "batch size 4, 8: BatchNorm" in outcome.out or "batch size 4: BatchNorm" in outcome.out
    assert outcome.out.count(": BatchNorm sees only 4 to 8 samples per process, fewer than 16") == 1
    assert "no size ends the run within 0.001 s: the fastest, batch size " in outcome.out
    svg = ElementTree.parse(tmp_path / "plan.svg").getroot()
    titles = {title.text for title in svg.iter(f"{SVG}title")}
    assert titles == {
        *(f"batch size {size}: {row['samples_per_s']:.4g} samples/s" for size, row in rows.items()),
        *(f"batch size {size}: {row['relative_time']:.2f} x the time" for size, row in rows.items()),
    }
    labels = {"".join(text.itertext()).strip() for text in svg.iter(f"{SVG}text")}
    assert {"throughput", "predicted time to the same loss", f"recommended: {best}"} <= labels


@pytest.mark.usefixtures("few_timed_steps")
def test_an_effective_batch_that_is_set_stays(run: Run, tmp_path: Path) -> None:
    outcome = run("plan", *SMALL, "--max-bs", "16", "--output", "plan.csv", "TRAIN.EFFECTIVE_BATCH_SIZE=24")
    assert outcome.code == 0, outcome.err
    rows = list(csv.DictReader((tmp_path / "plan.csv").read_text().splitlines()))
    assert {row["effective_batch"] for row in rows} == {"24"}
    for row in rows:
        assert int(row["batch_size"]) * int(row["accumulation_steps"]) == 24
    assert max(int(row["batch_size"]) for row in rows) == 12


@pytest.mark.usefixtures("few_timed_steps")
def test_a_size_below_the_smallest_is_left_out(run: Run, tmp_path: Path) -> None:
    outcome = run("plan", *SMALL, "--sizes", "1", "--max-bs", "4", "--output", "plan.jsonl")
    assert outcome.code == 0, outcome.err
    rows = [json.loads(line) for line in (tmp_path / "plan.jsonl").read_text().splitlines()]
    assert [row["batch_size"] for row in rows] == [4]
    assert "batch size 1 is left out: below 2" in outcome.out


def test_nothing_fits(run: Run, tmp_path: Path) -> None:
    outcome = run("plan", *SMALL, "--memory-limit-gb", "0.05", "--plot", "a.png")
    assert outcome.code == 3
    assert "no batch size fits" in outcome.err
    assert "Traceback" not in outcome.err
    found = json.loads((tmp_path / "batch_plan.json").read_text())
    assert (found["sizes"], found["recommended"], found["interrupted"]) == ([], None, True)
    assert (tmp_path / "a.png").exists()


def test_ctrl_c_writes_what_has_been_timed(run: Run, tmp_path: Path) -> None:
    """The model sends the signal while it is timed: the search takes 4 steps at least."""
    outcome = run(
        "plan", *WIDE, "MODEL.width=64", "MODEL.interrupt_at=16", "--sizes", "1,2,3", "--max-bs", "4",
    )  # fmt: skip
    assert outcome.code == 130
    found = json.loads((tmp_path / "batch_plan.json").read_text())
    assert found["interrupted"] is True
    assert found["search"]["batch_size"] == 4
    assert len(found["sizes"]) < 4


def test_the_tool_works_from_another_folder(tmp_path: Path) -> None:
    (tmp_path / "my_exp.yaml").write_text(
        "MODEL: {NAME: test_resnet}\nDATA: {DATASET: {NAME: synthetic}, IMG_SIZE: 32}\n"
        "EXPERIMENT: {DEVICE: cpu}\n"
    )
    tool = ROOT / "tools/plan_batch_size.py"
    done = forks.python(tool, "--cfg", "my_exp.yaml", "--sizes", "2", "--max-bs", "4", cwd=tmp_path)
    assert done.code == 0, done.err
    sizes = json.loads((tmp_path / "batch_plan.json").read_text())["sizes"]
    assert [row["batch_size"] for row in sizes] == [2, 4]
    # A new interpreter finds the package too.
    subprocess.run([sys.executable, str(tool), "--help"], cwd=tmp_path, capture_output=True, check=True)
