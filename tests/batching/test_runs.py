"""Runs under a batch plan: what they count, and that the split of a batch changes nothing else."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.utils.data import Dataset

from tests.helpers.runs import SMALL, Run, assert_same_bits, weights


class Clusters(Dataset[tuple[Tensor, int]]):
    """Points around three centres. Reading so many of them presses Ctrl-C, once in each process."""

    classes = ("a", "b", "c")

    def __init__(self, split: str, length: int = 100, interrupt_after: int = 0) -> None:
        generator = torch.Generator().manual_seed(len(split))
        self.labels = torch.randint(3, (length,), generator=generator)
        self.points = torch.randn(length, 4, generator=generator) + self.labels[:, None]
        self.remaining = interrupt_after if split == "train" else 0

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.remaining -= 1
        if self.remaining == 0:
            in_worker = torch.utils.data.get_worker_info() is not None
            os.kill(os.getppid() if in_worker else os.getpid(), signal.SIGINT)
        return self.points[index] + 0.1 * torch.randn(4), int(self.labels[index])


class Layers(nn.Sequential):
    """A classifier, with dropout and with the normalisation that is asked for."""

    def __init__(self, num_classes: int, norm: str = "LayerNorm", drop: float = 0.0) -> None:
        super().__init__(
            nn.Linear(4, 16), getattr(nn, norm)(16), nn.ReLU(), nn.Dropout(drop), nn.Linear(16, num_classes)
        )


PLAIN = (
    f"DATA.DATASET._target_={__name__}.Clusters", f"MODEL._target_={__name__}.Layers",
    "EXPERIMENT.DEVICE=cpu", "EXPERIMENT.NAME=plain", "TRAIN.EPOCHS=3", "TRAIN.LOG_EVERY=1",
    "DATA.BATCH_SIZE=32", "OPTIMIZER.LR=0.01",
)  # fmt: skip
"""A run of a tenth of a second, without BatchNorm. Later tokens override these."""

NAME = "EXPERIMENT.NAME="


def lines_of(folder: Path, split: str = "train") -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["split"] == split]


def curve(folder: Path) -> tuple[list[int], list[float], list[float]]:
    """Steps, rates and losses."""
    lines = lines_of(folder)
    steps, rates, losses = ([line[name] for line in lines] for name in ("step", "lr", "loss"))
    return steps, rates, losses


def checkpoint(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(folder / "checkpoints/last.pt", weights_only=True)
    return content


def plan_of(folder: Path) -> dict[str, Any]:
    plan: dict[str, Any] = yaml.safe_load((folder / "config.yaml").read_text())["PLAN"]
    return plan


# One effective size, however it is made up.


def test_accumulation_changes_nothing_but_rounding(run: Run, tmp_path: Path) -> None:
    options = (
        *PLAIN,
        "TRAIN.EFFECTIVE_BATCH_SIZE=32",
        "OPTIMIZER.LR_SCALING=linear",
        "SCHEDULE.WARMUP_EPOCHS=1",
    )
    for accumulation in (1, 2, 4):
        outcome = run(*options, f"DATA.BATCH_SIZE={32 // accumulation}", f"{NAME}by{accumulation}")
        assert outcome.code == 0, outcome.err
        assert (
            f"{32 // accumulation} micro-batch x {accumulation} accumulation x 1 process = 32" in outcome.out
        )
    folders = [tmp_path / f"runs/by{accumulation}" for accumulation in (1, 2, 4)]
    steps, rates, losses = curve(folders[0])
    assert steps == list(range(1, 10))  # 100 samples hold 3 whole steps
    assert max(rates) == 0.01 * 32 / 256
    for folder in folders[1:]:
        assert curve(folder)[:2] == (steps, rates)
        assert curve(folder)[2] == pytest.approx(losses, rel=1e-4)
        for name, tensor in weights(folder).items():
            torch.testing.assert_close(tensor, weights(folders[0])[name], rtol=1e-3, atol=1e-5)


@pytest.mark.distributed
def test_two_processes_train_as_one(run: Run, torchrun: Run, tmp_path: Path) -> None:
    compare_processes(run, torchrun, tmp_path, (2,))


@pytest.mark.slow
@pytest.mark.distributed
def test_four_processes_train_as_one_and_as_two(run: Run, torchrun: Run, tmp_path: Path) -> None:
    compare_processes(run, torchrun, tmp_path, (2, 4))


def compare_processes(run: Run, torchrun: Run, tmp_path: Path, numbers: tuple[int, ...]) -> None:
    """The same effective size; 103 samples leave some over for any number of processes."""
    options = (
        *PLAIN, "DATA.DATASET.length=103", "TRAIN.EFFECTIVE_BATCH_SIZE=32", "DATA.BATCH_SIZE=8",
        "OPTIMIZER.LR_SCALING=sqrt", "SCHEDULE.WARMUP_FRACTION=0.3",
    )  # fmt: skip
    assert run(*options, f"{NAME}by1").code == 0
    one = curve(tmp_path / "runs/by1")
    assert len(one[0]) == 9
    for number in numbers:
        outcome = torchrun(number, *options, f"{NAME}by{number}")
        assert outcome.code == 0, outcome.err
        assert f"8 micro-batch x {4 // number} accumulation x {number} processes = 32" in outcome.out
        several = curve(tmp_path / f"runs/by{number}")
        assert several[:2] == one[:2]
        assert several[2] == pytest.approx(one[2], rel=1e-4)


# Optimizer steps are counted, never micro-batches.


@pytest.mark.parametrize(
    ("accumulation", "length", "steps_per_epoch"),
    [(1, 48, 6), (3, 48, 2), (3, 64, 3), (3, 40, 2)],
    ids=["1", "3", "3, two left over", "3, two left over of five"],
)
def test_everything_counts_optimizer_steps(
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    accumulation: int,
    length: int,
    steps_per_epoch: int,
) -> None:
    clipped, clip = [], nn.utils.clip_grad_norm_

    def counting(*arguments: Any) -> Tensor:
        clipped.append(1)
        return clip(*arguments)

    monkeypatch.setattr(nn.utils, "clip_grad_norm_", counting)
    outcome = run(
        *PLAIN, f"DATA.DATASET.length={length}", "DATA.BATCH_SIZE=8", "TRAIN.EMA.ENABLED=True",
        f"TRAIN.ACCUMULATION_STEPS={accumulation}", "SCHEDULE.MIN_LR_FRACTION=0", "SCHEDULE.WARMUP_STEPS=2",
        "OPTIMIZER.NAME=adamw",
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    folder, total = tmp_path / "runs/plain", 3 * steps_per_epoch
    steps, rates, _ = curve(folder)
    assert steps == list(range(1, total + 1))
    assert rates[:2] == pytest.approx([0.005, 0.01])
    state = checkpoint(folder)["state"]
    assert state["ema"]["num_updates"] == total
    assert checkpoint(folder)["progress"]["step"] == total
    assert state["optimizer"]["param_groups"][0]["lr"] == pytest.approx(0, abs=1e-12)  # the decay is over
    assert {int(entry["step"]) for entry in state["optimizer"]["state"].values()} == {total}
    assert len(clipped) == total
    assert [line["step"] for line in lines_of(folder, "val")] == [steps_per_epoch * n for n in (1, 2, 3)]
    assert f"epoch 1/3  {steps_per_epoch}/{steps_per_epoch}" in outcome.out
    assert plan_of(folder)["TOTAL_STEPS"] == total


def test_log_every_counts_optimizer_steps(run: Run, tmp_path: Path) -> None:
    options = ("DATA.DATASET.length=96", "DATA.BATCH_SIZE=8", "TRAIN.ACCUMULATION_STEPS=3")
    assert run(*PLAIN, *options, "TRAIN.LOG_EVERY=3").code == 0
    assert curve(tmp_path / "runs/plain")[0] == [3, 4, 6, 8, 9, 12]  # 4 steps an epoch, whose end is logged


# A batch that changes.

GROWTH = (
    "TRAIN.BATCH_SCHEDULE.NAME=linear", "TRAIN.BATCH_SCHEDULE.FIRST=4", "TRAIN.BATCH_SCHEDULE.LAST=24",
    "TRAIN.BATCH_SCHEDULE.UNIT=steps", "TRAIN.BATCH_SCHEDULE.LENGTH=20", "DATA.BATCH_SIZE=8",
    "OPTIMIZER.LR_SCALING=linear", "OPTIMIZER.BASE_BATCH_SIZE=8", "SCHEDULE.NAME=constant",
)  # fmt: skip
GROWING = (*PLAIN, *GROWTH)
SCHEDULES: dict[str, list[str]] = {
    "by steps": [],
    "by epochs": ["TRAIN.BATCH_SCHEDULE.UNIT=epochs", "TRAIN.BATCH_SCHEDULE.LENGTH=2"],
    "another micro-batch within the epoch": [
        "TRAIN.BATCH_SCHEDULE.NAME=milestones", "TRAIN.BATCH_SCHEDULE.FIRST=8",
        "TRAIN.BATCH_SCHEDULE.LAST=20", "TRAIN.BATCH_SCHEDULE.MILESTONES=[[3,12],[7,20]]",
    ],
}  # fmt: skip
"""On top of `GROWING`; the last takes 8, 2 x 6 and 4 x 5 samples."""
SIZES = ("TRAIN.BATCH_SCHEDULE.UNIT=steps", "TRAIN.BATCH_SCHEDULE.LENGTH=20")


def test_a_growing_batch_takes_the_sizes_and_rates_of_its_plan(run: Run, tmp_path: Path) -> None:
    outcome = run(*GROWING)
    assert outcome.code == 0, outcome.err
    lines, plan = lines_of(tmp_path / "runs/plain"), plan_of(tmp_path / "runs/plain")
    sizes = [line["effective_batch"] for line in lines]
    # 4 more every 4 steps. An epoch of 100 samples ends when the next step would not fit.
    assert sizes == [4] * 4 + [8] * 4 + [12] * 4 + [16] * 4 + [20] * 4 + [24] * (len(sizes) - 20)
    assert [line["lr"] for line in lines] == pytest.approx([0.01 * size / 8 for size in sizes])
    assert [line["step"] for line in lines] == list(range(1, plan["TOTAL_STEPS"] + 1))
    assert sum(plan["STEPS_PER_EPOCH"]) == plan["TOTAL_STEPS"]
    assert "linear, 4 (4 x 1) to 24 (4 x 6), 6 sizes" in outcome.out


@pytest.mark.parametrize(
    ("num_workers", "after", "schedule"),
    [
        *((0, 66, schedule) for schedule in SCHEDULES),
        *(
            pytest.param(workers, after, schedule, marks=pytest.mark.slow)
            for workers, after in ((0, 166), (2, 66))
            for schedule in SCHEDULES
        ),
    ],
)
def test_resuming_within_a_schedule_changes_no_bit(
    run: Run, tmp_path: Path, schedule: str, num_workers: int, after: int
) -> None:
    options = [
        *GROWING, "MODEL.drop=0.3", "TRAIN.EMA.ENABLED=True", "TRAIN.AUTO_RESUME=True", "TRAIN.EPOCHS=4",
        f"DATA.NUM_WORKERS={num_workers}", *SCHEDULES[schedule],
    ]  # fmt: skip
    assert run(*options, f"{NAME}whole").code == 0
    interrupted = run(*options, f"{NAME}parts", f"DATA.DATASET.interrupt_after={after}")
    assert interrupted.code == 130, interrupted.err
    progress = checkpoint(tmp_path / "runs/parts")["progress"]
    if num_workers == 0:  # with workers nobody knows how far training was
        assert progress["epoch"] == after // 100
        assert 50 < progress["samples"] < 90
    assert run(*options, f"{NAME}parts").code == 0
    assert_same_bits(weights(tmp_path / "runs/parts"), weights(tmp_path / "runs/whole"))
    whole, parts = (checkpoint(tmp_path / "runs" / name)["state"] for name in ("whole", "parts"))
    assert "schedule" not in whole  # the place in it follows from epoch and samples
    assert_same_bits(whole["ema"]["module"], parts["ema"]["module"])
    assert whole["optimizer"]["param_groups"] == parts["optimizer"]["param_groups"]
    keys = ("step", "lr", "effective_batch")
    lines = [[[line[key] for key in keys] for line in lines_of(tmp_path / "runs" / name)]
             for name in ("whole", "parts")]  # fmt: skip
    assert lines[0] == lines[1]


def test_a_resumed_run_says_that_its_plan_has_changed(run: Run, tmp_path: Path) -> None:
    options = (*PLAIN, "TRAIN.AUTO_RESUME=True", "OPTIMIZER.LR_SCALING=linear")
    assert run(*options, "DATA.DATASET.interrupt_after=40").code == 130
    shutil.copytree(tmp_path / "runs/plain", tmp_path / "runs/other")
    assert "another batch plan" not in run(*options).out
    outcome = run(*options, f"{NAME}other", "TRAIN.EFFECTIVE_BATCH_SIZE=64")
    assert "another batch plan" in outcome.out
    assert "EFFECTIVE_BATCH 32 -> 64" in outcome.out
    assert "LEARNING_RATE 0.00125 -> 0.0025" in outcome.out
    plans = [checkpoint(tmp_path / "runs" / name)["plan"] for name in ("plain", "other")]
    assert [plan["EFFECTIVE_BATCH"] for plan in plans] == [32, 64]  # the one that trained
    assert plans[1] == plan_of(tmp_path / "runs/other")
    assert max(line["lr"] for line in lines_of(tmp_path / "runs/other")[2:]) > 0.0015


# What is said, saved and read back.


def test_without_wishes_a_run_is_what_it_was(run: Run, tmp_path: Path) -> None:
    assert run(*PLAIN, f"{NAME}default").code == 0
    same = ("TRAIN.EFFECTIVE_BATCH_SIZE=32", "DATA.DATASET.length=100", "OPTIMIZER.LR_SCALING=none")
    assert run(*PLAIN, *same, f"{NAME}explicit").code == 0
    assert_same_bits(weights(tmp_path / "runs/default"), weights(tmp_path / "runs/explicit"))


@pytest.mark.parametrize(
    "options",
    [
        (*PLAIN, "TRAIN.EFFECTIVE_BATCH_SIZE=48", "OPTIMIZER.LR_SCALING=linear",
         "OPTIMIZER.BASE_BATCH_SIZE=4"),
        GROWING,
        (*PLAIN[:-1], "OPTIMIZER._target_=torch.optim.SGD", "OPTIMIZER.lr=0.1", "DATA.AUTOBATCH.ENABLED=True",
         "DATA.AUTOBATCH.MAX_BATCH_SIZE=8", "TRAIN.EFFECTIVE_BATCH_SIZE=20"),
    ],
    ids=["effective size", "schedule", "AutoBatch"],
)  # fmt: skip
def test_the_saved_configuration_repeats_the_run(run: Run, tmp_path: Path, options: tuple[str, ...]) -> None:
    assert run(*options).code == 0
    saved = tmp_path / "runs/plain/config.yaml"
    again = run("--cfg", str(saved), "DATA.AUTOBATCH.ENABLED=False", f"{NAME}again")
    assert again.code == 0, again.err
    assert_same_bits(weights(tmp_path / "runs/plain"), weights(tmp_path / "runs/again"))
    assert plan_of(tmp_path / "runs/plain") == plan_of(tmp_path / "runs/again")


def test_a_plan_cannot_be_set(run: Run) -> None:
    outcome = run(*PLAIN, "PLAN.MICRO_BATCH=3")
    assert outcome.code == 2
    assert "PLAN.MICRO_BATCH: no such key" in outcome.err


def test_the_search_stops_at_the_share_asked_for(run: Run, tmp_path: Path) -> None:
    outcome = run(
        *PLAIN, "DATA.AUTOBATCH.ENABLED=True", "TRAIN.EFFECTIVE_BATCH_SIZE=24", "DATA.NUM_WORKERS=1"
    )
    assert outcome.code == 0, outcome.err
    found = json.loads((tmp_path / "runs/plain/autobatch.json").read_text())["train"]
    assert (found["batch_size"], found["limited_by"]) == (24, "effective_batch")
    assert "limited by the effective batch asked for" in outcome.out


def test_the_micro_batches_of_the_plan_have_run(run: Run, tmp_path: Path) -> None:
    options = ("DATA.AUTOBATCH.ENABLED=True", "DATA.AUTOBATCH.MAX_BATCH_SIZE=13", "TRAIN.AUTO_RESUME=True")
    assert run(*PLAIN, *options, *SCHEDULES["another micro-batch within the epoch"], *SIZES).code == 0
    folder = tmp_path / "runs/plain"
    found = json.loads((folder / "autobatch.json").read_text())["train"]
    ran = [trial["batch_size"] for trial in found["trials"] if trial["status"] == "fits"]
    used = {row[1] for row in plan_of(folder)["STAGES"][1:]}
    assert used == {8, 12, 10}
    assert used <= set(ran)
    assert found["batch_size"] == 13
    assert sorted(set(ran)) == sorted(ran)  # none is tried twice
    more = (*SCHEDULES["another micro-batch within the epoch"], *SIZES, "TRAIN.EPOCHS=4")
    resumed = run(*PLAIN, *options, *more)
    assert resumed.code == 0
    assert "batch sizes are kept" in resumed.out
    assert json.loads((folder / "autobatch.json").read_text())["train"] == found


def test_a_micro_batch_below_the_bounds_of_the_search_is_not_rounded(run: Run, tmp_path: Path) -> None:
    options = (
        "DATA.AUTOBATCH.ENABLED=True", "DATA.AUTOBATCH.MAX_BATCH_SIZE=64", "DATA.AUTOBATCH.MULTIPLE_OF=8",
        "DATA.AUTOBATCH.MIN_BATCH_SIZE=56",
    )  # fmt: skip
    outcome = run(*PLAIN, *options, "TRAIN.EFFECTIVE_BATCH_SIZE=100")
    assert outcome.code == 0, outcome.err
    found = json.loads((tmp_path / "runs/plain/autobatch.json").read_text())["train"]
    assert found["batch_size"] == 64
    assert found["trials"][-1]["batch_size"] == plan_of(tmp_path / "runs/plain")["MICRO_BATCH"] == 50


NORM = "MODEL.norm=BatchNorm1d"
WARNINGS = {
    "accumulation": (["TRAIN.EFFECTIVE_BATCH_SIZE=34", "DATA.BATCH_SIZE=2"], "17 accumulation steps of 2"),
    "batchnorm": ([NORM, "DATA.BATCH_SIZE=8"], "BatchNorm sees only 8 samples"),
    "fine-tuning": (
        [f"MODEL._target_={__name__}.Pretrained", "MODEL.pretrained=True", "DATA.BATCH_SIZE=512",
         "DATA.DATASET.length=512"],
        "pretrained weights (MODEL.WEIGHTS) may be forgotten",
    ),
    "dataset": ([], "an effective batch of 32 is 32% of the 100 training samples"),
    "last batch": ([NORM, "DATA.DATASET.length=12"], "has 12 of DATA.BATCH_SIZE 32 samples"),
}  # fmt: skip


class Pretrained(Layers):
    """Somebody's weights."""

    def __init__(self, num_classes: int, pretrained: bool) -> None:
        super().__init__(num_classes)


@pytest.mark.parametrize(("options", "text"), WARNINGS.values(), ids=WARNINGS)
def test_warnings_are_given_once_and_saved(run: Run, tmp_path: Path, options: list[str], text: str) -> None:
    outcome = run(*PLAIN, "TRAIN.EPOCHS=2", *options)
    assert outcome.code == 0, outcome.err
    said = [line for line in outcome.out.splitlines() if text in line]
    assert len(said) == 1
    assert "warning: " in said[0]
    assert sum(text in warning for warning in plan_of(tmp_path / "runs/plain")["WARNINGS"]) == 1


def test_a_warning_about_a_size_that_was_found_names_the_key_that_bounds_it(run: Run) -> None:
    options = ("DATA.AUTOBATCH.ENABLED=True", "DATA.AUTOBATCH.MAX_BATCH_SIZE=16", "TRAIN.EPOCHS=1")
    by_hand, found = run(*PLAIN, "DATA.BATCH_SIZE=16", "TRAIN.EPOCHS=1"), run(*PLAIN, *options)
    warning = (
        "an effective batch of 16 is 16% of the 100 training samples, so an epoch has few optimizer steps"
    )
    assert f"{warning}; lower DATA.BATCH_SIZE or" in by_hand.out
    assert f"{warning}; lower DATA.AUTOBATCH.MAX_BATCH_SIZE or" in found.out


def test_an_added_warm_up_is_used_and_said(run: Run, tmp_path: Path) -> None:
    options = ("OPTIMIZER.LR_SCALING=linear", "OPTIMIZER.BASE_BATCH_SIZE=4", "TRAIN.EPOCHS=20")
    outcome = run(*PLAIN, *options)
    assert "one of 3 steps is added" in outcome.out
    assert "warm-up       3 steps" in outcome.out
    assert curve(tmp_path / "runs/plain")[1][:3] == pytest.approx([0.08 / 3, 0.16 / 3, 0.08])


def test_every_group_of_the_optimizer_is_scaled(run: Run, tmp_path: Path) -> None:
    options = (
        "OPTIMIZER.LR_SCALING=sqrt", "OPTIMIZER.WEIGHT_DECAY_SCALING=sqrt", "OPTIMIZER.BASE_BATCH_SIZE=8",
        "OPTIMIZER.WEIGHT_DECAY=0.05",
    )  # fmt: skip
    assert run(*PLAIN, *options).code == 0
    groups = checkpoint(tmp_path / "runs/plain")["state"]["optimizer"]["param_groups"]
    assert [group["initial_lr"] for group in groups] == [0.02, 0.02]
    assert sorted(group["weight_decay"] for group in groups) == [0, 0.1]


ERRORS = [
    (["TRAIN.EFFECTIVE_BATCH_SIZE=101"], ["TRAIN.EFFECTIVE_BATCH_SIZE: 101", "100 training samples"]),
    ([NORM, "TRAIN.EFFECTIVE_BATCH_SIZE=37"], ["TRAIN.EFFECTIVE_BATCH_SIZE: 37", "BatchNorm", "36 or 38"]),
    ([NORM, "TRAIN.EFFECTIVE_BATCH_SIZE=1"], ["TRAIN.EFFECTIVE_BATCH_SIZE: 1", "BatchNorm"]),
    (["TRAIN.EFFECTIVE_BATCH_SIZE=0"], ["TRAIN.EFFECTIVE_BATCH_SIZE", "0"]),
    (["TRAIN.BATCH_SCHEDULE.NAME=linear"], ["TRAIN.BATCH_SCHEDULE.FIRST"]),
    ([*GROWTH, "TRAIN.BATCH_SCHEDULE.LAST=0"], ["TRAIN.BATCH_SCHEDULE.LAST", "0"]),
    ([*GROWTH, "TRAIN.BATCH_SCHEDULE.LAST=101"], ["TRAIN.BATCH_SCHEDULE.LAST: 101", "100"]),
    ([*GROWTH, "TRAIN.BATCH_SCHEDULE.LENGTH=999"], ["TRAIN.BATCH_SCHEDULE.LENGTH", "999"]),
    (["TRAIN.BATCH_SCHEDULE.MILESTONES=[[1,0]]"], ["TRAIN.BATCH_SCHEDULE.MILESTONES", "[[1, 0]]"]),
    (["TRAIN.BATCH_SCHEDULE.MILESTONES=[[2,8],[1,16]]"], ["TRAIN.BATCH_SCHEDULE.MILESTONES"]),
    (["TRAIN.BATCH_SCHEDULE.NAME=cubic"], ["TRAIN.BATCH_SCHEDULE.NAME", "cubic", "exponential"]),
    (["OPTIMIZER.LR_SCALING=root"], ["OPTIMIZER.LR_SCALING", "root", "sqrt"]),
    (["SCHEDULE.WARMUP_FRACTION=2"], ["SCHEDULE.WARMUP_FRACTION", "2"]),
]


@pytest.mark.parametrize(("options", "texts"), ERRORS, ids=[" ".join(options) for options, _ in ERRORS])
def test_errors(run: Run, options: list[str], texts: list[str]) -> None:
    outcome = run(*PLAIN, *options)
    assert outcome.code == 2
    for text in texts:
        assert text in outcome.err
    assert "Traceback" not in outcome.err + outcome.out


@pytest.mark.distributed
def test_fewer_samples_than_processes_in_a_step(torchrun: Run) -> None:
    outcome = torchrun(2, *SMALL, "TRAIN.EFFECTIVE_BATCH_SIZE=1")
    assert outcome.code != 0
    assert "TRAIN.EFFECTIVE_BATCH_SIZE: 1 is below the 2 processes" in outcome.err
    assert "exitcode  : 2" in outcome.err or "exitcode: 2" in outcome.err
