"""An error that ends a run: what was trained before is saved, and the same command goes on from there."""

import os

import pytest
import torch

from linnaeus.main import cli
from linnaeus.training.checkpoint import load_checkpoint
from tests.helpers.runs import checkpoint_of
from tests.helpers.small_runs import (
    PLAIN,
    Clusters,
    Layers,
    assert_same_states,
    curve,
    validations_of,
)

FAULT = "FAULT"
"""The environment variable that says where, and at which count, something fails."""


def fail_at(place, count, rank=0):
    where, _, number = os.environ.get(FAULT, "").partition(" ")
    is_here = rank < 0 or os.environ.get("RANK", "0") == str(rank)
    if where == place and count == int(number) and is_here:
        raise ValueError(f"the fault in {place}")


class Faulty(Clusters):
    """Points of which one cannot be read."""

    def __init__(self, split, length=128, rank=0):
        super().__init__(split, length)
        self.split, self.rank, self.num_read = split, rank, 0

    def __getitem__(self, index):
        self.num_read += 1
        fail_at(self.split, self.num_read, self.rank)
        return super().__getitem__(index)


class Caller:
    """Calls back with an error."""

    def on_step_end(self, state):
        fail_at("on_step_end", state.step)

    def on_epoch_end(self, state):
        fail_at("on_epoch_end", state.epoch)


class Net(Layers):
    """Fails in a backward pass of training, or gives NaN from some step on."""

    def __init__(self, num_classes):
        super().__init__(num_classes)
        self.num_steps = 0

    def forward(self, inputs):
        outputs = super().forward(inputs)
        if not self.training:
            return outputs
        self.num_steps += 1
        outputs.register_hook(lambda _: fail_at("backward", self.num_steps))
        is_nan = os.environ.get("NAN_FROM", "999") <= str(self.num_steps)
        return outputs * torch.nan if is_nan else outputs


class HalfUpdate(torch.optim.SGD):
    """Fails after it has updated the parameters."""

    num_steps = 0

    def step(self, *arguments):
        super().step(*arguments)
        HalfUpdate.num_steps += 1
        fail_at("update", HalfUpdate.num_steps)


RUN = (
    *PLAIN,
    f"DATA.DATASET._target_={__name__}.Faulty",
    f"MODEL._target_={__name__}.Net",
    f"TRAIN.CALLBACKS=[{{_target_: {__name__}.Caller}}]",
    "TRAIN.EMA.ENABLED=True",
)
"""Three epochs of four steps of 32 samples."""

FAULTS = {"backward 6": (5, 32), "on_epoch_end 2": (8, 128)}
"""The optimizer steps done, and the samples of the epoch, that the checkpoint then has."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run without a fault."""
    folder = tmp_path_factory.mktemp("whole")
    assert cli([*RUN, f"EXPERIMENT.OUTPUT_DIR={folder}"]) == 0
    return folder / "plain"


@pytest.mark.e2e
@pytest.mark.parametrize("fault", FAULTS)
def test_a_failed_run_goes_on_after_its_last_step(
    run_in_child, whole, tmp_path, monkeypatch, fault
):
    folder = tmp_path / "runs/plain"
    monkeypatch.setenv(FAULT, fault)
    ended = run_in_child(*RUN)
    assert ended.code == 1
    assert f"the fault in {fault.split()[0]}" in ended.err
    progress = checkpoint_of(folder)["progress"]
    assert (progress["step"], progress["samples"]) == FAULTS[fault]
    assert progress["epoch"] == (progress["step"] - 1) // 4

    monkeypatch.delenv(FAULT)
    run_in_child(*RUN, "TRAIN.AUTO_RESUME=True").ok()
    assert_same_states(folder, whole)
    assert curve(folder) == curve(whole)
    assert validations_of(folder) == validations_of(whole) == [4, 8, 12]
    ends = [checkpoint_of(each)["progress"] for each in (folder, whole)]
    assert ends[0] | {"seconds": 0} == ends[1] | {"seconds": 0}


OWN_OPTIMIZER = ("~OPTIMIZER", f"OPTIMIZER._target_={__name__}.HalfUpdate", "OPTIMIZER.lr=0.1")


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("fault", "nan_from", "options"),
    [("update 7", "999", OWN_OPTIMIZER), ("on_step_end 7", "6", ("TRAIN.LOG_EVERY=100",))],
)
def test_a_state_that_is_not_whole_is_not_saved(
    run_in_child, tmp_path, monkeypatch, fault, nan_from, options
):
    monkeypatch.setenv(FAULT, fault)
    monkeypatch.setenv("NAN_FROM", nan_from)
    assert run_in_child(*RUN, *options).code == 1
    assert checkpoint_of(tmp_path / "runs/plain")["progress"]["step"] == 4


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("rank", "sharding"), [(0, "none"), (1, "none"), (-1, "none"), (1, "full")]
)
def test_one_of_two_ranks_that_fails_saves_for_both(
    torchrun, tmp_path, monkeypatch, rank, sharding
):
    own = (f"DATA.DATASET.rank={rank}", f"DIST.SHARDING={sharding}", "TRAIN.AUTO_RESUME=True")
    options = (*RUN, "DATA.BATCH_SIZE=16", *own)
    folder = tmp_path / "runs/plain"
    saved = folder / "checkpoints/failed_rank.pt"
    monkeypatch.setenv(FAULT, "val 5")
    ended = torchrun(2, *options)
    assert ended.code != 0
    assert "the fault in val" in ended.err
    assert saved.exists() == (sharding == "none")
    if saved.exists():
        progress = load_checkpoint(saved)["progress"]
        assert (progress["epoch"], progress["step"], progress["samples"]) == (0, 4, 128)
    monkeypatch.delenv(FAULT)
    torchrun(2, *options).ok()
    assert not saved.exists()
    assert curve(folder)[0] == list(range(1, 13))
    assert validations_of(folder) == [4, 8, 12]
