"""Whole runs that run out of memory, in one process and in two, and real shortages of the process."""

import json
import resource

import pytest
from torch import nn

from linnaeus.autobatch.memory.host import status_bytes
from linnaeus.autobatch.result import AutoBatchResult
from linnaeus.training.checkpoint import load_checkpoint
from tests.helpers import children
from tests.helpers.greedy import SPLIT, greedy
from tests.helpers.runs import TORCHRUN, checkpoint_of
from tests.helpers.small_runs import PLAIN, assert_same_states, curve


class Convolutions(nn.Sequential):
    """Large activations and oneDNN's kernels; from the first step on the process may grow by so many MiB."""

    def __init__(self, num_classes, mebibytes=0):
        layers = (nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU())
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, num_classes))
        self.mebibytes = mebibytes

    def forward(self, inputs):
        if self.training and self.mebibytes:
            limit = status_bytes("VmData") + (self.mebibytes << 20)
            resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
            self.mebibytes = 0
        return super().forward(inputs[:, :1, None, None].expand(-1, 1, 240, 240))


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


def test_a_resumed_run_keeps_to_the_smaller_micro_batches(run, tmp_path, monkeypatch):
    options = (*RUN, SPLIT, *greedy(8, from_step=3))
    options += ("TRAIN.LOG_EVERY=5",)  # an average over the interruption too
    run(*options, "EXPERIMENT.NAME=whole").ok()
    monkeypatch.setenv("INTERRUPT_AT", str(16 * 8))
    assert run(*options).code == 130
    monkeypatch.delenv("INTERRUPT_AT")
    saved = checkpoint_of(tmp_path / "runs/plain")
    assert (saved["progress"]["step"], saved["micro_batch_limit"]) == (8, 8)
    assert (saved["plan"]["MICRO_BATCH"], saved["plan"]["ACCUMULATION_STEPS"]) == (8, 2)
    assert SAYS_SPLIT not in run(*options).ok().out
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
    options = (*RUN, SPLIT, *searched, *greedy(8, from_step=200))  # after what the trials count
    outcome = run(*options, "TRAIN.EPOCHS=40").ok()
    saved = checkpoint_of(tmp_path / "runs/plain")
    assert AutoBatchResult.from_dict("train", saved["autobatch"]["train"]).batch_size == 16
    assert outcome.out.count(SAYS_SPLIT) == 1
    assert (saved["micro_batch_limit"], saved["plan"]["EFFECTIVE_BATCH"]) == (8, 16)
    again = run(*options, "TRAIN.EPOCHS=41").ok()
    assert SAYS_SPLIT not in again.out
    plan = checkpoint_of(tmp_path / "runs/plain")["plan"]
    assert (plan["MICRO_BATCH"], plan["EFFECTIVE_BATCH"]) == (8, 16)


@pytest.mark.slow
def test_a_real_shortage_of_memory_is_survived(run_in_child, tmp_path):
    # Validation is never split, so its batches are small ones that always fit.
    model = f"MODEL._target_={__name__}.Convolutions"
    options = (*RUN, model, "TRAIN.EPOCHS=1", "DATA.BATCH_SIZE_VAL=4")
    outcome = run_in_child(*options, SPLIT, "MODEL.mebibytes=200").ok()
    assert SAYS_SPLIT in outcome.out
    saved = checkpoint_of(tmp_path / "runs/plain")
    assert saved["progress"]["step"] == 6
    assert saved["micro_batch_limit"] < 16


# Several processes.

TWO = (*(token for token in RUN if "EFFECTIVE" not in token), "TRAIN.EFFECTIVE_BATCH_SIZE=32")
"""Three epochs of three steps of 32 samples, 16 on each of two ranks."""


@pytest.mark.e2e
def test_ranks_save_a_checkpoint_and_resume_at_a_smaller_size(torchrun, tmp_path):
    """One fails to clip its gradients in the fifth step, after the other one may have updated the model."""
    fault, options = tmp_path / "runs/fault", (*TWO, "TRAIN.CLIP_GRAD_NORM=100")
    failing = (
        *options,
        *greedy(8, from_step=4, where="clip"),
        "MODEL.rank=1",
        SPLIT,
        "EXPERIMENT.NAME=fault",
    )
    assert torchrun(2, *failing).code != 0
    saved = load_checkpoint(fault / "checkpoints/failed_rank.pt")
    assert (saved["progress"]["step"], saved["progress"]["samples"]) == (4, 32)
    assert saved["state"]["model"]["num_samples"] == 4 * 16, "without the failed step"
    assert (saved["micro_batch_limit"], saved["plan"]["MICRO_BATCH"]) == (8, 8)
    assert saved["plan"]["EFFECTIVE_BATCH"] == 32
    torchrun(2, *failing).ok()
    assert curve(fault)[0] == list(range(1, 10))


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
