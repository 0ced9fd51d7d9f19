"""Predicted analyses: the memory of GPUs that are not there, from steps that are traced."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from linnaeus.autobatch.protocol import RankStatus
from linnaeus.commands.analyze.options import Options, read
from linnaeus.commands.analyze.predict import target_of, world_of
from linnaeus.commands.analyze.traced import PredictedStep, build_on_meta, predicted_step
from linnaeus.commands.session import Setup
from linnaeus.config.schema import Config
from linnaeus.data.datasets import build_data
from linnaeus.data.taxonomy import Level, Taxonomy
from linnaeus.memory.gpus import GIB, GPUS
from linnaeus.memory.predict import MARGIN, largest_within
from linnaeus.memory.storages import StorageTracer
from linnaeus.training.metrics import ClassificationMetrics, MetricsMemory
from tests.helpers.consoles import plain_console
from tests.helpers.runs import Outcome, Run, freeze_what_is_there

MIB = 1024**2
BASE = 600 * MIB
IMAGES = (
    "MODEL.NAME=test_resnet", "DATA.DATASET.NAME=synthetic", "DATA.DATASET.NUM_SAMPLES=400000",
    "DATA.DATASET.NUM_SAMPLES_VAL=400000", "DATA.DATASET.NUM_CLASSES=[2,6]", "DATA.IMG_SIZE=64",
    "DATA.AUTOBATCH.MAX_BATCH_SIZE=400000",
)  # fmt: skip
POINTS = ("DATA.DATASET._target_=tests.test_run.Points", "DATA.DATASET.length=500")
WIDE = (f"MODEL._target_={__name__}.Wide", *POINTS)
GROWING = (
    f"MODEL._target_={__name__}.Growing", *POINTS, "DATA.DATASET.length=5000",
    "DATA.AUTOBATCH.MAX_BATCH_SIZE=5000",
)  # fmt: skip
TINY = (
    f"MODEL._target_={__name__}.Tiny", "DATA.DATASET.NAME=synthetic", "DATA.DATASET.NUM_SAMPLES=9999",
    "DATA.DATASET.NUM_CLASSES=[6]", "DATA.IMG_SIZE=64",
)  # fmt: skip
ROOT = Path(__file__).parents[3]
SVG = "{http://www.w3.org/2000/svg}"


class Wide(nn.Module):
    """Some MiB of parameters and little else."""

    def __init__(self, num_classes: int, width: int = 2**22) -> None:
        super().__init__()
        self.head = nn.Linear(2, num_classes)
        self.scale = nn.Parameter(torch.ones(width))
        self.register_buffer("shift", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) + (self.scale + self.shift).mean()


class Growing(Wide):
    """A MiB of activations per sample and layer, in few operations: quick to trace."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes, width=2**18)

    def forward(self, x: Tensor) -> Tensor:
        wide = (x.sum(1, keepdim=True) * self.scale + self.shift).sigmoid().tanh()
        return self.head(x) + wide.mean(1, keepdim=True)


class Tiny(nn.Module):
    """A few layers whose parts may be run again in the backward pass."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.GELU(), nn.Dropout(0.1), nn.Tanh())
            for _ in range(3)
        )
        self.head = nn.Linear(32, num_classes)
        self.is_checkpointed = False

    def set_grad_checkpointing(self, enable: bool) -> None:
        self.is_checkpointed = enable

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        return self.head(x.mean((2, 3)))


class Peeking(Wide):
    """Looks at a value, as no trace can."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * x.mean().item()


class Numerate(Wide):
    """Needs numbers while it is built."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes, width=int(torch.tensor(2.0**22).item()))


def read_json(outcome: Outcome, path: Path = Path("batch_sizes.json")) -> dict[str, Any]:
    assert outcome.code == 0, outcome.err
    return dict(json.loads(path.read_text()))


def sizes(found: dict[str, Any], mode: str, device: str) -> list[int]:
    return [row["batch_size"] for row in found["results"] if (row["mode"], row["device"]) == (mode, device)]


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever joins takes the machine's device."""

    def refuse(*_: object) -> None:
        raise AssertionError("the machine's device is not to be used")

    monkeypatch.setattr("linnaeus.commands.session.join", refuse)
    monkeypatch.setattr("linnaeus.memory.device.device_memory", refuse)


@pytest.mark.usefixtures("no_device")
def test_one_prediction_answers_for_several_devices(run: Run) -> None:
    outcome = run(
        "analyze", *IMAGES, "--predict", "--gpu", "H100,NVIDIA GeForce RTX 4090", "--device-memory-gb", "4",
        "--fractions", "0.5,0.9", "--plot", "sizes.svg", "EXPERIMENT.DEVICE=cuda", "MODEL.WEIGHTS=not.here",
    )  # fmt: skip
    found = read_json(outcome)
    devices = ["h100-80gb", "rtx-4090", "4 GiB"]
    places = [(row["mode"], row["device"], row["memory_fraction"]) for row in found["results"]]
    assert places == [
        (mode, device, part) for mode in ("train", "val") for device in devices for part in (0.5, 0.9)
    ]
    for row in found["results"]:
        total_bytes = GPUS.get(row["device"], 4 * GIB)
        assert (row["predicted"], row["margin"], row["device_bytes"]) == (True, MARGIN, total_bytes)
        assert (row["certified"], row["trials"], row["samples_per_s"]) == (False, [], None)
        assert row["budget_bytes"] == int(row["memory_fraction"] * total_bytes)
        assert BASE < row["peak_bytes"] <= row["budget_bytes"]
        assert 0.8 * row["batch_size"] < row["safe_batch_size"] < row["batch_size"]
        parts = {name: part["bytes"] for name, part in row["breakdown"].items()}
        assert sum(parts.values()) == row["peak_bytes"]
        assert parts["optimizer_state"] == pytest.approx(2 * parts["parameters"], abs=1000)
        assert parts["rest"] == BASE
    for mode in ("train", "val"):
        all_sizes = [sizes(found, mode, device) for device in devices]
        assert all(small < large for small, large in all_sizes), "a larger budget gives a larger size"
        assert all_sizes == sorted(all_sizes, reverse=True), "and so does a larger device"
        peaks = [point["peak_bytes"] for point in found["curves"][mode]]
        assert peaks == sorted(peaks)
    environment = found["environment"]
    expected = {
        "predicted": True, "base_bytes": BASE, "base": "assumed", "margin": MARGIN,
        "model": "test_resnet", "world_size": 1,
    }  # fmt: skip
    assert expected.items() <= environment.items()
    assert environment["not_compared"] == ["AdamW", "validation"]
    page = (ROOT / "docs/prediction.md").read_text()
    figures = re.findall(r"[\d.]+(?: %| GB| times)", environment["accuracy"])
    assert len(figures) == 5
    for figure in figures:
        assert figure in page.replace("\n", " ")
    assert environment["devices"][2] == {"name": "4 GiB", "total_bytes": 4 * GIB}
    check_console(outcome.out, found)
    check_picture(Path("sizes.svg"), found)


@pytest.mark.parametrize("is_predicted", [True, False])
def test_the_first_line_says_what_memory_depends_on(run: Run, is_predicted: bool) -> None:
    plain = (
        "analyze",
        *TINY,
        "--modes",
        "val",
        "--max-bs",
        "4",
        "--fractions",
        "0.9",
        "EXPERIMENT.DEVICE=cpu",
    )
    if is_predicted:
        plain += ("--predict", "--gpu", "t4")
    on = ("TRAIN.GRADIENT_CHECKPOINTING=True", "TRAIN.ACCUMULATION_STEPS=4", "TRAIN.EMA.ENABLED=True")
    first, second = (
        next(line for line in run(*plain, *more).out.splitlines() if "parameters" in line)
        for more in ([], [*on, "DATA.IMG_SIZE=[32,48]"])
    )
    assert "parameters, 64×64 pixels, 6 classes, float32, AdamW" in first
    for text in ("gradient checkpointing", "accumulation", "EMA"):
        assert text not in first
    settings = "float32, AdamW, gradient checkpointing, 4 accumulation steps, EMA"
    assert f"parameters, 32×48 pixels, 6 classes, {settings}" in second


def check_console(text: str, found: dict[str, Any]) -> None:
    """Everything says that it is predicted, and the sizes to paste are those with the margin."""
    assert "predicted, not measured, for h100-80gb (79.05 GiB), rtx-4090 (23.64 GiB), 4 GiB;" in text
    assert "Batch sizes, predicted" in text
    assert "with 15 % margin" in text
    assert "measured on" not in text
    assert "not compared with a GPU: AdamW, validation; see docs/prediction.md" in text
    assert "certified" not in text, "nothing is, where nothing has run"
    for row in found["results"]:
        cells = (
            row["device"], row["mode"], f"{row['memory_fraction']:.0%}", row["batch_size"],
            row["safe_batch_size"], "memory", f"{row['peak_bytes'] / GIB:.3f}",
        )  # fmt: skip
        assert re.search(" +│ +".join(map(str, cells)), text)
    blocks = text.split("To paste into a configuration:")[1].strip().split("\n\n")
    assert len(blocks) == 6
    for block, train, val in zip(blocks, found["results"][:6], found["results"][6:], strict=True):
        assert block.startswith(f"# {train['memory_fraction']:.0%} of {train['device']}: predicted")
        assert "with 15 % margin" in block
        expected = {"BATCH_SIZE": train["safe_batch_size"], "BATCH_SIZE_VAL": val["safe_batch_size"]}
        assert yaml.safe_load(block) == {"DATA": expected}


def check_picture(path: Path, found: dict[str, Any]) -> None:
    svg = ElementTree.parse(path).getroot()
    labels = {"".join(text.itertext()).strip() for text in svg.iter(f"{SVG}text")}
    fits = {"size that fits with the margin", "size that fits without"}
    assert {"predicted", "budget", "90% of h100-80gb", *fits} <= labels
    assert any("margin 15%" in label and "0.59 GiB" in label and "(assumed)" in label for label in labels)
    assert not any("measured" in label for label in labels)
    titles = [title.text or "" for title in svg.iter(f"{SVG}title")]
    for row in found["results"]:
        memory = f"{row['memory_fraction']:.0%} of {row['device']}"
        peak = f"{row['safe_peak_bytes'] / GIB:.3f} GiB"
        size = f"batch size {row['safe_batch_size']}, {peak}"
        assert f"{row['mode']}, chosen for {memory}: {size}" in titles
        without = f"{row['mode']}, {memory}, without margin: batch size {row['batch_size']}, predicted "
        assert f"{without}{row['peak_bytes'] / GIB:.3f} GiB" in titles
        assert row["safe_peak_bytes"] * MARGIN <= row["budget_bytes"] + 1


def test_the_next_size_does_not_fit(run: Run) -> None:
    small = ("analyze", *GROWING, "--predict", "--device-memory-gb", "2", "--fractions", "0.8")
    found = read_json(run(*small))
    train, val = (row["batch_size"] for row in found["results"])
    for mode, size in (("train", train), ("val", val)):
        outcome = run(*small, "--modes", mode, "--min-bs", str(size + 1))
        assert outcome.code == 3
        assert f"prediction ({mode}): no batch size fits" in outcome.err
        (taken,) = re.findall(rf"batch size {size + 1} takes (\d.\d\d) GiB", outcome.err)
        assert 1.60 <= float(taken) < 1.63


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_tables_for_programs(run: Run, ending: str) -> None:
    outcome = run(
        "analyze", *GROWING, "--predict", "--gpu", "t4,l4", "--modes", "val", "--fractions", "0.5",
        "--output", f"sizes.{ending}",
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    lines = Path(f"sizes.{ending}").read_text().splitlines()
    rows = list(csv.DictReader(lines)) if ending == "csv" else [json.loads(line) for line in lines]
    assert [(str(row["predicted"]), row["device"]) for row in rows] == [("True", "t4"), ("True", "l4")]
    for row in rows:
        assert int(row["safe_batch_size"]) < int(row["batch_size"])
        assert float(row["margin"]) == MARGIN
        assert (row["model"].rpartition(".")[2], row["precision"], row["optimizer"]) == (
            "Growing", "float32", "AdamW"
        )  # fmt: skip
        assert (int(row["base_bytes"]), row["base"]) == (BASE, "assumed")
        assert not row["reason"]


@pytest.mark.slow
def test_a_table_says_why_there_is_no_size(run: Run) -> None:
    outcome = run(
        "analyze", *IMAGES, "--predict", "--device-memory-gb", "0.5,8", "--modes", "train", "--fractions",
        "0.9", "--output", "sizes.csv", "--remedies",
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    none, some = csv.DictReader(Path("sizes.csv").read_text().splitlines())
    assert (none["batch_size"], some["reason"], some["image_size"]) == ("", "", "64x64")
    assert "no batch size fits" in none["reason"]
    assert "the effects of remedies are in a .json file only" in outcome.out


BOUNDS = [
    (["--max-bs", "6"], (6, "max_batch_size"), (6, "max_batch_size")),
    (["DATA.DATASET.length=96"], (96, "dataset"), (96, "dataset")),
    (["DATA.DATASET.length=96", "--world-size", "2"], (48, "dataset"), (48, "dataset")),
]  # fmt: skip


@pytest.mark.parametrize(("argv", "train", "val"), BOUNDS)
def test_bounds(run: Run, argv: list[str], train: tuple[int, str], val: tuple[int, str]) -> None:
    outcome = run("analyze", *GROWING, "--predict", "--gpu", "t4", "--fractions", "0.9", *argv)
    rows = read_json(outcome)["results"]
    assert [(row["batch_size"], row["limited_by"]) for row in rows] == [train, val]
    assert all(row["safe_batch_size"] == row["batch_size"] for row in rows)


def test_sizes_are_multiples_and_a_limit_counts_as_the_memory(run: Run) -> None:
    base = ("analyze", *GROWING, "--predict", "--gpu", "a30", "--modes", "train", "--fractions", "0.8")
    (free,) = read_json(run(*base))["results"]
    (limited,) = read_json(run(*base, "--memory-limit-gb", "2", "DATA.AUTOBATCH.MULTIPLE_OF=32"))["results"]
    assert limited["batch_size"] % 32 == limited["safe_batch_size"] % 32 == 0
    assert limited["budget_bytes"] == BASE + int(0.8 * 2 * GIB)
    assert limited["peak_bytes"] <= limited["budget_bytes"]
    assert limited["batch_size"] < free["batch_size"] / 5
    assert (limited["memory_limit_gb"], free["memory_limit_gb"]) == (2, None)


def test_a_limit_is_named_where_it_is_what_bounds(run: Run) -> None:
    outcome = run(
        "analyze", *GROWING, "--predict", "--gpu", "t4,a30,l4", "--modes", "train", "--fractions", "0.8",
        "--memory-limit-gb", "16", "--plot", "sizes.svg",
    )  # fmt: skip
    rows = read_json(outcome)["results"]
    assert [row["memory_limit_gb"] for row in rows] == [None, 16, 16]
    assert "each process limited to 16 GiB" in outcome.out
    for text in (
        "# 80% of t4: predicted",
        "# 80% of 16 GiB limit on a30: predicted",
        "80% of 16 GiB limit │",
    ):
        assert text in outcome.out
    assert "80% of a30" not in outcome.out
    svg = ElementTree.parse("sizes.svg").getroot()
    labels = ["".join(text.itertext()).strip() for text in svg.iter(f"{SVG}text")]
    assert labels.count("80% of 16 GiB limit") == 1
    assert "80% of t4" in labels


def test_a_limit_above_the_device_bounds_nothing(run: Run) -> None:
    base = ("analyze", *GROWING, "--predict", "--gpu", "t4", "--modes", "train", "--fractions", "0.8")
    outcome = run(*base, "--memory-limit-gb", "64")
    (row,) = read_json(outcome)["results"]
    assert row["budget_bytes"] == int(0.8 * GPUS["t4"])
    assert "for t4 (14.56 GiB) (the limit of 64 GiB is above that and bounds nothing)" in outcome.out
    assert "80% of 64" not in outcome.out


def test_which_limit_would_do(run: Run) -> None:
    argv = ("analyze", *WIDE, "--predict", "--gpu", "t4", "--modes", "train", "--fractions", "0.5")
    outcome = run(*argv, "--memory-limit-gb", "0.01")
    assert outcome.code == 3
    (needed,) = re.findall(r"a limit of (\d+\.\d\d) GiB would do, with the margin of 15 %", outcome.err)
    (row,) = read_json(run(*argv, "--memory-limit-gb", needed))["results"]
    assert row["safe_batch_size"] is not None
    (row,) = read_json(run(*argv, "--memory-limit-gb", f"{float(needed) - 0.01:.2f}"))["results"]
    assert row["safe_batch_size"] is None


def test_bounds_that_leave_no_size(run: Run) -> None:
    argv = (
        "DATA.DATASET.length=31",
        "--gpu",
        "t4",
        "--fractions",
        "0.9",
        "DATA.AUTOBATCH.MIN_BATCH_SIZE_VAL=40",
    )
    train, val = read_json(run("analyze", *GROWING, "--predict", *argv))["results"]
    assert train["batch_size"] == 31
    assert (val["batch_size"], val["safe_batch_size"]) == (None, None)
    assert "MIN_BATCH_SIZE_VAL is 40, but dataset allows no more than 31" in val["reason"]


def test_where_nothing_fits_the_error_says_which_memory_would_do(run: Run) -> None:
    argv = ("analyze", *WIDE, "--predict", "--modes", "train", "--fractions", "0.5")
    outcome = run(*argv, "--device-memory-gb", "1")
    assert outcome.code == 3
    assert "0.50 GiB, 50% of 1 GiB" in outcome.err
    assert "such as rtx-3080-10gb" in outcome.err
    (needed,) = re.findall(r"a device of (\d+\.\d\d) GiB would do, with the margin of 15 %", outcome.err)
    (row,) = read_json(run(*argv, "--device-memory-gb", needed))["results"]
    assert row["safe_batch_size"] is not None
    outcome = run(*argv, "--device-memory-gb", f"{float(needed) - 0.01:.2f}")
    (row,) = read_json(outcome)["results"]
    assert (row["batch_size"] is not None, row["safe_batch_size"]) == (True, None)
    assert f"no size fits with the margin; a device of {needed} GiB would do" in outcome.out


def test_a_size_that_fits_only_without_the_margin(run: Run) -> None:
    outcome = run(
        "analyze", *WIDE, "--predict", "--modes", "val", "--fractions", "1", "--device-memory-gb", "0.7"
    )
    (row,) = read_json(outcome)["results"]
    assert row["batch_size"] is not None
    assert row["safe_batch_size"] is None
    assert "val, 100% of 0.7 GiB: no size fits with the margin" in outcome.out
    assert "To paste" not in outcome.out


def test_the_picture_where_nothing_fits(run: Run) -> None:
    """It shows how much is missing, and a title that is wider than the panel goes on in a second line."""
    gpus = ",".join(f"0.{number}" for number in range(30, 50))
    assert run(
        "analyze", *IMAGES, "--predict", "--device-memory-gb", gpus, "--modes", "train", "--fractions", "0.5",
        "--plot", "a.svg",
    ).code == 3  # fmt: skip
    svg = ElementTree.parse("a.svg").getroot()
    titles = [title.text or "" for title in svg.iter(f"{SVG}title")]
    assert any(re.fullmatch(r"train, batch size 2: predicted \d.*", title) for title in titles)
    lines = ["".join(text.itertext()).strip() for text in svg.iter(f"{SVG}text")]
    (first,) = [number for number, line in enumerate(lines) if line.startswith("test_resnet, 64×64 pixels")]
    assert max(map(len, lines[first : first + 3])) <= 76
    assert "0.49 GiB" in lines[first + 3] or "0.49 GiB" in lines[first + 2] or "0.49 GiB" in lines[first + 4]


def test_gradient_buckets_are_a_part(run: Run) -> None:
    base = ("analyze", *WIDE, "--predict", "--gpu", "t4", "--fractions", "0.9")
    one, two = (run(*base, *more) for more in ([], ["--world-size", "2"]))
    assert "gradient buckets" not in one.out
    assert "gradient buckets" in two.out
    plain = {
        row["mode"]: row["breakdown"] for row in json.loads(Path("batch_sizes.json").read_text())["results"]
    }
    for mode in ("train", "val"):
        assert plain[mode]["buckets"]["bytes"] == pytest.approx(WIDTH, abs=1000)
        assert plain[mode]["gradients"]["bytes"] == 0, "they are views of the buckets"
        assert plain[mode]["activations"]["bytes"] < 4 * WIDTH


def test_what_limits_a_size_beside_memory(run: Run) -> None:
    images = [each for each in IMAGES if "MAX_BATCH_SIZE" not in each]
    outcome = run(
        "analyze", *images, "--predict", "--gpu", "a30,l4", "--fractions", "0.5,0.9", "--world-size", "3",
        "DATA.DATASET.NUM_SAMPLES_VAL=64",
    )  # fmt: skip
    rows = read_json(outcome)["results"]
    note = (
        "val: the dataset limits the batch size: 22 samples, 64 / 3 processes (DATA.DATASET.NUM_SAMPLES_VAL)"
    )
    assert outcome.out.count(note) == 1
    assert [row["notes"] for row in rows if row["mode"] == "val"] == [[note]] * 4
    assert not any(row["notes"] for row in rows if row["mode"] == "train")


def test_a_device_is_needed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    outcome = run("analyze", *IMAGES, "--predict")
    assert outcome.code == 2
    assert "this machine has no GPU" in outcome.err
    assert "--gpu NAME" in outcome.err
    assert "--device-memory-gb X" in outcome.err
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert "EXPERIMENT.DEVICE is cpu" in run("analyze", *IMAGES, "--predict", "EXPERIMENT.DEVICE=cpu").err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_without_options_it_is_this_machines_gpu() -> None:
    _, config = parsed()
    target = target_of(Options(), config)
    (gpu,) = target.gpus
    assert gpu.name == torch.cuda.get_device_name()
    assert gpu.total_bytes == torch.cuda.mem_get_info()[1]
    assert target.is_measured
    assert 0 < target.base_bytes < gpu.total_bytes


BAD = [
    (["--gpu", "t4"], ["--gpu: needs --predict"]),
    (["--device-memory-gb=24"], ["--device-memory-gb: needs --predict"]),
    (["--world-size", "2"], ["--world-size: needs --predict"]),
    (["--predict", "--gpu", "rtx-409"], ["'rtx-409'", "did you mean rtx-4090", *GPUS, "--device-memory-gb"]),
    (
        ["--predict", "--gpu", "b20,rtx409,t4,a100,zx"],
        ["'b20' (did you mean b200?), 'rtx409' (did you mean rtx-4090?) and 'zx' are no GPUs", "two sizes"],
    ),
    (
        ["--predict", "--device-memory-gb", "24GB,-3,8,nan,9e9"],
        ["'24GB' is not", "'-3' is not", "'nan' is not", "9e+09 GiB is more than any device has"],
    ),
    (["--predict", "--gpu", "a100"], ["two sizes", "a100-40gb or a100-80gb"]),
    (["--predict", "--gpu", "t4,,l4"], ["--gpu", "''"]),
    (["--predict", "--gpu"], ["--gpu: needs a value"]),
    (["--predict", "--device-memory-gb", "24,-1"], ["--device-memory-gb", "-1", "not a positive"]),
    (["--predict", "--gpu", "t4", "--throughput"], ["--throughput: not with --predict", "speed"]),
    (["--predict", "--gpu", "t4", "--steps=3"], ["--steps: not with --predict", "trials"]),
    (["--predict", "--gpu", "t4", "--strategy", "guided"], ["--strategy: not with --predict", "search"]),
    (["--throughput", "--predict", "--strategy=binary", "--gpu=t5"], ["3 problems"]),
]  # fmt: skip


@pytest.mark.parametrize(("argv", "texts"), BAD, ids=[" ".join(argv) for argv, _ in BAD])
def test_mistakes(run: Run, tmp_path: Path, argv: list[str], texts: list[str]) -> None:
    outcome = run("analyze", *IMAGES, *argv)
    assert outcome.code == 2
    for text in texts:
        assert text in outcome.err
    assert outcome.err.count("known are") <= 1
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_traced_is_named(run: Run, tmp_path: Path) -> None:
    for mode, name in (("train", "training"), ("val", "validation")):
        outcome = run(
            "analyze",
            f"MODEL._target_={__name__}.Peeking",
            *POINTS,
            "--predict",
            "--gpu",
            "t4",
            "--modes",
            mode,
        )
        assert outcome.code == 2
        assert f"the {name} step cannot be traced without a GPU" in outcome.err
        assert "`.item()`" in outcome.err
        for cause in ("logging", "isnan", "clip_grad_norm_(error_if_nonfinite=True)", "boolean masks"):
            assert cause in outcome.err
        assert "Measure it instead" in outcome.err
        assert "Traceback" not in outcome.err
    assert not list(tmp_path.iterdir())


def test_remedies(run: Run) -> None:
    outcome = run(
        "analyze", *TINY, "--predict", "--gpu", "t4", "--fractions", "0.9",
        "--modes", "train", "--max-bs", "512", "--remedies", "OPTIMIZER.KWARGS.eps=1e-6",
    )  # fmt: skip
    (row,) = read_json(outcome)["results"]
    remedies = {remedy["name"]: remedy for remedy in row["remedies"]}
    assert [*remedies] == ["bf16", "gradient_checkpointing", "accumulation", "optimizer", "image_size"]
    for remedy in remedies.values():
        assert remedy["reason"] is None
        assert remedy["peak_bytes_before"] == row["peak_bytes"]
        assert remedy["saved_bytes"] > (0 if remedy["name"] != "optimizer" else -1)
    assert remedies["accumulation"]["batch_size"] == 256
    assert remedies["optimizer"]["keys"] == {"OPTIMIZER.NAME": "sgd", "OPTIMIZER.KWARGS": {}}
    assert remedies["image_size"]["keys"] == {"DATA.IMG_SIZE": 32}
    assert remedies["image_size"]["saved_percent"] > remedies["gradient_checkpointing"]["saved_percent"] / 2
    assert "Remedies, predicted" in outcome.out


@pytest.mark.slow
def test_what_fits_with_a_remedy_is_what_fits_in_the_changed_configuration(run: Run) -> None:
    argv = (
        "analyze", *TINY, "--predict", "--device-memory-gb", "4,16", "--fractions", "0.5,0.9", "--modes",
        "train", "DATA.AUTOBATCH.MAX_BATCH_SIZE=9999",
    )  # fmt: skip
    outcome = run(*argv, "--remedies")
    rows = read_json(outcome)["results"]
    for key, name in (("TRAIN.AMP=bf16", "bf16"), ("TRAIN.ACCUMULATION_STEPS=2", "accumulation")):
        changed = read_json(run(*argv, key))["results"]
        found = [next(each for each in row["remedies"] if each["name"] == name) for row in rows]
        assert [each["safe_batch_size"] for each in found] == [row["safe_batch_size"] for row in changed]
        for each, row in zip(found, rows, strict=True):
            size, memory = each["safe_batch_size"], f"90% of {row['device']}"
            is_shown = row["memory_fraction"] == 0.9
            assert bool(re.search(rf"{re.escape(key)} .* {size} in {memory}", outcome.out)) == is_shown
    table = outcome.out[outcome.out.index("Remedies, predicted") :]
    for line in re.findall(r"^│ train .*$", table, re.MULTILINE):
        assert line.count(" MiB") in (0, 2), "before and after in one unit"
        assert line.count(" GiB ") - line.count("% of ") in (0, 2)
    assert table.count("Remedies, predicted") == 1


def test_sizes_are_written_and_shown_before_the_remedies(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal that ends the process during the remedies loses none of the sizes."""
    argv = ("analyze", *TINY, "--predict", "--gpu", "t4", "--fractions", "0.9", "--modes", "train")
    seen: list[dict[str, Any]] = []

    def interrupt(*_: object) -> None:
        seen.append(json.loads(Path("batch_sizes.json").read_text()))
        raise KeyboardInterrupt

    monkeypatch.setattr("linnaeus.commands.analyze.predict.try_remedies", interrupt)
    outcome = run(*argv, "--remedies")
    assert outcome.code == 130
    (written,) = seen
    assert written["interrupted"]
    assert written["results"][0]["safe_batch_size"] > 1
    assert json.loads(Path("batch_sizes.json").read_text()) == written
    assert outcome.out.count("Batch sizes, predicted") == outcome.out.count("To paste") == 1
    assert outcome.out.index("To paste") < outcome.out.index("interrupted; what has been")


def test_remedies_that_do_not_apply_say_why(run: Run) -> None:
    argv = ("--gpu", "t4", "--fractions", "0.9", "--max-bs", "1", "--remedies", "OPTIMIZER.NAME=sgd")
    rows = read_json(run("analyze", *WIDE, "--predict", "TRAIN.AMP=bf16", *argv))["results"]
    train, val = ({remedy["name"]: remedy["reason"] for remedy in row["remedies"]} for row in rows)
    assert train["bf16"] == val["bf16"] == "TRAIN.AMP is bf16 already"
    assert "no gradient checkpointing" in train["gradient_checkpointing"]
    assert "validation" in val["gradient_checkpointing"]
    assert train["accumulation"] == "a single sample cannot be halved"
    assert train["optimizer"] == "OPTIMIZER.NAME is sgd already"
    assert train["image_size"] == "there is no smaller image to try"


def test_reasons_and_lines_of_remedies(run: Run) -> None:
    argv = ("--gpu", "t4,l4", "--fractions", "0.5,0.9", "--max-bs", "8", "--remedies", "--modes", "train")
    outcome = run("analyze", *WIDE, "--predict", *argv, "TRAIN.AMP=bf16")
    assert outcome.code == 0, outcome.err
    assert outcome.out.count("TRAIN.AMP=bf16:") == 1, "for all devices and fractions"
    lines = re.findall(r"remedies, train: (\w+)$", outcome.out, re.MULTILINE)
    assert lines == ["gradient_checkpointing", "accumulation", "optimizer"]


# What of a run is in its traces.


def parsed(*argv: str) -> tuple[Options, Config]:
    request = read(["--predict", "--gpu", "t4", *(argv or IMAGES)])
    assert not isinstance(request, str)
    return request


def predicted(mode: str, *argv: str) -> PredictedStep:
    options, config = parsed(*argv)
    data = build_data(config.DATA, seed=0)
    setup = Setup(config, data, world_of(options), RankStatus(), plain_console()[0])
    search = build_on_meta(setup)
    assert all(parameter.is_meta for parameter in search.assembly.model.parameters())
    return predicted_step(search, mode, BASE)  # type: ignore[arg-type]


WIDTH = 16 * MIB
"""Bytes of one copy of the parameters, and of the buffers, of `Wide`."""
ADDED = [
    ("average", ["TRAIN.EMA.ENABLED=True"], 2 * WIDTH),
    ("two processes", ["--world-size", "2"], 0),
    ("SGD", ["OPTIMIZER.NAME=sgd"], -WIDTH),
    ("float16 and clipping", ["TRAIN.AMP=fp16", "TRAIN.CLIP_GRAD_NORM=1"], 0),
]  # fmt: skip


@pytest.mark.parametrize(("argv", "num_bytes"), [row[1:] for row in ADDED], ids=[row[0] for row in ADDED])
def test_what_is_held(argv: list[str], num_bytes: int) -> None:
    """Between the steps, by a model that is nearly all parameters: validation is a row of held tensors."""
    plain, other = (predicted("val", *WIDE, *more).prediction.peak_bytes(1) for more in ([], argv))
    bucket = WIDTH if "--world-size" in argv else 0
    assert other - plain == pytest.approx(num_bytes + bucket, abs=3 * MIB)


def test_validation_is_beside_what_training_keeps() -> None:
    step = predicted("val", *WIDE)
    counted = step.state
    assert counted.optimizer_state == pytest.approx(2 * WIDTH, abs=1000)
    held_bytes = counted.parameters + counted.buffers + counted.optimizer_state
    assert step.prediction.peak_bytes(1) > BASE + held_bytes


def test_what_metrics_hold() -> None:
    """Against the metrics themselves, with the tensors that they allocate on the CPU."""
    num_samples, num_classes = 256, 500
    taxonomy = Taxonomy((Level("species", tuple(map(str, range(num_classes)))),))
    metrics = ClassificationMetrics(taxonomy)
    logits, labels = torch.randn(num_samples, num_classes), torch.zeros(num_samples, 1, dtype=torch.long)

    def peak(update: Callable[..., None]) -> int:
        live = [0]

        def free(_: int, num_bytes: int) -> None:
            live.append(live[-1] - num_bytes)

        with StorageTracer(lambda _, num_bytes: live.append(live[-1] + num_bytes), free):
            update(logits, labels, torch.tensor(1.0))
        return max(live)

    assert peak(MetricsMemory(metrics)) == pytest.approx(peak(metrics.update), rel=0.05)
    few = ClassificationMetrics(Taxonomy((Level("species", tuple("abcde")),)))
    assert peak(MetricsMemory(few)) < peak(MetricsMemory(metrics)) / 100, "five classes have no top-5"


STEPS = [
    (["TRAIN.AMP=bf16"], 0.4, 0.8),
    (["TRAIN.GRADIENT_CHECKPOINTING=True"], 0.2, 0.8),
    (["TRAIN.CHANNELS_LAST=True"], 0.8, 1.2),
    (["TRAIN.ACCUMULATION_STEPS=2", "TRAIN.NOISE_SCALE.ENABLED=True"], 0.98, 1.1),
    (["TRAIN.COMPILE=True", "TRAIN.DETERMINISTIC=True"], 1.0, 1.0),
    (["DATA.IMG_SIZE=128"], 3.0, 8.0),
]  # fmt: skip
QUICK = ("TRAIN.AMP=bf16", "TRAIN.GRADIENT_CHECKPOINTING=True", "TRAIN.ACCUMULATION_STEPS=2")


VIT = (*IMAGES, "MODEL.NAME=test_vit")


@pytest.fixture(scope="module")
def plain_bytes() -> int:
    num_bytes = predicted("train", *VIT).prediction.reserved_bytes(2048)
    freeze_what_is_there()  # a first prediction imports much
    return num_bytes


@pytest.mark.parametrize(
    ("argv", "least", "most"),
    [pytest.param(*row, id=row[0][0], marks=() if row[0][0] in QUICK else pytest.mark.slow) for row in STEPS],
)
def test_the_step_is_that_of_the_configuration(
    plain_bytes: int, argv: list[str], least: float, most: float
) -> None:
    """What 2048 samples reserve, against the plain configuration of the same model."""
    other = predicted("train", *VIT, *argv).prediction.reserved_bytes(2048)
    assert least <= other / plain_bytes <= most


def test_a_model_that_needs_numbers_while_it_is_built() -> None:
    argv = (f"MODEL._target_={__name__}.Numerate", *POINTS)
    numerate, wide = (predicted("train", *each).prediction.peak_bytes(8) for each in (argv, WIDE))
    assert numerate == wide


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=60), st.integers(0, 3000), st.integers(1, 8),
    st.integers(1, 9),
)  # fmt: skip
def test_the_largest_size_within_a_budget(steps: list[int], budget: int, first: int, apart: int) -> None:
    """Against looking at every candidate, for needs that never fall."""
    candidates = [first + apart * index for index in range(len(steps))]
    needs = dict(zip(candidates, (sum(steps[: index + 1]) for index in range(len(steps))), strict=True))
    fitting = [size for size in candidates if needs[size] <= budget]
    assert largest_within(candidates, budget, needs.__getitem__) == max(fitting, default=None)
