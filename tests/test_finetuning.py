"""Runs that start from other weights, with parts of the model frozen, at first or always."""

import json
import shutil

import pytest
import torch
import yaml

from tests.helpers.runs import SMALL, assert_same_bits, weights

FROZEN = (
    *SMALL,
    "MODEL.FREEZE=backbone",
    "DATA.BATCH_SIZE=32",
    "TRAIN.EPOCHS=3",
    "TRAIN.UNFREEZE_EPOCH=2",
    "MODEL.DROP_RATE=0.2",
    "TRAIN.EMA.ENABLED=True",
    "TRAIN.LOG_EVERY=1",
    "TRAIN.CHECKPOINT_EVERY_STEPS=1",
    "TRAIN.KEEP_CHECKPOINTS=99",
    "TRAIN.AUTO_RESUME=True",
)
"""Three epochs of three steps, each with its own checkpoint; in the first epoch only the heads train."""


def tensors_after(folder, step):
    return weights(folder, f"step_{step:08d}.pt")


def changed(before, after):
    """The parts of a model (`backbone`, `heads`) in which a tensor differs."""
    return {name.split(".")[0] for name in before if not torch.equal(before[name], after[name])}


def resumed_at(step, source, folder):
    """Make the folder of a run whose newest checkpoint is the one that another wrote after so many steps."""
    (folder / "checkpoints").mkdir(parents=True)
    shutil.copy(source / f"checkpoints/step_{step:08d}.pt", folder / "checkpoints/last.pt")


@pytest.mark.slow
def test_frozen_parts_train_from_their_epoch_on_and_resume(run, tmp_path):
    outcome = run(*FROZEN, "EXPERIMENT.NAME=whole")
    assert outcome.code == 0, outcome.err
    assert "45 of 49" in outcome.out
    whole = tmp_path / "runs/whole"
    assert changed(tensors_after(whole, 1), tensors_after(whole, 3)) == {"heads"}
    assert changed(tensors_after(whole, 3), tensors_after(whole, 4)) == {"backbone", "heads"}
    for step in (2, 3, 7):  # before the boundary, at it, after it
        folder = tmp_path / f"runs/resumed{step}"
        resumed_at(step, whole, folder)
        outcome = run(*FROZEN, f"EXPERIMENT.NAME=resumed{step}")
        assert outcome.code == 0, outcome.err
        assert_same_bits(weights(whole), weights(folder))
        last = [
            torch.load(path / "checkpoints/last.pt", weights_only=True) for path in (whole, folder)
        ]
        averages = [content["state"]["ema"]["module"] for content in last]
        assert_same_bits(*averages)
    assert run(*FROZEN, "EXPERIMENT.NAME=always", "TRAIN.UNFREEZE_EPOCH=null").code == 0
    assert changed(tensors_after(whole, 1), weights(tmp_path / "runs/always")) == {"heads"}


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_unfreeze_and_resume_at_the_boundary(torchrun, tmp_path):
    options = (
        *FROZEN,
        "DATA.BATCH_SIZE=24",
        "TRAIN.EPOCHS=2",
    )
    outcome = torchrun(2, *options, "EXPERIMENT.NAME=whole")
    assert outcome.code == 0, outcome.err
    whole, folder = tmp_path / "runs/whole", tmp_path / "runs/resumed"
    assert changed(tensors_after(whole, 1), tensors_after(whole, 2)) == {"heads"}
    assert changed(tensors_after(whole, 2), tensors_after(whole, 3)) == {"backbone", "heads"}
    resumed_at(2, whole, folder)
    outcome = torchrun(2, *options, "EXPERIMENT.NAME=resumed")
    assert outcome.code == 0, outcome.err
    assert_same_bits(weights(whole), weights(folder))


@pytest.mark.usefixtures("few_timed_steps")
def test_autobatch_finds_the_size_of_the_unfrozen_model(run, tmp_path):
    options = (
        *FROZEN,
        "TRAIN.EPOCHS=2",
        "TRAIN.CHECKPOINT_EVERY_STEPS=99",
        "DATA.DATASET.NUM_SAMPLES=48",
    )
    search = (
        "DATA.AUTOBATCH.ENABLED=True",
        "DATA.AUTOBATCH.ENABLED_VAL=False",
        "DATA.AUTOBATCH.MAX_BATCH_SIZE=24",
    )
    assert run(*options, *search, "EXPERIMENT.NAME=found").code == 0
    saved = ("--cfg", str(tmp_path / "runs/found/config.yaml"), "DATA.AUTOBATCH.ENABLED=False")
    assert run(*saved, "EXPERIMENT.NAME=by_hand").code == 0
    assert_same_bits(weights(tmp_path / "runs/found"), weights(tmp_path / "runs/by_hand"))


@pytest.mark.e2e
def test_a_run_starts_from_another_with_its_preprocessing(run, tmp_path):
    augment = {
        "INTERPOLATION": "bicubic",
        "CROP_FRACTION": 0.9,
        "RESIZE": "letterbox",
        "MEAN": [0.1, 0.2, 0.3],
        "STD": [0.4, 0.5, 0.6],
    }
    keys = [f"DATA.AUGMENT.{key}={value}" for key, value in augment.items()]
    first = (*SMALL, *keys, "DATA.IMG_SIZE=48", "TRAIN.EPOCHS=1", "EXPERIMENT.NAME=first")
    assert run(*first).code == 0
    second = (
        *SMALL,
        "MODEL.WEIGHTS=runs/first",
        "DATA.IMG_SIZE=null",
        "DATA.DATASET.NUM_CLASSES=[2,7]",
        "TRAIN.EPOCHS=1",
        "EXPERIMENT.NAME=second",
        "TRAIN.AUTO_RESUME=True",
    )
    outcome = run(*second)
    assert outcome.code == 0, outcome.err
    assert "runs/first/checkpoints/best.pt" in "".join(outcome.out.split())
    config = yaml.safe_load((tmp_path / "runs/second/config.yaml").read_text())
    assert config["DATA"]["IMG_SIZE"] == 48
    assert config["DATA"]["AUGMENT"] | augment == config["DATA"]["AUGMENT"]
    model = json.loads((tmp_path / "runs/second/model.json").read_text())
    carried = {name: model["preprocessing"][name.lower()] for name in augment}
    assert (carried, model["preprocessing"]["size"]) == (augment, [48, 48])
    shutil.rmtree(tmp_path / "runs/first")  # the checkpoint holds everything
    outcome = run(*second, "TRAIN.EPOCHS=2")
    assert outcome.code == 0, outcome.err
    assert "resumed with another" not in outcome.out
    assert json.loads((tmp_path / "runs/second/model.json").read_text()) == model


@pytest.mark.e2e
def test_layers_with_rates_of_their_own_resume_with_them(run, tmp_path):
    options = (
        *FROZEN,
        "MODEL.FREEZE=none",
        "TRAIN.UNFREEZE_EPOCH=null",
        "OPTIMIZER.LAYER_DECAY=0.5",
        "OPTIMIZER.HEAD_LR_SCALE=4",
        "TRAIN.EPOCHS=2",
    )
    assert run(*options, "EXPERIMENT.NAME=whole").code == 0
    resumed_at(3, tmp_path / "runs/whole", tmp_path / "runs/resumed")
    assert run(*options, "EXPERIMENT.NAME=resumed").code == 0
    assert_same_bits(weights(tmp_path / "runs/whole"), weights(tmp_path / "runs/resumed"))
    lines = [
        json.loads(line)
        for line in (tmp_path / "runs/resumed/metrics.jsonl").read_text().splitlines()
    ]
    content = torch.load(tmp_path / "runs/resumed/checkpoints/step_00000004.pt", weights_only=True)
    groups = content["state"]["optimizer"]["param_groups"]
    [nominal] = [line["lr"] for line in lines if line["split"] == "train" and line["step"] == 5]
    assert {group["lr_scale"] for group in groups} >= {4.0, 0.5, 0.25}
    for group in groups:
        assert group["lr"] == pytest.approx(nominal * group["lr_scale"], rel=1e-12)
    [first, *_] = [line["lr"] for line in lines if line["split"] == "train"]
    assert nominal < first
