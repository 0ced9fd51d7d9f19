"""Runs that start from other weights, with parts of the model frozen, at first or always."""

import json
import shutil
from functools import partial

import pytest
import torch
import yaml

from tests.helpers.runs import SMALL, assert_same_bits, weights
from tests.helpers.small_runs import assert_same_states

FROZEN = (
    *SMALL,
    "MODEL.FREEZE=backbone",
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


def changed(before, after):
    """The parts of a model (`backbone`, `heads`) in which a tensor differs."""
    return {name.split(".")[0] for name in before if not torch.equal(before[name], after[name])}


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_frozen_parts_train_from_their_epoch_on_and_resume(run, torchrun, tmp_path, num_ranks):
    """With rates of their own."""
    start = run if num_ranks == 1 else partial(torchrun, num_ranks)
    options = (*FROZEN, f"DATA.BATCH_SIZE={32 // num_ranks}", "OPTIMIZER.LAYER_DECAY=0.5")
    outcome = start(*options, "EXPERIMENT.NAME=whole").ok()
    assert "45 of 49" in outcome.out
    whole = tmp_path / "runs/whole"
    tensors = {step: weights(whole, f"step_{step:08d}.pt") for step in (1, 3, 4)}
    assert changed(tensors[1], tensors[3]) == {"heads"}
    assert changed(tensors[3], tensors[4]) == {"backbone", "heads"}
    for step in (2, 3, 7):  # before the boundary, at it, after it
        folder = tmp_path / f"runs/resumed{step}"
        (folder / "checkpoints").mkdir(parents=True)
        shutil.copy(whole / f"checkpoints/step_{step:08d}.pt", folder / "checkpoints/last.pt")
        start(*options, f"EXPERIMENT.NAME={folder.name}").ok()
        assert_same_states(whole, folder)


@pytest.mark.usefixtures("few_timed_steps")
def test_autobatch_finds_the_size_of_the_unfrozen_model(run, tmp_path):
    search = (
        "TRAIN.EPOCHS=2",
        "TRAIN.CHECKPOINT_EVERY_STEPS=99",
        "DATA.DATASET.NUM_SAMPLES=48",
        "DATA.AUTOBATCH.ENABLED=True",
        "DATA.AUTOBATCH.ENABLED_VAL=False",
        "DATA.AUTOBATCH.MAX_BATCH_SIZE=24",
    )
    run(*FROZEN, *search, "EXPERIMENT.NAME=found").ok()
    saved = ("--cfg", str(tmp_path / "runs/found/config.yaml"), "DATA.AUTOBATCH.ENABLED=False")
    run(*saved, "EXPERIMENT.NAME=by_hand").ok()
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
    run(*first).ok()
    second = (
        *SMALL,
        "MODEL.WEIGHTS=runs/first",
        "DATA.IMG_SIZE=null",
        "DATA.DATASET.NUM_CLASSES=[2,7]",
        "TRAIN.EPOCHS=1",
        "EXPERIMENT.NAME=second",
        "TRAIN.AUTO_RESUME=True",
    )
    outcome = run(*second).ok()
    assert "runs/first/checkpoints/best.pt" in "".join(outcome.out.split())
    data = yaml.safe_load((tmp_path / "runs/second/config.yaml").read_text())["DATA"]
    assert data["IMG_SIZE"] == 48
    assert data["AUGMENT"].items() >= augment.items()
    model = json.loads((tmp_path / "runs/second/model.json").read_text())
    carried = {name.lower(): value for name, value in augment.items()}
    assert model["preprocessing"].items() >= (carried | {"size": [48, 48]}).items()
    shutil.rmtree(tmp_path / "runs/first")  # the checkpoint holds everything
    outcome = run(*second, "TRAIN.EPOCHS=2").ok()
    assert "resumed with another" not in outcome.out
