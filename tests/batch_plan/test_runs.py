"""Runs under a batch plan: what they count, and that the split of a batch changes nothing else."""

import json

import pytest
import yaml

from linnaeus.data.loader import num_cores
from tests.helpers.runs import assert_same_bits, checkpoint_of, weights
from tests.helpers.small_runs import NAME, PLAIN, curve, lines_of, plan_of


@pytest.mark.e2e
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


def test_everything_counts_optimizer_steps(run, tmp_path):
    """Eight micro-batches are two steps of three and one of two."""
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
    folder = tmp_path / "runs/plain"
    steps, rates, _ = curve(folder)
    assert steps == list(range(1, 10))
    assert rates[:2] == pytest.approx([0.005, 0.01])
    checkpoint = checkpoint_of(folder)
    ema, optimizer = checkpoint["state"]["ema"], checkpoint["state"]["optimizer"]
    assert optimizer["param_groups"][0]["lr"] == pytest.approx(0, abs=1e-12), "the decay is over"
    counts = [int(entry["step"]) for entry in optimizer["state"].values()]
    counts += [ema["num_updates"], checkpoint["progress"]["step"]]
    assert {*counts, plan_of(folder)["TOTAL_STEPS"]} == {9}
    assert [line["step"] for line in lines_of(folder, "val")] == [3, 6, 9]


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
WITHIN = (
    "TRAIN.BATCH_SCHEDULE.NAME=milestones",
    "TRAIN.BATCH_SCHEDULE.FIRST=8",
    "TRAIN.EFFECTIVE_BATCH_SIZE=20",
    "TRAIN.BATCH_SCHEDULE.MILESTONES=[[3,12],[7,20]]",
)
"""On top of `GROWING`: another micro-batch within the epoch, of 8, 2 x 6 and 4 x 5 samples."""


@pytest.mark.parametrize(
    ("num_workers", "schedule"),
    [
        (0, WITHIN),
        pytest.param(0, (), marks=pytest.mark.e2e),
        pytest.param(2, WITHIN, marks=pytest.mark.slow),
    ],
)
def test_resuming_within_a_schedule_changes_no_bit(run, tmp_path, schedule, num_workers):
    options = [
        *GROWING,
        "MODEL.drop=0.3",
        "TRAIN.EMA.ENABLED=True",
        "TRAIN.AUTO_RESUME=True",
        "TRAIN.EPOCHS=3",
        f"DATA.NUM_WORKERS={num_workers}",
        *schedule,
    ]
    assert run(*options, f"{NAME}whole").code == 0
    interrupted = run(*options, f"{NAME}parts", "DATA.DATASET.interrupt_after=66")
    assert interrupted.code == 130, interrupted.err
    progress = checkpoint_of(tmp_path / "runs/parts")["progress"]
    if num_workers == 0:  # with workers nobody knows how far training was
        assert progress["epoch"] == 0
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
    if not schedule:  # 4 more every 4 steps
        _, rates, sizes = zip(*lines[0], strict=True)
        assert list(sizes) == [min(4 + step // 4 * 4, 24) for step in range(len(sizes))]
        assert rates == pytest.approx([0.01 * size / 8 for size in sizes])


def test_the_plan_has_the_loader_processes_in_use(run, tmp_path):
    """The key stays as it was set, so that another machine takes its own cores."""
    assert run(*PLAIN, "DATA.NUM_WORKERS=null", "TRAIN.EPOCHS=1").code == 0
    folder = tmp_path / "runs/plain"
    assert plan_of(folder)["NUM_WORKERS"] == min(8, num_cores())
    text = (folder / "config.yaml").read_text()
    assert yaml.safe_load(text)["DATA"]["NUM_WORKERS"] is None


def found_in(folder):
    return json.loads((folder / "autobatch.json").read_text())["train"]


@pytest.mark.e2e
def test_the_micro_batches_of_the_plan_have_run(run, tmp_path):
    options = (
        *PLAIN,
        "DATA.AUTOBATCH.ENABLED=True",
        "DATA.AUTOBATCH.MAX_BATCH_SIZE=13",
        "TRAIN.AUTO_RESUME=True",
        *WITHIN,
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
    assert run(*options, "TRAIN.EPOCHS=4").code == 0
    again = found_in(folder)
    assert (again["batch_size"], again["limited_by"]) == (13, "checkpoint")
    assert [trial["batch_size"] for trial in again["trials"]] == [13, 12, 10, 8], "each once"
