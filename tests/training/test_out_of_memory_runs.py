"""Whole runs that run out of memory, in one process and in two, and real shortages of the process."""

import json
import resource

import pytest
import torch
from torch import nn

from linnaeus.autobatch.memory.host import status_bytes
from linnaeus.autobatch.result import AutoBatchResult
from linnaeus.training.checkpoint import load_checkpoint
from tests.helpers import children
from tests.helpers.greedy import SPLIT, greedy
from tests.helpers.runs import TORCHRUN, checkpoint_of, weights
from tests.helpers.small_runs import PLAIN, assert_same_states, curve


class Convolutions(nn.Module):
    """Large activations and oneDNN's kernels; from the first step on the process may grow by so many MiB."""

    def __init__(self, num_classes, mebibytes=0):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 16, 3), nn.Conv2d(16, 16, 3)
        self.head = nn.Linear(16, num_classes)
        self.mebibytes = mebibytes

    def forward(self, inputs):
        if self.training and self.mebibytes:
            limit = status_bytes("VmData") + (self.mebibytes << 20)
            resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
            self.mebibytes = 0
        inputs = inputs[:, :1, None, None].expand(-1, 1, 240, 240)
        return self.head(self.second(self.first(inputs).relu()).relu().mean(dim=(2, 3)))


RUN = (
    *PLAIN,
    "MODEL._target_=tests.helpers.greedy.Greedy",
    "DATA.BATCH_SIZE=16",
    "TRAIN.EFFECTIVE_BATCH_SIZE=16",
    "TRAIN.EMA.ENABLED=True",
    "SCHEDULE.WARMUP_STEPS=4",
    "TRAIN.AUTO_RESUME=True",
)
"""Three epochs of six steps of 16 samples."""
SAYS_SPLIT = "repeating the step"


def sized(largest):
    return f"DATA.BATCH_SIZE={largest}"


def split_run(run, name, *options):
    outcome = run(*RUN, SPLIT, f"EXPERIMENT.NAME={name}", *options)
    assert outcome.code == 0, outcome.err
    return outcome


def test_a_resumed_run_keeps_to_the_smaller_micro_batches(run, tmp_path, monkeypatch):
    fault = (*greedy(8, from_step=3), "TRAIN.LOG_EVERY=5")  # an average over the interruption too
    split_run(run, "whole", *fault)
    monkeypatch.setenv("INTERRUPT_AT", str(16 * 8))
    assert run(*RUN, SPLIT, *fault).code == 130
    monkeypatch.delenv("INTERRUPT_AT")
    saved = checkpoint_of(tmp_path / "runs/plain")
    assert (saved["progress"]["step"], saved["micro_batch_limit"]) == (8, 8)
    assert (saved["plan"]["MICRO_BATCH"], saved["plan"]["ACCUMULATION_STEPS"]) == (8, 2)
    assert SAYS_SPLIT not in split_run(run, "plain", *fault).out
    assert_same_states(tmp_path / "runs/plain", tmp_path / "runs/whole")
    assert curve(tmp_path / "runs/plain") == curve(tmp_path / "runs/whole")
    result = json.loads((tmp_path / "runs/plain/result.json").read_text())
    sizes = ("batch_size", "accumulation_steps", "effective_batch")
    assert [result[name] for name in sizes] == [8, 2, 16]


@pytest.mark.e2e
def test_sizes_that_autobatch_found_are_split_and_kept(run, tmp_path):
    searched = (
        "DATA.AUTOBATCH.ENABLED=True",
        "DATA.AUTOBATCH.MIN_STEPS_PER_EPOCH=1",
        "DATA.AUTOBATCH.MAX_BATCH_SIZE=16",
        "TRAIN.EFFECTIVE_BATCH_SIZE=null",
    )
    fault = greedy(8, from_step=200)  # after what the trials count
    outcome = split_run(run, "plain", *searched, *fault, "TRAIN.EPOCHS=40")
    saved = checkpoint_of(tmp_path / "runs/plain")
    assert AutoBatchResult.from_dict("train", saved["autobatch"]["train"]).batch_size == 16
    assert outcome.out.count(SAYS_SPLIT) == 1
    assert (saved["micro_batch_limit"], saved["plan"]["EFFECTIVE_BATCH"]) == (8, 16)
    again = split_run(run, "plain", *searched, *fault, "TRAIN.EPOCHS=41")
    assert SAYS_SPLIT not in again.out
    plan = checkpoint_of(tmp_path / "runs/plain")["plan"]
    assert (plan["MICRO_BATCH"], plan["EFFECTIVE_BATCH"]) == (8, 16)


@pytest.mark.slow
def test_a_real_shortage_of_memory_is_survived(run_in_child, tmp_path):
    # Validation is never split, so its batches are small ones that always fit.
    model = f"MODEL._target_={__name__}.Convolutions"
    options = (*RUN, model, "TRAIN.EPOCHS=1", "DATA.BATCH_SIZE_VAL=4")
    outcome = run_in_child(*options, SPLIT, "MODEL.mebibytes=200")
    assert outcome.code == 0, outcome.err
    assert SAYS_SPLIT in outcome.out + outcome.err
    saved = checkpoint_of(tmp_path / "runs/plain")
    assert saved["progress"]["step"] == 6
    assert saved["micro_batch_limit"] < 16


# Several processes.

TWO = (*(token for token in RUN if "EFFECTIVE" not in token), "TRAIN.EFFECTIVE_BATCH_SIZE=32")
"""Three epochs of three steps of 32 samples, 16 on each of two ranks."""


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("from_step", "where"),
    [
        (0, "forward"),
        # The other rank may have made the update.
        pytest.param(4, "clip", marks=pytest.mark.slow),
    ],
)
def test_ranks_save_a_checkpoint_and_resume_at_a_smaller_size(torchrun, tmp_path, from_step, where):
    fault, whole = tmp_path / "runs/fault", tmp_path / "runs/whole"
    clip = "TRAIN.CLIP_GRAD_NORM=100"
    greedy_rank = (*greedy(8, from_step=from_step, where=where), "MODEL.rank=1")
    options = (*greedy_rank, "EXPERIMENT.NAME=fault", clip, SPLIT)
    assert torchrun(2, *TWO, *options).code != 0
    saved = load_checkpoint(fault / "checkpoints/failed_rank.pt")
    done = (saved["progress"]["step"], saved["progress"]["samples"])
    assert done == (from_step, from_step % 3 * 32)
    assert saved["state"]["model"]["num_samples"] == 16 * from_step  # without the failed step
    assert (saved["micro_batch_limit"], saved["plan"]["MICRO_BATCH"]) == (8, 8)
    assert saved["plan"]["EFFECTIVE_BATCH"] == 32

    outcome = torchrun(2, *TWO, *options)
    assert outcome.code == 0, outcome.err
    assert curve(fault)[0] == list(range(1, 10))
    sizes = () if from_step else (sized(8),)
    assert torchrun(2, *TWO, "EXPERIMENT.NAME=whole", clip, *sizes).code == 0
    if not from_step:
        assert_same_states(fault, whole)
    for name, tensor in weights(whole).items():
        torch.testing.assert_close(weights(fault)[name], tensor, rtol=2e-3, atol=2e-4)


@pytest.mark.e2e
def test_without_split_the_ranks_end_without_a_checkpoint(torchrun, tmp_path):
    assert torchrun(2, *TWO, *greedy(8), "MODEL.rank=1").code != 0
    assert not list((tmp_path / "runs/plain").glob("checkpoints/*.pt"))


@pytest.mark.slow
def test_torchrun_restarts_the_ranks_until_they_fit(tmp_path):
    command = [*TORCHRUN, "--nproc_per_node=2", "--max-restarts=2", "-m", "linnaeus.main"]
    fault = (*greedy(4, from_step=2), "MODEL.rank=1", SPLIT)
    children.python(*command, *TWO, *fault, cwd=tmp_path).ok()
    assert checkpoint_of(tmp_path / "runs/plain")["micro_batch_limit"] == 4
    assert curve(tmp_path / "runs/plain")[0] == list(range(1, 10))


@pytest.mark.slow
def test_validation_without_memory_on_one_rank_ends_all(torchrun, tmp_path):
    model = ("MODEL._target_=tests.helpers.greedy.GreedyInValidation", "MODEL.largest=8")
    options = (*TWO, *model, "MODEL.from_sample=70", "MODEL.rank=1", SPLIT)
    ended = torchrun(2, *options)
    assert ended.code != 0
    assert "rank 1: out" in ended.err
    assert checkpoint_of(tmp_path / "runs/plain")["progress"]["epoch"] == 1
    torchrun(2, *options, "DATA.BATCH_SIZE_VAL=8").ok()
    assert curve(tmp_path / "runs/plain")[0] == list(range(1, 10))
