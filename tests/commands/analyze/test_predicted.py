"""Predicted analyses: the memory of GPUs that are not there, from steps that are traced."""

from __future__ import annotations

import csv
import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from linnaeus.autobatch.protocol import RankStatus
from linnaeus.autobatch.result import Mode
from linnaeus.commands.analyze.fitting import fill
from linnaeus.commands.analyze.options import Options, read
from linnaeus.commands.analyze.output import yaml_lines
from linnaeus.commands.analyze.predict import predict_sizes, target_of, world_of
from linnaeus.commands.analyze.results import Analysis, Predicted, Row
from linnaeus.commands.analyze.traced import PredictedStep, build_on_meta, predicted_step
from linnaeus.commands.session import Setup
from linnaeus.config.schema import Config
from linnaeus.data.datasets import build_data
from linnaeus.data.taxonomy import Level, Taxonomy
from linnaeus.memory.gpus import GIB, GPUS
from linnaeus.memory.predict import MARGIN
from linnaeus.memory.storages import StorageTracer
from linnaeus.training.metrics import ClassificationMetrics, MetricsMemory
from tests.helpers.consoles import plain_console
from tests.helpers.runs import Outcome, Run

MIB = 1024**2
BASE = 600 * MIB
POINTS = ("DATA.DATASET._target_=tests.commands.tiny.Points", "DATA.DATASET.length=500")
WIDE = ("MODEL._target_=tests.commands.tiny.Wide", *POINTS)
GROWING = (
    "MODEL._target_=tests.commands.tiny.Growing", *POINTS, "DATA.DATASET.length=5000",
    "DATA.AUTOBATCH.MAX_BATCH_SIZE=5000",
)  # fmt: skip
IMAGES = (
    "MODEL._target_=tests.commands.tiny.Blocks", "DATA.DATASET.NAME=synthetic",
    "DATA.DATASET.NUM_SAMPLES=9999", "DATA.DATASET.NUM_SAMPLES_VAL=9999", "DATA.DATASET.NUM_CLASSES=[6]",
    "DATA.IMG_SIZE=64", "DATA.AUTOBATCH.MAX_BATCH_SIZE_VAL=9999",
)  # fmt: skip
ROOT = Path(__file__).parents[3]
SVG = "{http://www.w3.org/2000/svg}"


def content_of(outcome: Outcome, path: Path = Path("batch_sizes.json")) -> dict[str, Any]:
    assert outcome.code == 0, outcome.err
    return dict(json.loads(path.read_text()))


def parsed(*argv: str) -> tuple[Options, Config]:
    request = read(["--predict", "--gpu", "t4", *argv])
    assert not isinstance(request, str)
    return request


def setup_of(options: Options, config: Config) -> Setup:
    data = build_data(config.DATA, seed=0)
    return Setup(config, data, world_of(options), RankStatus(), plain_console()[0])


@functools.cache
def predicted(mode: Mode, *argv: str) -> PredictedStep:
    """The step of a command line, traced once for all tests."""
    search = build_on_meta(setup_of(*parsed(*argv)))
    assert all(parameter.is_meta for parameter in search.assembly.model.parameters())
    return predicted_step(search, mode, BASE)


def row_of(
    mode: Mode, *argv: str, gib: float = 16, fraction: float = 1, limit_gb: float | None = None
) -> Row:
    """What is predicted for a device of a memory."""
    row = Row(mode, fraction, predicted=Predicted(f"{gib:g} GiB", int(gib * GIB), MARGIN))
    fill(row, predicted(mode, *argv), limit_gb)
    return row


def analysis_of(*argv: str) -> Analysis:
    options, config = parsed(*argv)
    analysis = Analysis()
    predict_sizes(setup_of(options, config), options, target_of(options, config), analysis)
    return analysis


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
        "--fractions", "0.5,0.9", "--plot", "sizes.svg", "--max-bs", "400000",
        "DATA.DATASET.NUM_SAMPLES=400000", "DATA.DATASET.NUM_SAMPLES_VAL=400000", "EXPERIMENT.DEVICE=cuda",
        "TRAIN.GRADIENT_CHECKPOINTING=True",
    )  # fmt: skip
    found = content_of(outcome)
    devices = ["h100-80gb", "rtx-4090", "4 GiB"]
    rows = found["results"]
    assert [(row["mode"], row["device"], row["memory_fraction"]) for row in rows] == [
        (mode, device, part) for mode in ("train", "val") for device in devices for part in (0.5, 0.9)
    ]
    for row in rows:
        total_bytes = GPUS.get(row["device"], 4 * GIB)
        assert (row["predicted"], row["margin"], row["device_bytes"]) == (True, MARGIN, total_bytes)
        assert (row["certified"], row["trials"], row["samples_per_s"]) == (False, [], None)
        assert row["budget_bytes"] == int(row["memory_fraction"] * total_bytes)
        assert BASE < row["peak_bytes"] <= row["budget_bytes"]
        assert 0.8 * row["batch_size"] < row["safe_batch_size"] < row["batch_size"]
        assert row["safe_peak_bytes"] * MARGIN <= row["budget_bytes"] + 1
        parts = {name: part["bytes"] for name, part in row["breakdown"].items()}
        assert sum(parts.values()) == row["peak_bytes"]
        assert parts["optimizer_state"] == pytest.approx(2 * parts["parameters"], abs=1000)
        assert parts["rest"] == BASE
    for mode in ("train", "val"):
        sizes = [row["batch_size"] for row in rows if row["mode"] == mode]
        assert all(small < large for small, large in zip(sizes[::2], sizes[1::2], strict=True))
        assert sizes[::2] == sorted(sizes[::2], reverse=True), "a larger device gives a larger size"
        peaks = [point["peak_bytes"] for point in found["curves"][mode]]
        assert peaks == sorted(peaks)
    environment = found["environment"]
    expected = {
        "predicted": True, "base_bytes": BASE, "base": "assumed", "margin": MARGIN, "world_size": 1,
        "gradient_checkpointing": True, "accumulation_steps": 1, "ema": False, "image_size": [64, 64],
    }  # fmt: skip
    assert expected.items() <= environment.items()
    assert environment["not_compared"][1:] == ["AdamW", "gradient checkpointing", "validation"]
    page = (ROOT / "docs/prediction.md").read_text().replace("\n", " ")
    figures = re.findall(r"[\d.]+(?: %| GB| times)", environment["accuracy"])
    assert len(figures) == 5
    assert all(figure in page for figure in figures)
    assert environment["devices"][2] == {"name": "4 GiB", "total_bytes": 4 * GIB}
    titles = " ".join(
        title.text or "" for title in ElementTree.parse("sizes.svg").getroot().iter(f"{SVG}title")
    )
    for row in rows:
        assert f"batch size {row['safe_batch_size']}, {row['safe_peak_bytes'] / GIB:.3f}" in titles
        assert f"batch size {row['batch_size']}, predicted {row['peak_bytes'] / GIB:.3f}" in titles


def test_where_nothing_fits_at_all(run: Run) -> None:
    """The picture shows how much is missing; a title wider than the panel goes on in a second line."""
    gpus = ",".join(f"0.{number}" for number in range(30, 50))
    outcome = run(
        "analyze", *WIDE, "--predict", "--device-memory-gb", gpus, "--modes", "train", "--fractions", "0.5",
        "--plot", "a.svg",
    )  # fmt: skip
    assert outcome.code == 3
    assert "Traceback" not in outcome.err
    svg = ElementTree.parse("a.svg").getroot()
    assert any("batch size 1: predicted" in (title.text or "") for title in svg.iter(f"{SVG}title"))
    lines = ["".join(text.itertext()).strip() for text in svg.iter(f"{SVG}text")]
    (first,) = [number for number, line in enumerate(lines) if line.startswith("tests.commands.tiny.Wide")]
    assert max(map(len, lines[first : first + 3])) <= 76
    assert any("0.49 GiB" in line for line in lines[first : first + 5])


def test_which_device_or_limit_would_do() -> None:
    """The smallest size fits there with the margin, and with a hundredth of a GiB less it does not."""
    for size_of, low in (({"fraction": 0.5}, 1.0), ({"fraction": 0.5, "gib": 16.0}, 0.01)):
        name = "limit_gb" if "gib" in size_of else "gib"
        row = row_of("train", *WIDE, **size_of, **{name: low})
        assert (row.batch_size, row.safe_size) == (None, None)
        assert row.reason is not None
        needed = float(re.findall(r"\d+\.\d\d", row.reason.replace("15 %", ""))[-1])
        assert row_of("train", *WIDE, **size_of, **{name: needed}).safe_size is not None
        row = row_of("train", *WIDE, **size_of, **{name: needed - 0.01})
        assert row.safe_size is None
        if row.batch_size is not None:  # without the margin
            assert f"{needed:.2f}" in row.notes[-1]
            assert yaml_lines(Analysis(rows=[row], speeds={"train": Any})) == ""


def test_tables_for_programs(tmp_path: Path) -> None:
    found = analysis_of(
        *GROWING, "--gpu", "t4,l4", "--device-memory-gb", "0.5", "--fractions", "0.5",
        "DATA.DATASET.length=31", "DATA.AUTOBATCH.MIN_BATCH_SIZE_VAL=40",
    )  # fmt: skip
    found.save(tmp_path / "sizes.csv")
    found.save(tmp_path / "sizes.jsonl")
    tables: list[list[dict[str, Any]]] = [
        list(csv.DictReader((tmp_path / "sizes.csv").read_text().splitlines())),
        [json.loads(line) for line in (tmp_path / "sizes.jsonl").read_text().splitlines()],
    ]
    for rows in tables:
        assert [(row["mode"], row["device"]) for row in rows] == [
            (mode, device) for mode in ("train", "val") for device in ("t4", "l4", "0.5 GiB")
        ]
        assert [row["batch_size"] or None for row in rows[2:]] == [None] * 4
        assert all("MIN_BATCH_SIZE_VAL" in row["reason"] for row in rows[3:])
        assert rows[2]["reason"]
        for row in rows[:2]:
            assert int(row["safe_batch_size"]) == int(row["batch_size"]) == 31
            assert (str(row["predicted"]), float(row["margin"]), row["reason"] or "") == ("True", MARGIN, "")
            assert (row["precision"], row["optimizer"], row["base"]) == ("float32", "AdamW", "assumed")
            assert int(row["base_bytes"]) == BASE


@pytest.mark.parametrize(
    ("argv", "size", "limited_by"),
    [
        ((*GROWING, "--max-bs", "6"), 6, "max_batch_size"),
        ((*GROWING, "DATA.DATASET.length=96"), 96, "dataset"),
        ((*GROWING, "DATA.DATASET.length=96", "--world-size", "2"), 48, "dataset"),
        ((*IMAGES, "DATA.DATASET.NUM_SAMPLES_VAL=64", "--world-size", "3"), 22, "dataset"),
    ],
)
def test_bounds(argv: tuple[str, ...], size: int, limited_by: str) -> None:
    row = row_of("val", *argv)
    assert (row.batch_size, row.safe_size, row.limited_by) == (size, size, limited_by)
    assert [str(size) in note for note in row.notes] == [True] * (limited_by == "dataset")


def test_sizes_are_multiples_and_a_limit_counts_as_the_memory() -> None:
    free = row_of("train", *GROWING, gib=24, fraction=0.8)
    limited = row_of("train", *GROWING, "DATA.AUTOBATCH.MULTIPLE_OF=32", gib=24, fraction=0.8, limit_gb=2)
    assert limited.batch_size is not None
    assert limited.safe_size is not None
    assert free.batch_size is not None
    assert limited.batch_size % 32 == limited.safe_size % 32 == 0
    assert limited.budget_bytes == BASE + int(0.8 * 2 * GIB)
    assert (limited.peak_bytes or 0) <= limited.budget_bytes
    assert limited.batch_size < free.batch_size / 5
    assert (free.memory, limited.memory) == ("80% of 24 GiB", "80% of 2 GiB limit on 24 GiB")
    above = row_of("train", *GROWING, gib=24, fraction=0.8, limit_gb=64)
    assert (above.memory, above.budget_bytes) == (free.memory, free.budget_bytes)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_without_options_it_is_this_machines_gpu() -> None:
    _, config = parsed(*WIDE)
    target = target_of(Options(), config)
    (gpu,) = target.gpus
    assert gpu.name == torch.cuda.get_device_name()
    assert gpu.total_bytes == torch.cuda.mem_get_info()[1]
    assert target.is_measured
    assert 0 < target.base_bytes < gpu.total_bytes


# Remedies.


def test_remedies() -> None:
    argv = ("--fractions", "0.9", "--modes", "train", "--max-bs", "512", "--remedies")
    (row,) = analysis_of(*IMAGES, *argv, "OPTIMIZER.KWARGS.eps=1e-6").rows
    remedies = {remedy.name: remedy for remedy in row.remedies}
    assert [*remedies] == ["bf16", "gradient_checkpointing", "accumulation", "optimizer", "image_size"]
    for remedy in remedies.values():
        assert remedy.reason is None
        assert remedy.peak_bytes_before == row.peak_bytes
        assert (remedy.saved_bytes or 0) > (0 if remedy.name != "optimizer" else -1)
    assert remedies["accumulation"].batch_size == 256
    assert remedies["optimizer"].keys == {"OPTIMIZER.NAME": "sgd", "OPTIMIZER.KWARGS": {}}
    assert remedies["image_size"].keys == {"DATA.IMG_SIZE": 32}
    saved = {name: remedy.saved_percent or 0 for name, remedy in remedies.items()}
    assert saved["image_size"] > saved["gradient_checkpointing"] / 2


def test_sizes_are_written_and_shown_before_the_remedies(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal that ends the process during the remedies loses none of the sizes."""
    seen: list[dict[str, Any]] = []

    def interrupt(*_: object) -> None:
        seen.append(json.loads(Path("batch_sizes.json").read_text()))
        raise KeyboardInterrupt

    monkeypatch.setattr("linnaeus.commands.analyze.predict.try_remedies", interrupt)
    argv = ("--predict", "--gpu", "t4", "--fractions", "0.9", "--modes", "val", "--remedies")
    outcome = run("analyze", *WIDE, *argv)
    assert outcome.code == 130
    (written,) = seen
    assert written["interrupted"]
    size = written["results"][0]["safe_batch_size"]
    assert json.loads(Path("batch_sizes.json").read_text()) == written
    assert outcome.out.count(f"BATCH_SIZE_VAL: {size}") == 1, "shown once"


# What of a run is in its traces.

WIDTH = 16 * MIB
"""Bytes of one copy of the parameters, and of the buffers, of `Wide`."""


@pytest.mark.parametrize(
    ("argv", "num_bytes"),
    [
        (("TRAIN.EMA.ENABLED=True",), 2 * WIDTH),
        (("--world-size", "2"), WIDTH),
        (("OPTIMIZER.NAME=sgd",), -WIDTH),
        (("TRAIN.AMP=fp16", "TRAIN.CLIP_GRAD_NORM=1"), 0),
    ],
)
def test_what_is_held(argv: tuple[str, ...], num_bytes: int) -> None:
    """Between the steps, by a model that is nearly all parameters: validation is a row of held tensors."""
    plain, other = (predicted("val", *WIDE, *more).prediction.peak_bytes(1) for more in ((), argv))
    assert other - plain == pytest.approx(num_bytes, abs=3 * MIB)


@pytest.mark.parametrize("mode", ["train", "val"])
def test_gradient_buckets_are_a_part(mode: Mode) -> None:
    alone, two = row_of(mode, *WIDE).breakdown, row_of(mode, *WIDE, "--world-size", "2").breakdown
    assert alone is not None
    assert two is not None
    assert alone.buckets == 0
    assert two.buckets == pytest.approx(WIDTH, abs=1000)
    assert two.gradients == 0, "they are views of the buckets"
    assert two.activations < 4 * WIDTH


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


@pytest.mark.parametrize(
    ("argv", "least", "most"),
    [
        (("TRAIN.AMP=bf16",), 0.4, 0.8),
        (("TRAIN.GRADIENT_CHECKPOINTING=True",), 0.2, 0.8),
        (("TRAIN.CHANNELS_LAST=True",), 0.8, 1.2),
        (("TRAIN.ACCUMULATION_STEPS=2", "TRAIN.NOISE_SCALE.ENABLED=True"), 0.98, 1.1),
        (("TRAIN.COMPILE=True", "TRAIN.DETERMINISTIC=True"), 1.0, 1.0),
        (("DATA.IMG_SIZE=128",), 3.0, 8.0),
    ],
)
def test_the_step_is_that_of_the_configuration(argv: tuple[str, ...], least: float, most: float) -> None:
    """What 2048 samples reserve, against the plain configuration of the same model."""
    plain, other = (predicted("train", *IMAGES, *more).prediction.reserved_bytes(2048) for more in ((), argv))
    assert least <= other / plain <= most


def test_a_model_that_needs_numbers_while_it_is_built() -> None:
    argv = ("MODEL._target_=tests.commands.tiny.Numerate", *POINTS)
    numerate, wide = (predicted("train", *each).prediction.peak_bytes(8) for each in (argv, WIDE))
    assert numerate == wide
