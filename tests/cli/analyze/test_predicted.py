"""Predicted analyses: the memory of GPUs that are not there, from steps that are traced."""

import json
import re
from pathlib import Path

import pytest
import torch

from linnaeus.autobatch.predict.gpus import ANY_GPU_MIB, GIB, GPUS, find_gpu
from linnaeus.autobatch.predict.prediction import MARGIN
from linnaeus.cli.analyze.predict import predict_sizes
from linnaeus.cli.analyze.results import Analysis
from tests.helpers.predictions import (
    BASE,
    DEEP,
    GROWING,
    IMAGES,
    MIB,
    POINTS,
    WIDE,
    content_of,
    parsed,
    predicted,
    row_of,
    setup_of,
)


@pytest.fixture
def no_device(monkeypatch):
    """Whoever joins takes the machine's device."""

    def refuse(*_):
        raise AssertionError("the machine's device is not to be used")

    monkeypatch.setattr("linnaeus.cli.analyze.session.join", refuse)
    monkeypatch.setattr("linnaeus.autobatch.memory.device.device_memory", refuse)


@pytest.mark.usefixtures("no_device")
def test_one_prediction_answers_for_several_devices(run):
    outcome = run(
        "analyze",
        *IMAGES,
        "--predict",
        "--gpu=H100,NVIDIA GeForce RTX 4090,4",
        "--fractions=0.5,0.9",
        "DATA.AUTOBATCH.MAX_BATCH_SIZE=400000",
        "DATA.AUTOBATCH.MAX_BATCH_SIZE_VAL=400000",
        "DATA.DATASET.NUM_SAMPLES=400000",
        "DATA.DATASET.NUM_SAMPLES_VAL=400000",
        "EXPERIMENT.DEVICE=cuda",
        "TRAIN.GRADIENT_CHECKPOINTING=True",
    )
    found = content_of(outcome)
    devices = ["h100-80gb", "rtx-4090", "4 GiB"]
    rows = found["results"]
    assert [(row["mode"], row["device"], row["memory_fraction"]) for row in rows] == [
        (mode, device, part)
        for mode in ("train", "val")
        for device in devices
        for part in (0.5, 0.9)
    ]
    for row in rows:
        total_bytes = GPUS.get(row["device"], 4 * GIB)
        assert (row["certified"], row["trials"], row["samples_per_s"]) == (False, [], None)
        assert row["budget_bytes"] == int(row["memory_fraction"] * total_bytes)
        base_mib, *_ = ANY_GPU_MIB if row["device"] == "4 GiB" else find_gpu(row["device"]).base_mib
        assert base_mib * MIB < row["peak_bytes"] <= row["budget_bytes"]
        assert 0.8 * row["size_without_margin"] < row["batch_size"] < row["size_without_margin"]
        assert row["peak_bytes"] * MARGIN <= row["budget_bytes"] + 1
    for mode in ("train", "val"):
        sizes = [row["batch_size"] for row in rows if row["mode"] == mode]
        assert all(small < large for small, large in zip(sizes[::2], sizes[1::2], strict=True))
        assert sizes[::2] == sorted(sizes[::2], reverse=True), "a larger device gives a larger size"
    expected = {"predicted": True, "margin": MARGIN, "gradient_checkpointing": True}
    assert expected.items() <= found["environment"].items()


def test_which_device_would_do(run):
    """The smallest size fits there with the margin, and with a hundredth of a GiB less it does not."""

    def predicted_for(gib):
        words = ("--predict", f"--gpu={gib:.2f}", "--fractions=0.5", "--modes=train")
        outcome = run("analyze", *WIDE, *words)
        [row] = json.loads(Path("batch_sizes.json").read_text())["results"]
        assert (outcome.code == 3) == (row["batch_size"] is None)
        return row

    row = predicted_for(0.3)
    needed = float(re.findall(r"a device of (\d+\.\d\d) GiB", row["reason"])[0])
    assert predicted_for(needed)["batch_size"] is not None
    assert predicted_for(needed - 0.01)["batch_size"] is None


@pytest.mark.parametrize(
    ("mode", "argv", "size", "limited_by"),
    [
        ("val", ("DATA.AUTOBATCH.MAX_BATCH_SIZE=3",), 6, "max_batch_size"),
        ("val", ("DATA.DATASET.length=64", "--world-size=3"), 22, "dataset"),
    ],
)
def test_bounds(mode, argv, size, limited_by):
    row = row_of(mode, *GROWING, *argv, gib=64)
    assert (row.batch_size, row.size_without_margin, row.limited_by) == (size, size, limited_by)


def test_sizes_are_multiples_and_a_limit_counts_as_the_memory():
    step = ("train", *GROWING, "DATA.AUTOBATCH.MULTIPLE_OF=32")
    limited, free = (row_of(*step, gib=24, fraction=0.8, limit_gb=limit) for limit in (2, 64))
    assert limited.batch_size % 32 == limited.size_without_margin % 32 == 0
    assert limited.peak_bytes <= limited.budget_bytes == BASE + int(0.8 * 2 * GIB)
    assert limited.batch_size < free.batch_size / 5
    assert free.budget_bytes == int(0.8 * 24 * GIB)


@pytest.mark.usefixtures("no_device")
def test_a_batch_size_can_be_required(run):
    """The bounds of the size are printed, and the lower one counts."""
    argv = ("analyze", *GROWING, "--predict", "--gpu=t4", "--modes=train", "--fractions=0.5,0.9")
    row = content_of(run(*argv))["results"][-1]
    for number, code in ((0, 0), (1, 3)):
        outcome = run(*argv, "--require", str(row["batch_size"] + number))
        assert (outcome.code, "--require" in outcome.err) == (code, code == 3)
        assert f"{row['batch_size']} to {row['size_without_margin']}" in outcome.out


def test_variants():
    """One thing changed in each row. What is so already, and a compiled model, has a reason instead."""
    names = "bf16,channels_last,checkpointing,compile,half_resolution"
    options, config = parsed(
        *IMAGES,
        "--fractions=0.9",
        "--modes=train",
        f"--variants={names}",
        "DATA.AUTOBATCH.MAX_BATCH_SIZE=64",
        "TRAIN.CHANNELS_LAST=True",
    )
    analysis = Analysis()
    predict_sizes(setup_of(options, config), options, analysis)
    rows = analysis.rows
    assert [row.variant for row in rows] == ["as configured", *names.split(",")]
    assert [row.variant for row in rows if row.reason] == ["channels_last", "compile"]
    peaks = [row.peak_bytes for row in rows if not row.reason]
    assert len({*peaks}) == 4
    assert (peaks[0], peaks[-1]) == (max(peaks), min(peaks))


@pytest.mark.usefixtures("no_device")
def test_more_cards_that_share_a_model_take_no_smaller_batches(run):
    outcome = run(
        "analyze",
        *DEEP,
        "DATA.DATASET.length=900000",
        "--predict",
        "--gpu=1.5",
        "--fractions=1",
        "--sharding=full",
        "--world-size=8,1,64,2",
        "DATA.AUTOBATCH.MAX_BATCH_SIZE=100000",
    )
    rows = content_of(outcome)["results"]
    assert [row["device"] for row in rows] == [f"{num} × 1.5 GiB" for num in (1, 2, 8, 64)]
    sizes = [row["batch_size"] for row in rows]
    assert sizes == sorted(sizes)
    assert 1.5 * sizes[0] < sizes[2]
    assert not torch.distributed.is_initialized()
    assert not hasattr(torch, "meta")


def test_sharding_saves_what_other_processes_hold():
    def peak(*argv):
        return predicted("train", *DEEP, *argv).prediction.reserved_bytes(64)

    assert peak("--sharding=full") == peak(), "one process has nobody to share with"
    of_ddp, of_eight = peak("--world-size=8"), peak("--world-size=8", "--sharding=full")
    assert of_eight < of_ddp / 2
    assert peak("--world-size=16", "--sharding=hybrid") == of_eight, "two nodes, each with a copy"
    assert peak("--world-size=8", "--sharding=full", "DIST.PARAM_DTYPE=bf16") < of_eight


def test_a_model_that_needs_numbers_while_it_is_built():
    argv = ("MODEL._target_=tests.cli.tiny.Numerate", *POINTS)
    numerate, wide = (predicted("train", *each).prediction.peak_bytes(8) for each in (argv, WIDE))
    assert numerate == wide
