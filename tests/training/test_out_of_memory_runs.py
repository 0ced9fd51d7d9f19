"""Whole runs that run out of memory, in one process and in two, and real shortages of the process."""

import json
import resource

import pytest
import torch
from torch import nn

from linnaeus.autobatch.memory.host import status_bytes
from linnaeus.autobatch.result import AutoBatchResult
from linnaeus.training.checkpoint import load_checkpoint
from tests.helpers import forks
from tests.helpers.forks import ROOT
from tests.helpers.greedy import SPLIT, greedy
from tests.helpers.runs import TORCHRUN, checkpoint_of, weights
from tests.helpers.small_runs import PLAIN, assert_same_states, curve

MIB = 1 << 20


def limit_growth(mebibytes):
    """Let the process grow by so much, and no further."""
    limit = status_bytes("VmData") + mebibytes * MIB
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))


class Convolutions(nn.Module):
    """Large activations and oneDNN's kernels; from the first step on the process may grow by so many MiB."""

    def __init__(self, num_classes, mebibytes=0):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 16, 3), nn.Conv2d(16, 16, 3)
        self.head = nn.Linear(16, num_classes)
        self.mebibytes = mebibytes

    def forward(self, inputs):
        if self.training and self.mebibytes:
            limit_growth(self.mebibytes)
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
IN_VALIDATION = ("MODEL._target_=tests.helpers.greedy.GreedyInValidation", "MODEL.largest=8")
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
    assert (result["batch_size"], result["accumulation_steps"], result["effective_batch"]) == (
        8,
        2,
        16,
    )


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


CONVOLUTIONS = (
    *RUN,
    f"MODEL._target_={__name__}.Convolutions",
    "TRAIN.EPOCHS=1",
    "DATA.BATCH_SIZE_VAL=4",
)
"""Validation is never split, so its batches are small ones that always fit."""


@pytest.mark.slow
def test_a_real_shortage_is_survived_or_ends_the_run(run_in_child, tmp_path):
    outcome = run_in_child(*CONVOLUTIONS, SPLIT, "MODEL.mebibytes=200")
    assert outcome.code == 0, outcome.err
    assert SAYS_SPLIT in outcome.out + outcome.err
    limit = checkpoint_of(tmp_path / "runs/plain")["micro_batch_limit"]
    whole = run_in_child(*CONVOLUTIONS, "EXPERIMENT.NAME=smaller", sized(limit))
    assert whole.code == 0, whole.err
    assert_same_states(tmp_path / "runs/plain", tmp_path / "runs/smaller")
    for mebibytes, code in ((200, 3), (3000, 0)):  # without `split`
        options = (f"MODEL.mebibytes={mebibytes}", f"EXPERIMENT.NAME=raise{mebibytes}")
        assert run_in_child(*CONVOLUTIONS, *options).code == code


# Several processes.

TWO = (*(token for token in RUN if "EFFECTIVE" not in token), "TRAIN.EFFECTIVE_BATCH_SIZE=32")
"""Three epochs of three steps of 32 samples, 16 on each of two ranks."""


def two_ranks(folder, *argv, max_restarts=0):
    command = [
        *TORCHRUN,
        "--nproc_per_node=2",
        f"--max-restarts={max_restarts}",
        "-m",
        "linnaeus.main",
    ]
    return forks.python(*command, *TWO, *argv, cwd=folder, env={"PYTHONPATH": str(ROOT)})


def assert_close_weights(folder, other):
    for name, tensor in weights(other).items():
        torch.testing.assert_close(weights(folder)[name], tensor, rtol=2e-3, atol=2e-4)


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("rank", "from_step", "where"),
    [
        (1, 0, "forward"),
        pytest.param(0, 4, "backward", marks=pytest.mark.slow),
        pytest.param(
            1, 4, "clip", marks=pytest.mark.slow
        ),  # the other rank may have made the update
    ],
)
def test_ranks_end_with_a_checkpoint_and_the_next_attempt_goes_on_smaller(
    tmp_path, rank, from_step, where
):
    folder = tmp_path / "runs/fault"
    clip = "TRAIN.CLIP_GRAD_NORM=100"
    fault = (
        *greedy(8, from_step=from_step, where=where),
        f"MODEL.rank={rank}",
        "EXPERIMENT.NAME=fault",
        clip,
    )
    assert two_ranks(tmp_path, *fault, SPLIT).code != 0
    saved = load_checkpoint(folder / "checkpoints/failed_rank.pt")
    assert (saved["progress"]["step"], saved["progress"]["samples"]) == (
        from_step,
        from_step % 3 * 32,
    )
    assert (
        saved["state"]["model"]["num_samples"] == 16 * from_step
    )  # as before the step that failed
    assert (saved["micro_batch_limit"], saved["plan"]["MICRO_BATCH"]) == (8, 8)
    assert saved["plan"]["EFFECTIVE_BATCH"] == 32

    outcome = two_ranks(tmp_path, *fault, SPLIT)
    assert outcome.code == 0, outcome.err
    assert curve(folder)[0] == list(range(1, 10))
    whole = two_ranks(tmp_path, "EXPERIMENT.NAME=whole", clip, *(() if from_step else (sized(8),)))
    assert whole.code == 0, whole.err
    if not from_step:
        assert_same_states(folder, tmp_path / "runs/whole")
    assert_close_weights(folder, tmp_path / "runs/whole")


@pytest.mark.e2e
def test_without_split_the_ranks_end_without_a_checkpoint(tmp_path):
    assert two_ranks(tmp_path, *greedy(8), "MODEL.rank=1").code != 0
    assert not list((tmp_path / "runs/plain").glob("checkpoints/*.pt"))


@pytest.mark.slow
def test_torchrun_restarts_the_ranks_until_they_fit(tmp_path):
    outcome = two_ranks(tmp_path, *greedy(4, from_step=2), "MODEL.rank=1", SPLIT, max_restarts=2)
    assert outcome.code == 0, outcome.err
    assert checkpoint_of(tmp_path / "runs/plain")["micro_batch_limit"] == 4
    assert curve(tmp_path / "runs/plain")[0] == list(range(1, 10))


@pytest.mark.slow
def test_validation_of_one_rank_that_runs_out_of_memory_ends_all_and_keeps_the_checkpoint(
    tmp_path,
):
    model = (*IN_VALIDATION, "MODEL.from_sample=70", "MODEL.rank=1")
    ended = two_ranks(tmp_path, *model, SPLIT)
    assert ended.code != 0
    assert "rank 1: out" in ended.err
    folder = tmp_path / "runs/plain"
    assert checkpoint_of(folder)["progress"]["epoch"] == 1
    again = two_ranks(tmp_path, *model, SPLIT, "DATA.BATCH_SIZE_VAL=8")
    assert again.code == 0, again.err
    assert curve(folder)[0] == list(range(1, 10))
