"""`DATA.IMG_SIZE_SCHEDULE`: images that grow during a run, with a micro-batch size for each side."""

import json
import os
import signal
from typing import ClassVar

import pytest
import torch
from torch import nn

from linnaeus.main import cli
from tests.helpers.runs import SMALL, assert_same_bits, checkpoint_of, weights
from tests.helpers.small_runs import NAME, lines_of, plan_of

MOST_PIXELS = 8 * 32 * 32
"""Pixels of the largest micro-batch that fits: 8 images of side 32, 32 of side 16."""


class Pixels(nn.Module):
    """Takes images of any size; its memory follows their pixels."""

    seen: ClassVar = []

    def __init__(self, num_classes):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 4, 4)
        self.heads = nn.ModuleList(nn.Linear(8, count) for count in num_classes.values())

    def forward(self, images):
        number, _, side, _ = images.shape
        if self.training and number * side * side > MOST_PIXELS:
            torch.empty(1 << 50, dtype=torch.uint8)
        self.seen.append((self.training, number, side))
        features = self.stem(images).relu().mean((2, 3))
        return tuple(head(features) for head in self.heads)


class Interrupt:
    """Presses Ctrl-C after an optimizer step, once."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, state):
        if state.step == self.step:
            os.kill(os.getpid(), signal.SIGINT)


RUN = (
    *SMALL,
    "~MODEL",
    f"MODEL._target_={__name__}.Pixels",
    "~DATA.IMG_SIZE",
    "DATA.IMG_SIZE_SCHEDULE=[[1,16],[3,24],[4,32]]",
    "DATA.DATASET.NUM_SAMPLES=48",
    "DATA.DATASET.NUM_SAMPLES_VAL=8",
    "DATA.BATCH_SIZE=8",
    "TRAIN.EPOCHS=4",
    "TRAIN.LOG_EVERY=1",
    "DATA.AUGMENT.CROP_SCALE=[0.5,1]",
)
"""Six steps of each epoch, of which the first two have images of side 16."""


def interrupted(step):
    return f"TRAIN.CALLBACKS=[{{_target_: {__name__}.Interrupt, step: {step}}}]"


def sizes_in(folder):
    """The sizes of `autobatch.json`, by side."""
    sides = json.loads((folder / "autobatch.json").read_text())["sides"]
    return [sides[side]["batch_size"] for side in ("16", "24", "32")]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_each_epoch_trains_at_its_side(run, tmp_path, num_workers):
    Pixels.seen.clear()
    run(*RUN, f"DATA.NUM_WORKERS={num_workers}").ok()
    sides = [16] * 12 + [24] * 6 + [32] * 6
    assert [line["img_size"] for line in lines_of(tmp_path / "runs/small")] == sides
    assert [side for is_training, _, side in Pixels.seen if is_training] == sides
    validated = {
        side for is_training, number, side in Pixels.seen if not is_training and number > 1
    }
    assert validated == {32}


@pytest.fixture(scope="module")
def grown(tmp_path_factory):
    folder = tmp_path_factory.mktemp("grown")
    assert cli([*RUN, f"EXPERIMENT.OUTPUT_DIR={folder}"]) == 0
    return weights(folder / "small")


@pytest.mark.parametrize("step", [9, 12, 13])
def test_a_resumed_run_is_the_same_at_any_step(run, tmp_path, grown, step):
    assert run(*RUN, interrupted(step)).code == 130
    assert checkpoint_of(tmp_path / "runs/small")["progress"]["step"] == step
    run(*RUN, "TRAIN.AUTO_RESUME=True").ok()
    assert_same_bits(grown, weights(tmp_path / "runs/small"))


def test_another_schedule_trains_other_weights(run, tmp_path, grown):
    run(*RUN, "DATA.IMG_SIZE_SCHEDULE=[[1,16],[2,24],[4,32]]").ok()
    with pytest.raises(AssertionError):
        assert_same_bits(grown, weights(tmp_path / "runs/small"))


SEARCHED = (
    *RUN,
    "DATA.AUTOBATCH.ENABLED=True",
    "DATA.AUTOBATCH.ENABLED_VAL=False",
    "DATA.AUTOBATCH.TOLERANCE=0",
)


@pytest.mark.e2e
@pytest.mark.usefixtures("few_timed_steps")
@pytest.mark.parametrize(
    ("options", "found", "trained"),
    [
        # 24 samples of an optimizer step: at once at the first side, in parts that fit at the others.
        (("TRAIN.EFFECTIVE_BATCH_SIZE=24",), [24, 14, 8], {(24, 16), (12, 24), (8, 32)}),
        # Without one, the size of the largest side holds for all.
        ((), [8, 8, 8], {(8, 16), (8, 24), (8, 32)}),
    ],
)
def test_autobatch_finds_a_size_for_each_side_that_resumes(run, tmp_path, options, found, trained):
    folder, stopped = tmp_path / "runs/small", tmp_path / "runs/stopped"
    searched = (*SEARCHED, *options)
    run(*searched).ok()
    assert sizes_in(folder) == found
    assert len(lines_of(folder)) == 4 * 48 // plan_of(folder)["EFFECTIVE_BATCH"]
    assert run(*searched, f"{NAME}stopped", interrupted(1)).code == 130
    Pixels.seen.clear()
    run(*searched, f"{NAME}stopped", "TRAIN.AUTO_RESUME=True").ok()
    assert trained <= {(number, side) for is_training, number, side in Pixels.seen if is_training}
    assert_same_bits(weights(folder), weights(stopped))
    assert sizes_in(stopped) == found


def test_a_transformer_of_timm_grows_and_ends_at_the_last_side(run, tmp_path):
    sides = ("~DATA.IMG_SIZE", "DATA.IMG_SIZE_SCHEDULE=[[1,32],[2,64]]")
    run(*SMALL, *sides, "MODEL.NAME=test_vit").ok()
    model = json.loads((tmp_path / "runs/small/model.json").read_text())
    assert model["img_size"] == model["preprocessing"]["size"] == [64, 64]
    run("evaluate", "runs/small").ok()


TENSORS = ("~DATA.DATASET", "DATA.DATASET._target_=tests.helpers.small_runs.Clusters")


@pytest.mark.parametrize(
    ("options", "key"),
    [
        (["DATA.IMG_SIZE_SCHEDULE=[[1,16],[5,32]]"], "DATA.IMG_SIZE_SCHEDULE"),
        (["DATA.IMG_SIZE=48"], "DATA.IMG_SIZE"),
        (["TRAIN.MAX_STEPS=9"], "TRAIN.MAX_STEPS"),
        (["~MODEL", "MODEL.NAME=mixer_s16_224"], "DATA.IMG_SIZE_SCHEDULE"),
        (TENSORS, "DATA.IMG_SIZE_SCHEDULE"),
    ],
)
def test_a_schedule_that_cannot_be_followed_is_refused(run, tmp_path, options, key):
    outcome = run(*RUN, *options)
    assert outcome.code == 2, outcome.err
    assert f"  - {key}: " in outcome.err
    assert not (tmp_path / "runs/small/checkpoints").exists()
