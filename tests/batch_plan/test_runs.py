"""Runs under a batch plan: what they count, and that the split of a batch changes nothing else."""

import json

import pytest
import yaml
from torch import nn

from linnaeus.data.loader import num_cores
from tests.helpers.runs import assert_same_bits, checkpoint_of, weights
from tests.helpers.small_runs import NAME, PLAIN, curve, lines_of, plan_of


@pytest.mark.e2e
@pytest.mark.distributed
def test_two_processes_train_as_one(run, torchrun, tmp_path):
    """The same effective size; 103 samples leave some over for any number of processes."""
    options = (
        *PLAIN,
        "DATA.DATASET.length=103",
        "TRAIN.EFFECTIVE_BATCH_SIZE=32",
        "DATA.BATCH_SIZE=8",
        "OPTIMIZER.LR_SCALING=sqrt",
        "SCHEDULE.WARMUP_FRACTION=0.3",
    )
    assert run(*options, f"{NAME}by1").code == 0
    one = curve(tmp_path / "runs/by1")
    assert len(one[0]) == 9
    outcome = torchrun(2, *options, f"{NAME}by2")
    assert outcome.code == 0, outcome.err
    folder = tmp_path / "runs/by2"
    assert (plan_of(folder)["WORLD_SIZE"], plan_of(folder)["ACCUMULATION_STEPS"]) == (2, 2)
    assert curve(folder)[:2] == one[:2]
    assert curve(folder)[2] == pytest.approx(one[2], rel=1e-4)


def test_everything_counts_optimizer_steps(run, tmp_path, monkeypatch):
    """Eight micro-batches are two steps of three and one of two."""
    clipped, clip = [], nn.utils.clip_grad_norm_

    def counting(*arguments):
        clipped.append(1)
        return clip(*arguments)

    monkeypatch.setattr(nn.utils, "clip_grad_norm_", counting)
    outcome = run(
        *PLAIN,
        "DATA.DATASET.length=64",
        "DATA.BATCH_SIZE=8",
        "TRAIN.EMA.ENABLED=True",
        "TRAIN.ACCUMULATION_STEPS=3",
        "SCHEDULE.MIN_LR_FRACTION=0",
        "SCHEDULE.WARMUP_STEPS=2",
        "OPTIMIZER.NAME=adamw",
    )
    assert outcome.code == 0, outcome.err
    folder, total = tmp_path / "runs/plain", 9
    steps, rates, _ = curve(folder)
    assert steps == list(range(1, total + 1))
    assert rates[:2] == pytest.approx([0.005, 0.01])
    state = checkpoint_of(folder)["state"]
    assert state["ema"]["num_updates"] == total
    assert checkpoint_of(folder)["progress"]["step"] == total
    assert state["optimizer"]["param_groups"][0]["lr"] == pytest.approx(
        0, abs=1e-12
    )  # the decay is over
    assert {int(entry["step"]) for entry in state["optimizer"]["state"].values()} == {total}
    assert len(clipped) == total
    assert [line["step"] for line in lines_of(folder, "val")] == [3, 6, 9]
    assert plan_of(folder)["TOTAL_STEPS"] == total


GROWING = (
    *PLAIN,
    "TRAIN.BATCH_SCHEDULE.NAME=linear",
    "TRAIN.BATCH_SCHEDULE.FIRST=4",
    "TRAIN.EFFECTIVE_BATCH_SIZE=24",
    "TRAIN.BATCH_SCHEDULE.UNIT=steps",
    "TRAIN.BATCH_SCHEDULE.LENGTH=20",
    "DATA.BATCH_SIZE=8",
    "OPTIMIZER.LR_SCALING=linear",
    "OPTIMIZER.BASE_BATCH_SIZE=8",
    "SCHEDULE.NAME=constant",
)
WITHIN = "another micro-batch within the epoch"
SCHEDULES = {
    "by steps": [],
    WITHIN: [
        "TRAIN.BATCH_SCHEDULE.NAME=milestones",
        "TRAIN.BATCH_SCHEDULE.FIRST=8",
        "TRAIN.EFFECTIVE_BATCH_SIZE=20",
        "TRAIN.BATCH_SCHEDULE.MILESTONES=[[3,12],[7,20]]",
    ],
}
"""On top of `GROWING`; the last takes 8, 2 x 6 and 4 x 5 samples."""


@pytest.mark.parametrize(
    ("num_workers", "after", "schedule"),
    [
        (0, 66, WITHIN),
        pytest.param(0, 66, "by steps", marks=pytest.mark.e2e),
        pytest.param(2, 66, WITHIN, marks=pytest.mark.slow),
    ],
)
def test_resuming_within_a_schedule_changes_no_bit(run, tmp_path, schedule, num_workers, after):
    options = [
        *GROWING,
        "MODEL.drop=0.3",
        "TRAIN.EMA.ENABLED=True",
        "TRAIN.AUTO_RESUME=True",
        "TRAIN.EPOCHS=3",
        f"DATA.NUM_WORKERS={num_workers}",
        *SCHEDULES[schedule],
    ]
    assert run(*options, f"{NAME}whole").code == 0
    interrupted = run(*options, f"{NAME}parts", f"DATA.DATASET.interrupt_after={after}")
    assert interrupted.code == 130, interrupted.err
    progress = checkpoint_of(tmp_path / "runs/parts")["progress"]
    if num_workers == 0:  # with workers nobody knows how far training was
        assert progress["epoch"] == after // 100
        assert 50 < progress["samples"] < 90
    assert run(*options, f"{NAME}parts").code == 0
    assert_same_bits(weights(tmp_path / "runs/parts"), weights(tmp_path / "runs/whole"))
    whole, parts = (checkpoint_of(tmp_path / "runs" / name)["state"] for name in ("whole", "parts"))
    assert "schedule" not in whole  # the place in it follows from epoch and samples
    assert_same_bits(whole["ema"]["module"], parts["ema"]["module"])
    assert whole["optimizer"]["param_groups"] == parts["optimizer"]["param_groups"]
    keys = ("step", "lr", "effective_batch")
    lines = [
        [[line[key] for key in keys] for line in lines_of(tmp_path / "runs" / name)]
        for name in ("whole", "parts")
    ]
    assert lines[0] == lines[1]
    if schedule == "by steps":  # 4 more every 4 steps
        sizes = [size for *_, size in lines[0]]
        assert sizes == [min(4 + step // 4 * 4, 24) for step in range(len(sizes))]
        assert [rate for _, rate, _ in lines[0]] == pytest.approx(
            [0.01 * size / 8 for size in sizes]
        )


@pytest.mark.e2e
def test_the_saved_configuration_repeats_the_run(run, tmp_path):
    assert run(*GROWING).code == 0
    saved = tmp_path / "runs/plain/config.yaml"
    again = run("--cfg", str(saved), f"{NAME}again")
    assert again.code == 0, again.err
    assert_same_bits(weights(tmp_path / "runs/plain"), weights(tmp_path / "runs/again"))
    assert plan_of(tmp_path / "runs/plain") == plan_of(tmp_path / "runs/again")


@pytest.mark.parametrize(("asked", "used"), [("null", min(8, num_cores())), ("1", 1)])
def test_the_plan_has_the_loader_processes_in_use(run, tmp_path, asked, used):
    """The key stays as it was set, so that another machine takes its own cores."""
    assert run(*PLAIN, f"DATA.NUM_WORKERS={asked}", "TRAIN.EPOCHS=1").code == 0
    folder = tmp_path / "runs/plain"
    assert plan_of(folder)["NUM_WORKERS"] == used
    text = (folder / "config.yaml").read_text()
    assert yaml.safe_load(text)["DATA"]["NUM_WORKERS"] == yaml.safe_load(asked)


SEARCH = (*PLAIN, "DATA.AUTOBATCH.ENABLED=True")


def found_in(folder):
    return json.loads((folder / "autobatch.json").read_text())["train"]


@pytest.mark.e2e
def test_the_micro_batches_of_the_plan_have_run(run, tmp_path):
    options = (
        *SEARCH,
        "DATA.AUTOBATCH.MAX_BATCH_SIZE=13",
        "TRAIN.AUTO_RESUME=True",
        *SCHEDULES[WITHIN],
        "TRAIN.BATCH_SCHEDULE.UNIT=steps",
        "TRAIN.BATCH_SCHEDULE.LENGTH=20",
    )
    assert run(*options).code == 0
    folder = tmp_path / "runs/plain"
    found = found_in(folder)
    ran = [trial["batch_size"] for trial in found["trials"] if trial["status"] == "fits"]
    used = {row[1] for row in plan_of(folder)["STAGES"][1:]}
    assert used == {8, 12, 10}
    assert used <= set(ran)
    assert found["batch_size"] == 13
    assert len(set(ran)) == len(ran)  # none is tried twice
    assert run(*options, "TRAIN.EPOCHS=4").code == 0
    again = found_in(folder)
    assert (again["batch_size"], again["limited_by"]) == (13, "checkpoint")
    assert [trial["batch_size"] for trial in again["trials"]] == [13, 12, 10, 8], "each once"
