"""Whole analyses through the command line, where memory really limits the size."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from torch import Tensor, nn

from linnaeus.autobatch.result import Mode, Timing
from linnaeus.commands.analyze.breakdown import Breakdown
from linnaeus.commands.analyze.output import show
from linnaeus.commands.analyze.results import Analysis, Row
from linnaeus.commands.environment import driver_version
from linnaeus.commands.measure import Speeds
from tests.helpers import forks
from tests.helpers.consoles import plain_console
from tests.helpers.forks import ROOT
from tests.helpers.ledger import held_bytes
from tests.helpers.runs import SMALL, Child, Outcome, Run

MIB = 1024**2
WIDE = (
    f"MODEL._target_={__name__}.Wide", "DATA.DATASET._target_=tests.test_run.Points",
    "DATA.DATASET.length=5000", "EXPERIMENT.DEVICE=cpu", "TRAIN.EMA.ENABLED=True",
)  # fmt: skip
SVG = "{http://www.w3.org/2000/svg}"


class Wide(nn.Module):
    """Few operations, and some MiB of activations per sample: memory limits at small sizes."""

    num_calls = 0  # of the class: those of a model are restored after a trial

    def __init__(self, num_classes: int, width: int = 2**18, interrupt_at: int | None = None) -> None:
        super().__init__()
        self.head = nn.Linear(2, num_classes)
        self.scale = nn.Parameter(torch.ones(width))
        self.register_buffer("shift", torch.zeros(width))
        self.interrupt_at = interrupt_at
        Wide.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Wide.num_calls += 1
        if Wide.num_calls == self.interrupt_at:
            os.kill(os.getpid(), signal.SIGINT)
        wide = (x.sum(1, keepdim=True) * self.scale + self.shift).sigmoid().tanh()
        return self.head(x) + wide.mean(1, keepdim=True)


def limit(room_mib: int) -> tuple[str, str]:
    """Options for a device with so much more than this process holds."""
    return (
        "--memory-limit-gb",
        f"{(held_bytes() / MIB + 100 + room_mib) / 1024:.4f}",
    )  # 100: what libraries still load


def read(outcome: Outcome, path: Path) -> dict[str, Any]:
    assert outcome.code == 0, outcome.err
    return dict(json.loads(path.read_text()))


@pytest.mark.usefixtures("few_timed_steps")
@pytest.mark.slow
def test_many_fractions_cost_little_more_than_one(run: Run, tmp_path: Path) -> None:
    fractions = [0.95, 0.98, 1.0]
    outcome = run(
        "analyze", *WIDE, "MODEL.width=131072", "DATA.AUTOBATCH.TOLERANCE=0", "--fractions", "0.95,0.98,1.0",
        "--steps", "1", *limit(80), "--plot", "sizes.html",
    )  # fmt: skip
    found = read(outcome, tmp_path / "batch_sizes.json")
    assert [(row["mode"], row["memory_fraction"]) for row in found["results"]] == [
        (mode, fraction) for mode in ("train", "val") for fraction in fractions
    ]
    for mode in ("train", "val"):
        rows = [row for row in found["results"] if row["mode"] == mode]
        counts = [len(row["trials"]) for row in rows]
        assert counts[-1] >= 4, "the first search is a real one"
        assert sum(counts) <= 1.6 * counts[-1]
        sizes = [row["batch_size"] for row in rows]
        assert sizes == sorted(sizes)
        assert 8 <= sizes[0] < sizes[-1]
        points = sorted({(t["batch_size"], t["peak_bytes"]) for row in rows for t in row["trials"]})
        points = [point for point in points if point[1] is not None]
        slope, start = np.polyfit(*zip(*points, strict=True), 1)
        for row in rows:
            assert (row["limited_by"], row["reason"]) == ("memory", None)
            assert row["peak_bytes"] <= row["budget_bytes"]
            assert (row["batch_size"], row["peak_bytes"]) in points, "every size has run"
            assert row["batch_size"] >= 0.8 * (row["budget_bytes"] - start) / slope
            assert row["samples_per_s"] > 0
    assert found["results"][2]["certified"]
    assert found["interrupted"] is False
    check_breakdowns(found)
    check_console(outcome.out, found)
    check_html((tmp_path / "sizes.html").read_text(), found)


def check_breakdowns(found: dict[str, Any]) -> None:
    """AdamW on a model whose tensors are known: exact parts that add up to the peak."""
    width_bytes = 4 * 2**17
    for row in found["results"]:
        parts = {name: part["bytes"] for name, part in row["breakdown"].items()}
        percents = [part["percent"] for part in row["breakdown"].values()]
        assert sum(parts.values()) == row["peak_bytes"]
        assert sum(percents) == pytest.approx(100, abs=0.1)
        parameters = width_bytes + 4 * (2 * 4 + 4)
        assert parts["parameters"] == parameters
        assert parts["buffers"] == width_bytes
        assert parts["average"] == parameters + width_bytes
        assert parts["gradients"] == (parameters if row["mode"] == "train" else 0)
        assert parts["optimizer_state"] == pytest.approx(2 * parameters, abs=100)  # and a few step counters
        assert parts["rest"] > 0
        # Training keeps the outputs of sigmoid and tanh, and needs one or two gradients of that size.
        copies = parts["activations"] / row["batch_size"] / width_bytes
        assert (1.9 < copies < 5.1) if row["mode"] == "train" else (0.9 < copies < 3.1)


def check_console(text: str, found: dict[str, Any]) -> None:
    assert "measured on cpu" in text
    assert found["environment"]["model"] in text
    for row in found["results"]:
        cells = (row["mode"], f"{row['memory_fraction']:.0%}", row["batch_size"])
        assert re.search(" +│ +".join(map(str, cells)) + rf" │.* {len(row['trials'])} │", text)
        assert f"{row['peak_bytes'] / 1024**3:.3f}" in text
    blocks = text.split("To paste into a configuration:")[1].strip().split("\n\n")
    assert len(blocks) == 3
    for block, train, val in zip(blocks, found["results"][:3], found["results"][3:], strict=True):
        assert block.startswith(f"# {train['memory_fraction']:.0%} of the memory")
        expected = {"BATCH_SIZE": train["batch_size"], "BATCH_SIZE_VAL": val["batch_size"]}
        assert yaml.safe_load(block) == {"DATA": expected}


def check_html(text: str, found: dict[str, Any]) -> None:
    assert not re.search(r"(src|href)=\"(?!#)", text), "nothing is loaded from elsewhere"
    svg = ElementTree.fromstring(text[text.index("<svg") : text.index("</svg>") + 6])
    assert "prefers-color-scheme: dark" in text
    check_svg(svg, found)


def check_svg(svg: ElementTree.Element, found: dict[str, Any]) -> None:
    """Every trial is a point that says its values; lines and labels are there."""
    points = [group for group in svg.iter(f"{SVG}g") if group.get("class") == "point"]
    assert all(group.find(f".//{SVG}use") is not None for group in points)
    titles = [group.findtext(f"{SVG}title", "") for group in points]
    for row in found["results"]:
        for trial in row["trials"]:
            start = f"{row['mode']}, batch size {trial['batch_size']}: "
            peak = None if trial["peak_bytes"] is None else trial["peak_bytes"] / 1024**3
            value = "out of memory" if peak is None else f"{peak:.3f} GiB"
            value_mib = "" if peak is None else f"{peak * 1024:.3f} MiB"
            assert {start + value, start + value_mib} & {*titles}
        share, size = f"{row['memory_fraction']:.0%}", row["batch_size"]
        chosen = rf"{row['mode']}, chosen for .*{share}.*: batch size {size}, "
        assert any(re.match(chosen, title) for title in titles)
    labels = ["".join(text.itertext()).strip() for text in svg.iter(f"{SVG}text")]
    modes = {row["mode"] for row in found["results"]}
    assert {f"{mode}: memory" for mode in modes} | {"batch size", "size chosen", "budget"} <= {*labels}
    assert {f"{row['memory_fraction']:.0%}" for row in found["results"]} <= {*labels}
    assert {str(row["batch_size"]) for row in found["results"]} <= {*labels}
    lines = [group for group in svg.iter(f"{SVG}g") if group.get("id", "").startswith("fitted-line")]
    ran = {
        (row["mode"], t["batch_size"]) for row in found["results"] for t in row["trials"] if t["peak_bytes"]
    }
    assert len(lines) == sum(len([mode for mode, _ in ran if mode == wanted]) > 1 for wanted in modes)
    dashed = [path for path in svg.iter(f"{SVG}path") if "stroke-dasharray" in path.get("style", "")]
    assert len(dashed) >= len(found["results"])


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_one_row_per_mode_and_fraction(run: Run, tmp_path: Path, ending: str) -> None:
    outcome = run("analyze", *SMALL, "--fractions", "0.5,0.9", "--max-bs", "6", "--output", f"sizes.{ending}")
    assert outcome.code == 0, outcome.err
    lines = (tmp_path / f"sizes.{ending}").read_text().splitlines()
    rows: list[dict[str, Any]] = (
        list(csv.DictReader(lines)) if ending == "csv" else [json.loads(line) for line in lines]
    )
    assert [(row["mode"], float(row["memory_fraction"])) for row in rows] == [
        ("train", 0.5), ("train", 0.9), ("val", 0.5), ("val", 0.9),
    ]  # fmt: skip
    for row in rows:
        assert int(row["batch_size"]) == 6
        assert row["limited_by"] == "max_batch_size"
        assert 0 < int(row["peak_bytes"]) <= int(row["budget_bytes"])
        assert float(row["samples_per_s"]) > 0
        parts = ("parameters", "buffers", "average", "gradients", "optimizer_state", "activations", "rest")
        assert sum(int(row[f"{part}_bytes"]) for part in parts) == int(row["peak_bytes"])
        assert not any(isinstance(value, dict | list) for value in row.values())
    assert sum(int(row["num_trials"]) for row in rows) <= 6
    assert [path.name for path in tmp_path.iterdir()] == [f"sizes.{ending}"], (
        "no folder of a run, no leftovers"
    )


@pytest.mark.slow
def test_pandas_reads_the_rows(run: Run, tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    for ending in ("csv", "jsonl"):
        assert run("analyze", *SMALL, "--max-bs", "4", "--output", f"sizes.{ending}").code == 0
    assert len(pandas.read_csv(tmp_path / "sizes.csv")) == 8
    assert len(pandas.read_json(tmp_path / "sizes.jsonl", lines=True)) == 8


def test_environment(run: Run, tmp_path: Path) -> None:
    outcome = run(
        "analyze", *SMALL, "--max-bs", "4", "--modes", "val", "TRAIN.AMP=bf16", "--output", "a.json"
    )
    environment = read(outcome, tmp_path / "a.json")["environment"]
    expected = {
        "device": "cpu", "torch": torch.__version__, "cuda": None, "driver": None, "model": "test_resnet",
        "precision": "bf16 autocast over float32", "optimizer": "AdamW", "image_size": [32, 32],
    }  # fmt: skip
    assert expected.items() <= environment.items()
    assert environment["parameters"] > 100_000
    assert environment["total_bytes"] > 2**30


def test_driver_version(tmp_path: Path) -> None:
    text = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\nGCC 12\n"
    (tmp_path / "version").write_text(text)
    assert driver_version(tmp_path / "version") == "550.54.15"
    (tmp_path / "open").write_text(text.replace("Kernel Module ", "Open Kernel Module for x86_64"))
    assert driver_version(tmp_path / "open") == "550.54.15"
    assert driver_version(tmp_path / "missing") is None


def check_speeds_on_console(text: str, knee: int, timed: dict[int, float]) -> None:
    """A row for each size, the knee named, and one line for each size while it is timed."""
    before, table = text.split("Samples per second")
    best = max(timed.values())
    for size, speed in timed.items():
        marks = {"knee": size == knee, "fastest": speed == best}
        cells = ["train", str(size), f"{speed:.4g}", f"{speed / best:.0%}"]
        last = ", ".join(name for name, applies in marks.items() if applies)
        assert re.search("│ +" + " +│ +".join(map(re.escape, cells)) + rf" │ {last} *│", table)
        assert before.count(f"train, timing: batch size {size}: ") == 1
    assert f"knee of train: batch size {knee}, the smallest within 5 % of the best samples per second" in text


@pytest.mark.slow
@pytest.mark.usefixtures("few_timed_steps")
@pytest.mark.parametrize("ending", ["png", pytest.param("svg", marks=pytest.mark.slow)])
def test_throughput_and_pictures(run: Run, tmp_path: Path, ending: str) -> None:
    outcome = run(
        "analyze", *SMALL, "--fractions", "0.9", "--max-bs", "20", "--modes", "train", "--throughput",
        "--plot", f"sizes.{ending}",
    )  # fmt: skip
    found = read(outcome, tmp_path / "batch_sizes.json")
    curve = found["throughput"]["train"]
    timed = {timing["batch_size"]: timing["samples_per_s"] for timing in curve["timings"]}
    assert len(timed) >= 3
    assert curve["knee"] in timed
    assert timed[curve["knee"]] >= 0.9 * max(timed.values())
    assert found["results"][0]["samples_per_s"] == pytest.approx(timed[20], abs=0.001)
    check_speeds_on_console(outcome.out, curve["knee"], timed)
    if ending == "svg":
        svg = ElementTree.parse(tmp_path / "sizes.svg").getroot()
        check_svg(svg, found)
        labels = ["".join(text.itertext()).strip() for text in svg.iter(f"{SVG}text")]
        assert {"train: throughput", f"knee: {curve['knee']}"} <= {*labels}
        titles = {title.text for title in svg.iter(f"{SVG}title")}
        assert {f"train, batch size {n}: {speed:.4g} samples/s" for n, speed in timed.items()} <= titles
        return
    image = np.asarray(Image.open(tmp_path / "sizes.png").convert("RGBA")).astype(int)
    assert image[0, 0, 3] == 0, "the ground is transparent"
    ink = image[image[..., 3] > 200][:, :3]
    for colour in ((0, 114, 178), (213, 94, 0), (0, 158, 115), (204, 121, 167)):
        assert (abs(ink - colour).max(axis=1) < 8).sum() > 40
    for ground in (np.array([255, 255, 255]), np.array([13, 17, 23])):
        grey = ink[abs(ink - ink.mean(axis=1, keepdims=True)).max(axis=1) < 3]
        text = np.median(grey, axis=0)
        assert contrast(text, ground) > 3.5


def contrast(a: np.ndarray, b: np.ndarray) -> float:
    """Ratio of relative luminances, WCAG 2.1."""

    def luminance(colour: np.ndarray) -> float:
        share = colour / 255
        linear = np.where(share <= 0.03928, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)
        return float(linear @ [0.2126, 0.7152, 0.0722])

    light, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.slow
@pytest.mark.usefixtures("few_timed_steps")
def test_a_fraction_at_which_nothing_fits_does_not_end_the_others(run: Run, tmp_path: Path) -> None:
    outcome = run("analyze", *WIDE, "--fractions", "0.1,1.0", "--modes", "train", *limit(30))
    none, some = read(outcome, tmp_path / "batch_sizes.json")["results"]
    assert (none["batch_size"], none["peak_bytes"], none["breakdown"]) == (None, None, None)
    assert "no batch size fits" in none["reason"]
    assert some["batch_size"] > 4
    assert "no batch size fits" in outcome.out
    assert outcome.out.count("# 100% of the memory") == 1
    assert "# 10% of the memory" not in outcome.out


def test_why_nothing_fits_stands_below_the_sizes_and_train_comes_first() -> None:
    speeds: dict[Mode, Speeds] = {"train": Speeds(), "val": Speeds()}
    rows = []
    for mode in speeds:
        rows.append(Row(mode, 0.9, 8, peak_bytes=MIB, breakdown=Breakdown(activations=MIB)))
        rows += [Row(mode, share, reason=f"{mode} lacks memory at {share}") for share in (0.5, 0.4)]
    console, output = plain_console()
    show(Analysis(rows=rows, speeds=speeds), console)
    text = output.getvalue()
    parts = (
        "Batch sizes",
        "train lacks memory at 0.5",
        "val lacks memory at 0.5",
        "Memory at the train sizes",
    )
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    assert "at 0.4" not in text, "the largest fraction says it for the others"
    assert "Samples per second" not in text, "nothing was timed"


def test_the_knee_is_the_smallest_fast_size_of_all_that_were_timed() -> None:
    """Also of those that are timed after the knee was looked for: sizes of further fractions."""
    speeds = Speeds({size: Timing(size, 1.0, rate) for size, rate in ((64, 96.0), (121, 100.0), (61, 97.0))})
    assert speeds.knee is None, "sizes between were not looked for"
    speeds.covers_knee = True
    assert speeds.knee == 61
    speeds.timings[61] = Timing(61, 1.0, 94.0)
    assert speeds.knee == 64


def test_nothing_fits_at_any_fraction(run: Run, tmp_path: Path) -> None:
    outcome = run("analyze", *SMALL, "--fractions", "0.5,0.9", "--memory-limit-gb", "0.05", "--plot", "a.svg")
    assert outcome.code == 3
    assert "no batch size fits" in outcome.err
    assert "Traceback" not in outcome.err
    found = json.loads((tmp_path / "batch_sizes.json").read_text())
    assert [row["batch_size"] for row in found["results"]] == [None] * 4
    assert (tmp_path / "a.svg").exists()


def test_bounds_without_a_size_in_one_mode(run: Run, tmp_path: Path) -> None:
    """31 validation samples, and no size below 40: training goes on."""
    outcome = run("analyze", *SMALL, "--fractions", "0.9", "--min-bs", "40", "--max-bs", "42")
    train, val = read(outcome, tmp_path / "batch_sizes.json")["results"]
    assert train["batch_size"] == 42
    assert val["batch_size"] is None
    assert "dataset" in val["reason"]


@pytest.mark.slow
def test_remedies_are_measured(run: Run, tmp_path: Path) -> None:
    outcome = run(
        "analyze", *SMALL, "MODEL.NAME=test_vit", "DATA.IMG_SIZE=128", "--fractions", "0.9", "--max-bs", "40",
        "--remedies", "DATA.DATASET.NUM_SAMPLES_VAL=96",
    )  # fmt: skip
    train, val = read(outcome, tmp_path / "batch_sizes.json")["results"]
    remedies = {remedy["name"]: remedy for remedy in train["remedies"]}
    assert [*remedies] == ["bf16", "gradient_checkpointing", "accumulation"]
    for remedy in remedies.values():
        assert remedy["reason"] is None
        assert remedy["saved_bytes"] == remedy["peak_bytes_before"] - remedy["peak_bytes"]
        percent = 100 * remedy["saved_bytes"] / remedy["peak_bytes_before"]
        assert remedy["saved_percent"] == pytest.approx(percent, abs=0.01)
    for name in ("gradient_checkpointing", "accumulation"):
        assert remedies[name]["saved_bytes"] > 0.2 * train["breakdown"]["activations"]["bytes"]
    assert remedies["accumulation"]["batch_size"] == train["batch_size"] // 2
    assert remedies["accumulation"]["keys"] == {"TRAIN.ACCUMULATION_STEPS": 2}
    reasons = {remedy["name"]: remedy["reason"] for remedy in val["remedies"]}
    assert reasons["bf16"] is None
    assert "validation" in reasons["gradient_checkpointing"]
    assert "validation" in reasons["accumulation"]
    assert "Remedies, measured" in outcome.out


def test_remedies_that_do_not_apply_say_why(run: Run, tmp_path: Path) -> None:
    outcome = run(
        "analyze", *WIDE, "MODEL.width=64", "TRAIN.AMP=bf16", "--fractions", "0.9", "--modes", "train",
        "--max-bs", "1", "--remedies",
    )  # fmt: skip
    row = read(outcome, tmp_path / "batch_sizes.json")["results"][0]
    reasons = {remedy["name"]: remedy["reason"] for remedy in row["remedies"]}
    assert reasons["bf16"] == "TRAIN.AMP is bf16 already"
    assert "no gradient checkpointing" in reasons["gradient_checkpointing"]
    assert reasons["accumulation"] == "a single sample cannot be halved"
    assert all(remedy["saved_bytes"] is None for remedy in row["remedies"])


def test_an_interrupted_search_keeps_its_trials(run: Run, tmp_path: Path) -> None:
    """The model sends the signal in the second trial that counts: two steps each, after two that warm up."""
    outcome = run(
        "analyze", *WIDE, "MODEL.interrupt_at=6", "--fractions", "0.5,0.9", "--max-bs", "500",
        "MODEL.width=64", "--plot", "a.svg",
    )  # fmt: skip
    assert outcome.code == 130
    found = json.loads((tmp_path / "batch_sizes.json").read_text())
    assert found["interrupted"] is True
    (row,) = found["results"]
    assert (row["memory_fraction"], row["limited_by"], row["certified"]) == (0.9, "interrupted", False)
    assert [trial["batch_size"] for trial in row["trials"]] == [16]
    assert (row["batch_size"], row["peak_bytes"]) == (16, row["trials"][0]["peak_bytes"])
    assert "interrupted" in outcome.out
    check_svg(ElementTree.parse(tmp_path / "a.svg").getroot(), found)


def test_ctrl_c_writes_what_has_been_measured(tmp_path: Path) -> None:
    child = Child(
        tmp_path, "analyze", *WIDE, "MODEL.width=16384", "--fractions", "0.1,0.2,0.3,0.4,0.5", "--max-bs",
        "64", "--throughput", "--output", "sizes.jsonl",
    )  # fmt: skip
    child.wait_for(lambda: "of the memory: batch size" in child.log.read_text())
    assert child.end(signal.SIGINT) == 130
    rows = [json.loads(line) for line in (tmp_path / "sizes.jsonl").read_text().splitlines()]
    assert 1 <= len(rows) < 10
    assert any(row["batch_size"] == 64 for row in rows)
    assert "interrupted; what has been measured so far is written" in child.log.read_text()
    assert "Traceback" not in child.log.read_text()


def test_the_tool_works_from_another_folder(tmp_path: Path) -> None:
    (tmp_path / "my_exp.yaml").write_text(
        "MODEL: {NAME: test_resnet}\nDATA: {DATASET: {NAME: synthetic}, IMG_SIZE: 32}\n"
        "EXPERIMENT: {DEVICE: cpu}\n"
    )
    tool = ROOT / "tools/analyze_batch_sizes.py"
    done = forks.python(
        tool, "--cfg", "my_exp.yaml", "--fractions", "0.6,0.8", "--modes", "train,val",
        "DATA.AUTOBATCH.MAX_BATCH_SIZE", "4", cwd=tmp_path,
    )  # fmt: skip
    assert done.code == 0, done.err
    assert len(json.loads((tmp_path / "batch_sizes.json").read_text())["results"]) == 4
    # A new interpreter finds the package too.
    subprocess.run([sys.executable, str(tool), "--help"], cwd=tmp_path, capture_output=True, check=True)
