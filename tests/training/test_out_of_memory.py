"""Training that runs out of memory: a real error of torch's allocator, in a step of a real run."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from linnaeus.autobatch.planning import PlannedSizes
from linnaeus.autobatch.result import AutoBatchResult
from linnaeus.batching.facts import Facts
from linnaeus.batching.plan import plan_batches
from linnaeus.config.load import load_config
from linnaeus.data.datasets import build_data
from linnaeus.dist import World
from linnaeus.errors import LinnaeusError
from linnaeus.memory.process import ProcessLimit, status_bytes
from linnaeus.training.build import Assembly, assemble
from linnaeus.training.out_of_memory import memory_sentence, write_snapshot
from linnaeus.training.state_bytes import StateBytes
from linnaeus.training.step_guard import StepGuard
from tests.batching.test_runs import PLAIN, Layers, checkpoint, curve, lines_of
from tests.helpers import forks
from tests.helpers.forks import ROOT, Outcome
from tests.helpers.runs import TORCHRUN, Run, assert_same_bits, weights

EXABYTE = 1 << 60
MIB = 1 << 20
STATUS = Path("/proc/self/status")


def allocate_too_much() -> None:
    """Let torch's allocator raise what it raises when memory has run out."""
    torch.empty(EXABYTE, dtype=torch.uint8)


class Greedy(Layers):
    """In one training forward or backward pass, and in later ones, batches above a size need too much.

    Where INTERRUPT_AT says so, it presses Ctrl-C after so many samples. It counts samples in a buffer, and
    draws random numbers that its outputs do not depend on, so that what is not restored shows.
    """

    def __init__(
        self,
        num_classes: int,
        from_sample: int = 0,
        largest: int = 0,
        where: str = "forward",
        rank: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(num_classes, **options)
        if os.environ.get("RANK", "0") != str(rank):
            largest = 0
        self.from_sample, self.largest, self.where = from_sample, largest, where
        self.register_buffer("num_samples", torch.zeros((), dtype=torch.int64))
        self.register_buffer("drawn", torch.zeros(3, dtype=torch.float64), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training:
            return super().forward(inputs)
        self.num_samples += len(inputs)
        if self.num_samples == int(os.environ.get("INTERRUPT_AT", "0")):
            os.kill(os.getpid(), signal.SIGINT)
        self.drawn = torch.tensor([torch.rand(()).item(), np.random.rand(), random.random()]).double()
        first, *rest = self
        outputs = hidden = first(inputs)
        for layer in rest:
            outputs = layer(outputs)
        if self.largest and self.num_samples > self.from_sample and len(inputs) > self.largest:
            if self.where == "forward":
                allocate_too_much()
            if self.where == "clip":  # in a process of its own
                torch.nn.utils.clip_grad_norm_ = lambda *arguments: allocate_too_much()  # type: ignore[assignment]
                return outputs  # type: ignore[no-any-return]
            hidden.register_hook(lambda gradient: allocate_too_much())  # later layers have gradients then
        return outputs  # type: ignore[no-any-return]


class Hungry(Greedy):
    """From the same place on, the process may grow by so many MiB; a forward pass needs 32 a sample."""

    def __init__(self, num_classes: int, mebibytes: int, **options: Any) -> None:
        super().__init__(num_classes, **options)
        self.mebibytes: int | None = mebibytes

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = super().forward(inputs)
        if self.training and self.num_samples > self.from_sample:
            if self.mebibytes is not None:
                [line] = [line for line in STATUS.read_text().splitlines() if line.startswith("VmData")]
                limit = int(line.split()[1]) * 1024 + self.mebibytes * MIB
                resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
                self.mebibytes = None
            large = outputs[:, :1].expand(-1, 2 * MIB)
            outputs = outputs + 1e-3 * large.sin().sin().sin().sin().mean()
        return outputs


class Convolutions(nn.Module):
    """Large activations and oneDNN's kernels; from the first step on the process may grow by so many MiB."""

    def __init__(self, num_classes: int, mebibytes: int = 0) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 16, 3), nn.Conv2d(16, 16, 3)
        self.head = nn.Linear(16, num_classes)
        self.mebibytes = mebibytes

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training and self.mebibytes:
            limit = status_bytes("VmData") + self.mebibytes * MIB
            resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
            self.mebibytes = 0
        inputs = inputs[:, :1, None, None].expand(-1, 1, 160, 160)
        return self.head(self.second(self.first(inputs).relu()).relu().mean(dim=(2, 3)))  # type: ignore[no-any-return]


class GreedyOnce(torch.optim.SGD):
    """Runs out of memory in its third update, after it has changed the parameters."""

    num_updates = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.num_updates += 1
        if self.num_updates == 3:
            allocate_too_much()


class GreedyInValidation(Layers):
    """After so many samples of validation, batches above a size need too much."""

    def __init__(self, num_classes: int, largest: int, from_sample: int = 0, rank: int | None = None) -> None:
        super().__init__(num_classes)
        self.largest, self.from_sample, self.num_validated = largest, from_sample, 0
        if rank is not None and int(os.environ.get("RANK", "0")) != rank:
            self.from_sample = sys.maxsize

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training:
            self.num_validated += len(inputs)
            if self.num_validated > self.from_sample and len(inputs) > self.largest:
                allocate_too_much()
        return super().forward(inputs)


class Bloated(Layers):
    """Has a buffer that cannot be copied from its fourth step on. EMA would copy it too."""

    num_steps = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.num_steps += self.training
        if self.num_steps == 3:
            self.register_buffer("large", torch.zeros(1, dtype=torch.uint8).expand(EXABYTE), persistent=False)
        return super().forward(inputs)


class Switchable(Greedy):
    """Has a switch for gradient checkpointing, which changes nothing here."""

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.is_checkpointing = enable


RUN = (
    *PLAIN, f"MODEL._target_={__name__}.Greedy", "DATA.BATCH_SIZE=16", "TRAIN.EFFECTIVE_BATCH_SIZE=16",
    "TRAIN.EMA.ENABLED=True", "SCHEDULE.WARMUP_STEPS=4", "TRAIN.AUTO_RESUME=True",
)  # fmt: skip
"""Three epochs of six steps of 16 samples."""
SPLIT = "TRAIN.ON_OUT_OF_MEMORY=split"


def greedy(largest: int, *, from_step: int = 0, where: str = "forward") -> tuple[str, ...]:
    """The options under which larger micro-batches run out of memory after so many optimizer steps."""
    return f"MODEL.largest={largest}", f"MODEL.from_sample={16 * from_step}", f"MODEL.where={where}"


def sized(largest: int) -> str:
    return f"DATA.BATCH_SIZE={largest}"


def split_run(run: Run, name: str, *options: str) -> Any:
    outcome = run(*RUN, SPLIT, f"EXPERIMENT.NAME={name}", *options)
    assert outcome.code == 0, outcome.err
    return outcome


def assert_same_states(a: Path, b: Path) -> None:
    """Model, optimizer and average are equal bit for bit."""
    states = [checkpoint(folder)["state"] for folder in (a, b)]
    assert_same_bits(states[0]["model"], states[1]["model"])
    assert_same_bits(states[0]["ema"]["module"], states[1]["ema"]["module"])
    for index, moments in states[0]["optimizer"]["state"].items():
        assert_same_bits(moments, states[1]["optimizer"]["state"][index])


# One process.


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(
    "options",
    [
        (),
        pytest.param(("DATA.NUM_WORKERS=1",), marks=pytest.mark.slow),
        ("TRAIN.CLIP_GRAD_NORM=0.1", "TRAIN.AMP=fp16"),
    ],
)
def test_from_the_first_step_on_it_is_the_run_with_smaller_micro_batches(
    run: Run, tmp_path: Path, where: str, options: tuple[str, ...]
) -> None:
    split_run(run, "plain", *greedy(8, where=where), *options)
    split_run(run, "smaller", sized(8), *options)
    assert_same_states(tmp_path / "runs/plain", tmp_path / "runs/smaller")
    assert curve(tmp_path / "runs/plain") == curve(tmp_path / "runs/smaller")


@pytest.mark.parametrize("where", ["forward", pytest.param("backward", marks=pytest.mark.slow)])
def test_later_it_goes_on_as_a_run_resumed_with_smaller_micro_batches(
    run: Run, tmp_path: Path, where: str
) -> None:
    stopped = "DATA.DATASET.interrupt_after=168"  # 8 samples are read before training: in step 10
    outcome = split_run(run, "plain", *greedy(4, from_step=9, where=where))
    assert outcome.out.count("the step is taken again") == 2  # with 8, and with 4
    assert "at most 8 samples" in outcome.out
    assert "at most 4 samples; the effective batch stays 16" in outcome.out
    before = run(*RUN, "EXPERIMENT.NAME=resumed", stopped)
    assert before.code == 130
    assert checkpoint(tmp_path / "runs/resumed")["progress"]["step"] in (9, 10)
    step = checkpoint(tmp_path / "runs/resumed")["progress"]["step"]
    split_run(run, "fault", *greedy(4, from_step=step, where=where))
    split_run(run, "resumed", sized(4))
    assert_same_states(tmp_path / "runs/fault", tmp_path / "runs/resumed")
    steps, rates, losses = curve(tmp_path / "runs/fault")
    assert steps == list(range(1, 19))
    assert (steps, rates, losses) == curve(tmp_path / "runs/resumed")


def test_without_the_fault_nothing_is_different(run: Run, tmp_path: Path) -> None:
    split_run(run, "plain")
    assert run(*RUN, "EXPERIMENT.NAME=raise").code == 0
    assert_same_states(tmp_path / "runs/plain", tmp_path / "runs/raise")
    smaller = split_run(run, "smaller", sized(8))
    with pytest.raises(AssertionError, match="tensors differ"):  # so equal bits say that it was split
        assert_same_states(tmp_path / "runs/plain", tmp_path / "runs/smaller")
    assert "taken again" not in smaller.out


@pytest.mark.parametrize("size", [15, 7])
def test_odd_micro_batches_are_split_and_weighted_by_their_samples(
    run: Run, tmp_path: Path, size: int
) -> None:
    odd = (f"TRAIN.EFFECTIVE_BATCH_SIZE={size}", sized(size))
    outcome = split_run(run, "plain", *odd, *greedy(size // 2 + 1))
    split_run(run, "whole", *odd)
    assert outcome.out.count("the step is taken again") == 1
    assert checkpoint(tmp_path / "runs/plain")["plan"]["MICRO_BATCH"] == size // 2 + 1
    whole = weights(tmp_path / "runs/whole")
    for name, tensor in weights(tmp_path / "runs/plain").items():
        # Sums are rounded in another order, and Adam's division makes the difference larger.
        torch.testing.assert_close(tensor, whole[name], rtol=2e-3, atol=2e-4)


def test_a_resumed_run_keeps_to_the_smaller_micro_batches(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = greedy(8, from_step=3)
    split_run(run, "whole", *fault)
    monkeypatch.setenv("INTERRUPT_AT", str(16 * 8))
    assert run(*RUN, SPLIT, *fault).code == 130
    monkeypatch.delenv("INTERRUPT_AT")
    saved = checkpoint(tmp_path / "runs/plain")
    assert (saved["progress"]["step"], saved["micro_batch_limit"]) == (8, 8)
    assert (saved["plan"]["MICRO_BATCH"], saved["plan"]["ACCUMULATION_STEPS"]) == (8, 2)
    outcome = split_run(run, "plain", *fault)
    assert "memory ran out before: micro-batches have at most 8 samples" in outcome.out
    assert "taken again" not in outcome.out
    assert_same_states(tmp_path / "runs/plain", tmp_path / "runs/whole")
    assert curve(tmp_path / "runs/plain") == curve(tmp_path / "runs/whole")
    result = json.loads((tmp_path / "runs/plain/result.json").read_text())
    assert (result["batch_size"], result["accumulation_steps"], result["effective_batch"]) == (8, 2, 16)


def test_sizes_that_autobatch_found_are_split_and_kept(run: Run, tmp_path: Path) -> None:
    searched = ("DATA.AUTOBATCH.ENABLED=True", "DATA.AUTOBATCH.MAX_BATCH_SIZE=16")
    fault = greedy(8, from_step=200)  # after what the trials count
    outcome = split_run(run, "plain", *searched, *fault, "TRAIN.EPOCHS=40", "TRAIN.EFFECTIVE_BATCH_SIZE=null")
    saved = checkpoint(tmp_path / "runs/plain")
    found = AutoBatchResult.from_dict("train", saved["autobatch"]["train"])
    assert found.batch_size == 16
    assert outcome.out.count("the step is taken again") == 1
    assert (saved["micro_batch_limit"], saved["plan"]["EFFECTIVE_BATCH"]) == (8, 16)
    again = split_run(run, "plain", *searched, *fault, "TRAIN.EPOCHS=41", "TRAIN.EFFECTIVE_BATCH_SIZE=null")
    assert "taken again" not in again.out
    plan = checkpoint(tmp_path / "runs/plain")["plan"]
    assert (plan["MICRO_BATCH"], plan["EFFECTIVE_BATCH"]) == (8, 16)


def test_a_step_that_fails_while_it_clips_unscaled_gradients_is_taken_again(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clip, calls = torch.nn.utils.clip_grad_norm_, []

    def clip_or_fail(*arguments: Any) -> Tensor:
        calls.append(arguments)
        if len(calls) == 1:
            allocate_too_much()
        return clip(*arguments)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip_or_fail)
    options = ("TRAIN.AMP=fp16", "TRAIN.CLIP_GRAD_NORM=0.1")
    assert "taken again" in split_run(run, "plain", *options).out
    split_run(run, "smaller", sized(8), *options)
    assert_same_states(tmp_path / "runs/plain", tmp_path / "runs/smaller")


@pytest.mark.parametrize("failing_call", [1, 4])
def test_a_step_that_fails_while_it_clips_is_not_in_the_noise_scale(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing_call: int
) -> None:
    """In step 4 the run resumed there with the smaller size is the one to compare with."""
    clip, calls = torch.nn.utils.clip_grad_norm_, []

    def clip_or_fail(*arguments: Any) -> Tensor:
        calls.append(arguments)
        if len(calls) == failing_call:
            allocate_too_much()
        return clip(*arguments)

    options = (
        "TRAIN.EFFECTIVE_BATCH_SIZE=32", "TRAIN.NOISE_SCALE.ENABLED=True", "TRAIN.NOISE_SCALE.EVERY=1",
        "TRAIN.AMP=fp16", "TRAIN.CLIP_GRAD_NORM=0.1", "TRAIN.CHECKPOINT_EVERY_STEPS=1",
    )  # fmt: skip
    if failing_call > 1:
        monkeypatch.setenv("INTERRUPT_AT", str(32 * (failing_call - 1)))
        assert run(*RUN, SPLIT, "EXPERIMENT.NAME=smaller", *options).code == 130
        monkeypatch.delenv("INTERRUPT_AT")
        assert checkpoint(tmp_path / "runs/smaller")["progress"]["step"] == failing_call - 1
    split_run(run, "smaller", sized(8), *options)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip_or_fail)
    assert "taken again" in split_run(run, "plain", *options).out
    assert_same_states(tmp_path / "runs/plain", tmp_path / "runs/smaller")
    ours, theirs = (checkpoint(tmp_path / "runs" / name) for name in ("plain", "smaller"))
    assert ours["noise_scale"]["num"] == 9
    assert ours["noise_scale"] == theirs["noise_scale"]
    assert ours["state"]["scaler"] == theirs["state"]["scaler"]
    assert torch.equal(ours["rng"][0]["torch"], theirs["rng"][0]["torch"])


@pytest.mark.slow
def test_what_the_failed_step_held_is_free_again(run_in_child: Run, tmp_path: Path) -> None:
    """Half the samples need 256 MiB, which the process does not have beside the 384 of the failed step."""
    hungry = (f"MODEL._target_={__name__}.Hungry", "MODEL.from_sample=48", "TRAIN.EPOCHS=1")
    outcome = run_in_child(*RUN, SPLIT, *hungry, "MODEL.mebibytes=420")
    assert outcome.code == 0, outcome.err
    assert outcome.out.count("the step is taken again") == 1
    assert "out of memory in optimizer step 4, with micro-batches of 16" in outcome.out
    ample = run_in_child(*RUN, SPLIT, *hungry, "MODEL.mebibytes=3000", "EXPERIMENT.NAME=ample")
    assert ample.code == 0, ample.err
    assert "taken again" not in ample.out
    assert [line["step"] for line in lines_of(tmp_path / "runs/plain")] == list(range(1, 7))


CONVOLUTIONS = (*RUN, f"MODEL._target_={__name__}.Convolutions", "TRAIN.EPOCHS=1", "DATA.BATCH_SIZE_VAL=4")
"""Validation is never split, so its batches are small ones that always fit."""


@pytest.mark.slow
@pytest.mark.parametrize("mebibytes", [2, 60, 120])
def test_a_real_shortage_in_convolutions_is_survived_or_explained(
    run_in_child: Run, tmp_path: Path, mebibytes: int
) -> None:
    """Kernels that had no memory to be written must not fail for ever, nor end the run unexplained."""
    outcome = run_in_child(*CONVOLUTIONS, SPLIT, f"MODEL.mebibytes={mebibytes}")
    assert "Traceback" not in outcome.err
    assert "taken again" in outcome.out + outcome.err
    if mebibytes < 120:
        assert outcome.code in (0, 3), outcome.err
    else:
        assert outcome.code == 0, outcome.err
    if outcome.code == 3:
        assert "RLIMIT_DATA (ulimit -d) allows it" in outcome.err
    else:
        limit = checkpoint(tmp_path / "runs/plain")["micro_batch_limit"]
        whole = run_in_child(*CONVOLUTIONS, "EXPERIMENT.NAME=smaller", sized(limit))
        assert whole.code == 0, whole.err
        assert_same_states(tmp_path / "runs/plain", tmp_path / "runs/smaller")


@pytest.mark.slow
@pytest.mark.parametrize(("mebibytes", "code"), [(120, 3), (3000, 0)])
def test_without_split_the_same_shortage_ends_the_run(run_in_child: Run, mebibytes: int, code: int) -> None:
    outcome = run_in_child(*CONVOLUTIONS, f"MODEL.mebibytes={mebibytes}")
    assert outcome.code == code, outcome.err
    assert "Traceback" not in outcome.err
    assert ("RLIMIT_DATA (ulimit -d) allows it" in outcome.err) == (code == 3)


def test_buffers_and_generators_are_those_before_the_step(run: Run, tmp_path: Path) -> None:
    split_run(run, "plain", *greedy(8, where="backward"))
    samples = 3 * 6 * 16  # without those of the step that failed
    assert checkpoint(tmp_path / "runs/plain")["state"]["model"]["num_samples"] == samples
    split_run(run, "smaller", sized(8))
    states = [checkpoint(tmp_path / "runs" / name)["rng"][0] for name in ("plain", "smaller")]
    assert torch.equal(states[0]["torch"], states[1]["torch"])
    assert torch.equal(states[0]["numpy"][1], states[1]["numpy"][1])
    assert states[0]["python"] == states[1]["python"]


# Errors.


def test_by_default_the_error_says_what_held_the_memory(run: Run, tmp_path: Path) -> None:
    outcome = run(*RUN, *greedy(8, from_step=3))
    assert outcome.code == 3
    assert "Traceback" not in outcome.err
    for text in (
        "out of memory in optimizer step 4, with micro-batches of 16 (x 1 accumulation x 1 processes)",
        "can't allocate memory", "activations, batch, libraries", "parameters", "optimizer",
        "Other processes: ",
        "The size is DATA.BATCH_SIZE, AutoBatch is off", "TRAIN.ON_OUT_OF_MEMORY split",
        "TRAIN.EFFECTIVE_BATCH_SIZE",
    ):  # fmt: skip
        assert text in outcome.err
    assert [line["step"] for line in lines_of(tmp_path / "runs/plain")] == [1, 2, 3]


def test_the_error_names_the_size_found_and_its_budget(run: Run) -> None:
    searched = ("DATA.AUTOBATCH.ENABLED=True", "DATA.AUTOBATCH.MAX_BATCH_SIZE=16")
    outcome = run(*RUN, *searched, *greedy(8, from_step=200), "TRAIN.EPOCHS=40")
    assert outcome.code == 3
    assert "AutoBatch found 16 within a budget of " in outcome.err


@pytest.mark.parametrize("handling", [SPLIT, "TRAIN.ON_OUT_OF_MEMORY=raise"])
def test_validation_that_runs_out_of_memory_is_explained_and_the_checkpoint_is_kept(
    run: Run, tmp_path: Path, handling: str
) -> None:
    model = (f"MODEL._target_={__name__}.GreedyInValidation", "MODEL.largest=8", "MODEL.from_sample=150")
    outcome = run(*RUN, handling, *model)
    assert outcome.code == 3
    assert "Traceback" not in outcome.err
    for text in (
        "out of memory in the validation after epoch 2, with batches of 16: ", "can't allocate memory",
        "The size is DATA.BATCH_SIZE_VAL, AutoBatch is off for validation", "activations, batch, libraries",
        "What helps: DATA.BATCH_SIZE_VAL below 16; DATA.AUTOBATCH.ENABLED_VAL True; a smaller model",
        "The last checkpoint is kept",
    ):  # fmt: skip
        assert text in outcome.err
    assert checkpoint(tmp_path / "runs/plain")["progress"]["epoch"] == 1
    again = run(*RUN, handling, *model, "DATA.BATCH_SIZE_VAL=8")  # the first remedy
    assert again.code == 0, again.err
    assert curve(tmp_path / "runs/plain")[0] == list(range(1, 19))


def test_without_a_checkpoint_the_error_promises_none(run: Run, tmp_path: Path) -> None:
    outcome = run(*RUN, f"MODEL._target_={__name__}.GreedyInValidation", "MODEL.largest=8")
    assert outcome.code == 3
    assert "in the validation after epoch 1" in outcome.err
    assert "No checkpoint has been written yet" in outcome.err
    assert not list((tmp_path / "runs/plain").glob("checkpoints/*.pt"))


def test_an_error_in_validation_names_the_size_found_and_its_budget(run: Run) -> None:
    searched = ("DATA.AUTOBATCH.ENABLED=True", "DATA.AUTOBATCH.MAX_BATCH_SIZE=16")
    model = (f"MODEL._target_={__name__}.GreedyInValidation", "MODEL.largest=8", "MODEL.from_sample=3200")
    outcome = run(*RUN, *searched, *model, "TRAIN.EPOCHS=40")
    assert outcome.code == 3
    assert ", with batches of 32: " in outcome.err
    assert "AutoBatch found 32 within a budget of " in outcome.err
    assert "What helps: DATA.AUTOBATCH.MAX_BATCH_SIZE_VAL below 32; a smaller model" in outcome.err


def test_another_error_in_validation_is_raised_as_it_is(run: Run) -> None:
    with pytest.raises(ZeroDivisionError):
        run(*RUN, f"MODEL._target_={__name__}.BrokenInValidation")


class BrokenInValidation(Layers):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) / (1 // self.training)


def test_a_copy_before_the_step_that_does_not_fit_is_explained(run: Run, tmp_path: Path) -> None:
    options = (*RUN, f"MODEL._target_={__name__}.Bloated", "TRAIN.EMA.ENABLED=False", "TRAIN.EPOCHS=1")
    outcome = run(*options, SPLIT)
    assert outcome.code == 3
    assert "Traceback" not in outcome.err
    assert "out of memory in optimizer step 4, " in outcome.err
    assert "The copy of the model's buffers" in outcome.err
    assert "DATA.BATCH_SIZE below" not in outcome.err  # no activations are there
    assert [line["step"] for line in lines_of(tmp_path / "runs/plain")] == [1, 2, 3]
    assert run(*options, "EXPERIMENT.NAME=raise").code == 0  # without a copy


REMEDIES = (
    "DATA.BATCH_SIZE below", "DATA.AUTOBATCH.ENABLED True", "DATA.AUTOBATCH.MAX_BATCH_SIZE below",
    "TARGET_MEMORY_FRACTION", "TRAIN.GRADIENT_CHECKPOINTING True", "OPTIMIZER.NAME",
    "TRAIN.EMA.ENABLED False",
)  # fmt: skip
SIZE = {"DATA.BATCH_SIZE below", "DATA.AUTOBATCH.ENABLED True"}
SWITCHABLE = f"MODEL._target_={__name__}.Switchable"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (greedy(8), SIZE),
        ((*greedy(8), SWITCHABLE), SIZE | {"TRAIN.GRADIENT_CHECKPOINTING True"}),
        ((*greedy(8), SWITCHABLE, "TRAIN.GRADIENT_CHECKPOINTING=True"), SIZE),
        (("MODEL.largest=-1", sized(1)), set()),
        (
            (
                *greedy(8, from_step=200), "TRAIN.EPOCHS=40", "DATA.AUTOBATCH.ENABLED=True",
                "DATA.AUTOBATCH.MAX_BATCH_SIZE=16",
            ),
            {"DATA.AUTOBATCH.MAX_BATCH_SIZE below"},
        ),
        (
            (f"OPTIMIZER._target_={__name__}.GreedyOnce", "OPTIMIZER.lr=0.1"),
            {"OPTIMIZER.NAME", "TRAIN.EMA.ENABLED False"},
        ),
        (
            (f"OPTIMIZER._target_={__name__}.GreedyOnce", "OPTIMIZER.lr=0.1", "TRAIN.EMA.ENABLED=False"),
            {"OPTIMIZER.NAME"},
        ),
    ],
    ids=["off", "checkpointing", "checkpointing is on", "one sample", "AutoBatch", "update", "no EMA"],
)  # fmt: skip
def test_only_remedies_with_an_effect_are_named(run: Run, options: tuple[str, ...], named: set[str]) -> None:
    is_own = any(token.startswith("OPTIMIZER.") for token in options)
    tokens = [token for token in RUN if not (is_own and token.startswith("OPTIMIZER."))]
    outcome = run(*tokens, *options)
    assert outcome.code == 3
    remedies = outcome.err.partition("What helps: ")[2]
    assert {remedy for remedy in REMEDIES if remedy in remedies} == named


@pytest.mark.parametrize(("options", "offers"), [(greedy(8), True), (("MODEL.largest=-1", sized(1)), False)])
def test_splitting_is_offered_only_where_it_would_go_on(
    run: Run, options: tuple[str, ...], offers: bool
) -> None:
    outcome = run(*RUN, *options)
    assert outcome.code == 3
    assert ("split would go on" in outcome.err) == offers


@pytest.mark.parametrize("limited_by", ["memory", "dataset"])
def test_a_lower_fraction_is_named_where_memory_was_the_limit(limited_by: str) -> None:
    result = AutoBatchResult(
        "val", 8, certified=True, limited_by=limited_by, target_memory_fraction=0.7, budget_bytes=1,
        total_bytes=1, strategy="guided", seconds=1.0, trials=(),
    )  # fmt: skip
    config = load_config(RUN).config
    plan = plan_batches(config.TRAIN, config.OPTIMIZER, config.SCHEDULE, Facts(16, 1, 100, 0.1))
    origins = PlannedSizes({"val": result}, plan, "").origins(config.DATA)
    fraction = "DATA.AUTOBATCH.TARGET_MEMORY_FRACTION_VAL below 0.7"
    assert (fraction in origins["val"].alternatives) == (limited_by == "memory")
    assert origins["train"].key == "DATA.BATCH_SIZE"


def test_a_limit_of_the_process_is_named_in_place_of_other_processes() -> None:
    state = StateBytes(parameters=1 << 28, buffers=100)
    parts = {"held_bytes": 1 << 30, "outside_bytes": 3 << 30, "total_bytes": 9 << 30, "is_cpu": True}
    limit = ProcessLimit("RLIMIT_DATA (ulimit -d)", total_bytes=5 << 28, used_bytes=5 << 28)
    assert memory_sentence(state, **parts, limit=limit) == (  # type: ignore[arg-type]
        "This process held 1.00 GiB: activations, batch, libraries 0.75, parameters 0.25 (buffers: "
        "next to nothing). RLIMIT_DATA (ulimit -d) allows it 1.25 GiB, of which 1.25 counted as used"
    )
    without = memory_sentence(state, **parts)  # type: ignore[arg-type]
    assert without.startswith("This process held 1.00 of 9.00 GiB: ")
    assert without.endswith(". Other processes: 3.00 GiB")


# What may be read beside a step.


def guarded() -> tuple[Assembly, StepGuard]:
    config = load_config(RUN).config
    data, world = build_data(config.DATA, seed=0), World(torch.device("cpu"))
    assembly = assemble(config.MODEL, config.LOSS, config.OPTIMIZER, config.TRAIN, data, world)
    return assembly, StepGuard(assembly, world)


def read_in_a_thread(assembly: Assembly, guard: StepGuard) -> tuple[threading.Thread, list[Any]]:
    """What the thread of rank 0 does for a rank without memory; the list gets the content or the error."""
    read: list[Any] = []

    def work() -> None:
        try:
            with guard.held():
                read.append(guard.before({"state": {"model": assembly.model.state_dict()}}))
        except LinnaeusError as error:
            read.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread, read


def take_a_step(assembly: Assembly, guard: StepGuard, fails_in: str) -> None:
    with suppress(ZeroDivisionError), guard.step():
        assembly.model.get_buffer("num_samples").add_(16)
        if fails_in == "update":
            guard.before_update()
        raise ZeroDivisionError


def test_after_an_update_that_failed_nobody_waits_and_nothing_is_read() -> None:
    assembly, guard = guarded()
    take_a_step(assembly, guard, fails_in="update")
    thread, read = read_in_a_thread(assembly, guard)
    thread.join(timeout=30)
    assert not thread.is_alive()
    assert isinstance(read[0], LinnaeusError)


def test_after_a_forward_pass_that_failed_the_state_before_it_is_read() -> None:
    assembly, guard = guarded()
    take_a_step(assembly, guard, fails_in="forward")
    thread, read = read_in_a_thread(assembly, guard)
    thread.join(timeout=30)
    assert read[0]["state"]["model"]["num_samples"] == 0


def test_while_an_update_is_under_way_a_reader_waits_for_its_end() -> None:
    assembly, guard = guarded()
    with guard.step():
        assembly.model.get_buffer("num_samples").add_(16)
        guard.before_update()
        thread, read = read_in_a_thread(assembly, guard)
        thread.join(timeout=0.2)
        assert thread.is_alive()
    thread.join(timeout=30)
    assert read[0]["state"]["model"]["num_samples"] == 16


@pytest.mark.parametrize("is_recorded", [True, False])
def test_the_history_of_the_cuda_allocator_is_written_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_recorded: bool
) -> None:
    traces = [[{"action": "alloc"}]] if is_recorded else [[]]
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda device: {"device_traces": traces})
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_text("history"))
    path = write_snapshot(tmp_path, World(torch.device("cuda", 0), rank=1))
    if is_recorded:
        assert path == tmp_path / "out_of_memory_rank1.pickle"
        assert path.read_text() == "history"
    else:
        assert path is None
        assert not list(tmp_path.iterdir())
    assert write_snapshot(tmp_path, World(torch.device("cpu"))) is None


def test_another_error_is_raised_as_it_is(run: Run) -> None:
    with pytest.raises(ZeroDivisionError):
        run(*RUN, SPLIT, f"MODEL._target_={__name__}.Broken")


class Broken(Layers):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) / (1 // (not self.training))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("MODEL.largest=-1",), "a micro-batch of one sample cannot be split"),
        ((*greedy(1), "MODEL.norm=BatchNorm1d"), "one sample, too few for batchnorm"),
        (
            (f"OPTIMIZER._target_={__name__}.GreedyOnce", "OPTIMIZER.lr=0.1"),
            "the update had begun, which cannot be undone",
        ),
    ],
    ids=["one sample", "BatchNorm", "update"],
)
def test_a_step_that_cannot_be_split_is_an_error(run: Run, options: tuple[str, ...], text: str) -> None:
    tokens = [token for token in PLAIN if not token.startswith("OPTIMIZER.")] + list(RUN[len(PLAIN) :])
    outcome = run(*tokens, SPLIT, *options)
    assert outcome.code == 3
    assert text in outcome.err.lower()
    assert "Traceback" not in outcome.err


# Several processes.

TWO = (*(token for token in RUN if "EFFECTIVE" not in token), "TRAIN.EFFECTIVE_BATCH_SIZE=32")
"""Three epochs of three steps of 32 samples, 16 on each of two ranks."""


def two_ranks(folder: Path, *argv: str, max_restarts: int = 1) -> Outcome:
    command = [*TORCHRUN, "--nproc_per_node=2", f"--max-restarts={max_restarts}", "-m", "linnaeus.main"]
    return forks.python(*command, *TWO, *argv, cwd=folder, env={"PYTHONPATH": str(ROOT)})


@pytest.mark.parametrize(
    ("rank", "from_step", "where"),
    [
        (1, 0, "forward"),
        pytest.param(0, 4, "backward", marks=pytest.mark.slow),
        pytest.param(0, 0, "forward", marks=pytest.mark.slow),
        pytest.param(1, 4, "backward", marks=pytest.mark.slow),
    ],
)
def test_ranks_end_with_a_checkpoint_and_the_next_attempt_goes_on_smaller(
    tmp_path: Path, rank: int, from_step: int, where: str
) -> None:
    fault = (*greedy(8, from_step=from_step, where=where), f"MODEL.rank={rank}", SPLIT)
    ended = two_ranks(tmp_path, *fault, "EXPERIMENT.NAME=fault", max_restarts=0)
    assert ended.code != 0
    assert "all ranks end with a checkpoint" in ended.err
    folder = tmp_path / "runs/fault"
    saved = checkpoint(folder)
    assert (saved["progress"]["step"], saved["progress"]["samples"]) == (from_step, from_step % 3 * 32)
    assert saved["state"]["model"]["num_samples"] == 16 * from_step  # as before the step that failed
    assert (saved["micro_batch_limit"], saved["plan"]["MICRO_BATCH"]) == (8, 8)
    assert saved["plan"]["EFFECTIVE_BATCH"] == 32

    outcome = two_ranks(tmp_path, *fault, "EXPERIMENT.NAME=fault", max_restarts=0)
    assert outcome.code == 0, outcome.err
    assert "memory ran out before: micro-batches have at most 8 samples" in outcome.out
    steps, _, _ = curve(folder)
    assert steps == list(range(1, 10))
    whole = two_ranks(tmp_path, "EXPERIMENT.NAME=whole", *(() if from_step else (sized(8),)))
    assert whole.code == 0, whole.err
    if not from_step:
        assert_same_states(folder, tmp_path / "runs/whole")
    for name, tensor in weights(tmp_path / "runs/whole").items():
        torch.testing.assert_close(weights(folder)[name], tensor, rtol=2e-3, atol=2e-4)


@pytest.mark.slow
def test_a_rank_that_fails_while_it_clips_has_sent_its_gradients(tmp_path: Path) -> None:
    """Rank 0 may have made the update by then, and saves the state after it."""
    fault = (*greedy(8, from_step=4, where="clip"), "MODEL.rank=1", SPLIT, "TRAIN.CLIP_GRAD_NORM=0.1")
    ended = two_ranks(tmp_path, *fault, max_restarts=0)
    assert ended.code != 0
    assert "out of memory in optimizer step 5" in ended.err
    assert "all ranks end with a checkpoint" in ended.err
    saved = checkpoint(tmp_path / "runs/plain")
    step = saved["progress"]["step"]
    assert step in (4, 5)
    assert saved["state"]["model"]["num_samples"] == 16 * step
    outcome = two_ranks(tmp_path, *fault, max_restarts=0)
    assert outcome.code == 0, outcome.err
    lost = {5} if step == 5 else set()  # the mean loss of all ranks is known only after the update
    assert curve(tmp_path / "runs/plain")[0] == sorted({*range(1, 10)} - lost)
    whole = two_ranks(tmp_path, "EXPERIMENT.NAME=whole", "TRAIN.CLIP_GRAD_NORM=0.1")
    assert whole.code == 0, whole.err
    for name, tensor in weights(tmp_path / "runs/whole").items():
        torch.testing.assert_close(weights(tmp_path / "runs/plain")[name], tensor, rtol=2e-3, atol=2e-4)


@pytest.mark.slow
def test_torchrun_restarts_the_ranks_until_they_fit(tmp_path: Path) -> None:
    outcome = two_ranks(tmp_path, *greedy(4, from_step=2), "MODEL.rank=1", SPLIT, max_restarts=2)
    assert outcome.code == 0, outcome.err
    assert checkpoint(tmp_path / "runs/plain")["micro_batch_limit"] == 4
    assert curve(tmp_path / "runs/plain")[0] == list(range(1, 10))


def test_without_split_the_ranks_end_without_a_checkpoint(tmp_path: Path) -> None:
    ended = two_ranks(tmp_path, *greedy(8), "MODEL.rank=1", max_restarts=0)
    assert ended.code != 0
    assert "[rank 0] rank 1: out of memory in optimizer step 1" in ended.err
    assert not list((tmp_path / "runs/plain").glob("checkpoints/*.pt"))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_validation_of_one_rank_that_runs_out_of_memory_ends_all_and_keeps_the_checkpoint(
    tmp_path: Path, rank: int
) -> None:
    model = (
        f"MODEL._target_={__name__}.GreedyInValidation", "MODEL.largest=8", "MODEL.from_sample=70",
        f"MODEL.rank={rank}",
    )  # fmt: skip
    ended = two_ranks(tmp_path, *model, SPLIT, max_restarts=0)
    assert ended.code != 0
    assert f"{'' if rank == 0 else 'rank 1: '}out of memory in the validation after epoch 2" in ended.err
    folder = tmp_path / "runs/plain"
    assert checkpoint(folder)["progress"]["epoch"] == 1
    again = two_ranks(tmp_path, *model, SPLIT, "DATA.BATCH_SIZE_VAL=8", max_restarts=0)
    assert again.code == 0, again.err
    assert curve(folder)[0] == list(range(1, 10))
