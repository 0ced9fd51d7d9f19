"""Runs that are resumed: in another place of the epoch, on other processes, with another configuration."""

import json
import re
import shutil

import pytest

from linnaeus.config.schema import ScheduleConfig
from linnaeus.runtime.errors import DataError
from linnaeus.runtime.run_folder import read_state
from linnaeus.training.schedule import lr_factor
from tests.helpers.datasets import write_image
from tests.helpers.runs import SMALL, assert_same_bits, checkpoint_of, weights
from tests.helpers.small_runs import (
    NAME,
    PLAIN,
    Clusters,
    assert_same_run,
    curve,
    lines_of,
    plan_of,
    validations_of,
)

e2e = pytest.mark.e2e


class Crashing(Clusters):
    """Reading so many samples of a split ends the run with an error."""

    def __init__(self, split, crash_in="", crash_after=0, **options):
        super().__init__(split, **options)
        self.until_crash = crash_after if split == crash_in else 0

    def __getitem__(self, index):
        self.until_crash -= 1
        if self.until_crash == 0:
            raise DataError("crashed")
        return super().__getitem__(index)


DATASET = "DATA.DATASET"
RESUMABLE = (
    *PLAIN,
    f"{DATASET}._target_={__name__}.Crashing",
    "MODEL.drop=0.3",
    "TRAIN.EMA.ENABLED=True",
    "TRAIN.AUTO_RESUME=True",
    "DATA.BATCH_SIZE=8",
    "SCHEDULE.WARMUP_STEPS=4",
    "SCHEDULE.MIN_LR_FRACTION=0.1",
)
"""Three epochs of 12 steps, 100 samples each. Later tokens override these."""


READ_BEFORE = {"train": 8 + 8, "val": 1}
"""Samples that are read to learn their shape, and the first batch, read twice as it draws numbers."""


def interrupted(after):
    """The option that ends a run with Ctrl-C once so many training samples have been read."""
    return f"{DATASET}.interrupt_after={after + READ_BEFORE['train']}"


def crashed(split, after):
    """The options that end a run with an error once so many samples of a split have been read."""
    return f"{DATASET}.crash_in={split}", f"{DATASET}.crash_after={after + READ_BEFORE[split]}"


def files_of(folder):
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in paths
    }


def rates_at(positions, total_steps):
    factor = lr_factor(
        ScheduleConfig(MIN_LR_FRACTION=0.1), steps_per_epoch=[total_steps], warmup_steps=4
    )
    return [0.01 * factor(position) for position in positions]


@e2e
def test_with_another_batch_the_learning_rate_reaches_its_floor(run, tmp_path):
    assert run(*RESUMABLE, interrupted(132)).code == 130
    folder = tmp_path / "runs/plain"
    progress = checkpoint_of(folder)["progress"]
    assert (progress["epoch"], progress["samples"]) == (1, 40)
    outcome = run(*RESUMABLE, "DATA.BATCH_SIZE=12", "TRAIN.ACCUMULATION_STEPS=2").ok()
    assert "EFFECTIVE_BATCH 8 -> 24" in outcome.out
    steps, rates, _ = curve(folder)
    assert steps == [*range(1, len(steps) + 1)]
    plan, first = plan_of(folder), progress["step"]
    total, position = plan["TOTAL_STEPS"], plan["STEPS_PER_EPOCH"] + 40 / 24
    assert rates[first : first + 2] == pytest.approx(rates_at([position, position + 1], total))
    assert rates[-1] == pytest.approx(rates_at([total - 1], total)[0])
    group, *_ = checkpoint_of(folder)["state"]["optimizer"]["param_groups"]
    assert group["lr"] == pytest.approx(0.001), "the floor"


@e2e
def test_other_processes_go_on_at_the_same_place(run, torchrun, tmp_path):
    options = (*RESUMABLE, f"{DATASET}.length=97", "OPTIMIZER.NAME=lamb")
    assert run(*options, interrupted(132)).code == 130
    before = checkpoint_of(tmp_path / "runs/plain")["progress"]
    torchrun(3, *options).ok()
    folder = tmp_path / "runs/plain"
    num_steps = before["step"] + (97 - before["samples"]) // 24 + 4  # of the last epoch
    steps, rates, _ = curve(folder)
    assert steps == [*range(1, num_steps + 1)]
    position = before["epoch"] * 4 + before["samples"] / 24
    [expected] = rates_at([position], plan_of(folder)["TOTAL_STEPS"])
    assert rates[before["step"]] == pytest.approx(expected)
    groups = checkpoint_of(folder)["state"]["optimizer"]["param_groups"]
    assert groups[0]["lr"] == pytest.approx(0.001)
    assert all(group["step"] == num_steps for group in groups), "lamb counts in its groups"


FAILING = {
    "data": (f"{DATASET}._target_=tests.nowhere.Missing",),
    "plan": ("TRAIN.EFFECTIVE_BATCH_SIZE=1000",),
    "first batch": crashed("train", 3),
}
FRESH = (*RESUMABLE, "TRAIN.AUTO_RESUME=False", "TRAIN.EPOCHS=1")


@e2e
@pytest.mark.parametrize(
    ("reason", "resume"),
    [
        ("data", True),
        ("plan", False),
        ("first batch", False),
        ("first batch", True),
    ],
)
def test_a_start_that_fails_leaves_the_earlier_run_alone(run, tmp_path, reason, resume):
    run(*FRESH).ok()
    if resume:
        shutil.rmtree(tmp_path / "runs/plain/checkpoints")  # nothing to resume, a run all the same
    before = files_of(tmp_path / "runs")
    outcome = run(*FRESH, *FAILING[reason], f"TRAIN.AUTO_RESUME={resume}")
    assert outcome.code in (1, 2), outcome.err
    assert files_of(tmp_path / "runs") == before


@e2e
def test_a_finished_run_changes_only_by_a_missing_result(run, tmp_path):
    resume, path = "TRAIN.AUTO_RESUME=True", tmp_path / "runs/plain/result.json"
    run(*FRESH).ok()
    before, result = files_of(tmp_path / "runs"), json.loads(path.read_text())
    run(*FRESH, resume).ok()
    assert files_of(tmp_path / "runs") == before
    path.unlink()  # the process was killed after its last checkpoint
    run(*FRESH, resume).ok()
    assert json.loads(path.read_text())["metrics"] == result["metrics"]
    run(*FRESH, resume, "TRAIN.EPOCHS=2").ok()
    assert len(lines_of(tmp_path / "runs/plain", "val")) == 2


@pytest.mark.parametrize(
    ("crash", "at_step", "samples"),
    [
        (crashed("train", 75), 9, 72),
        pytest.param(
            crashed("val", 1), 12, 96, marks=e2e
        ),  # its steps are done, its validation is not
        pytest.param(crashed("val", 120), 24, 96, marks=e2e),
    ],
)
def test_a_run_that_died_within_an_epoch_ends_as_if_it_had_not(
    run, tmp_path, crash, at_step, samples
):
    options = (*RESUMABLE, "TRAIN.CHECKPOINT_EVERY_STEPS=4")
    run(*options, f"{NAME}whole").ok()
    assert run(*options, *crash).code == 1
    folder = tmp_path / "runs/plain"
    progress = checkpoint_of(folder)["progress"]
    assert (progress["step"], progress["samples"]) == (at_step, samples)
    assert progress["seconds"] > 0
    run(*options).ok()
    assert_same_run(folder, tmp_path / "runs/whole")
    assert (folder / "result.json").exists()


STOPPING = (
    "TRAIN.EARLY_STOPPING.METRIC=loss",
    "TRAIN.EARLY_STOPPING.PATIENCE=2",
    "TRAIN.EARLY_STOPPING.MIN_DELTA=9",
    "TRAIN.EPOCHS=6",
    "SCHEDULE.PATIENCE=0",
    "SCHEDULE.GAMMA=0.5",
    "OPTIMIZER.LR=1.0",
    "TRAIN.EMA.ENABLED=False",
)
"""No validation improves on the first by more than 9: the run ends after three epochs."""


def test_plateau_and_early_stopping_resume_exactly(run, tmp_path):
    options, runs = (*RESUMABLE, *STOPPING, "SCHEDULE.NAME=plateau"), tmp_path / "runs"
    whole, plain = runs / "whole", runs / "plain"
    assert (run(*options, f"{NAME}whole").code, run(*options, interrupted(228)).code) == (0, 130)
    saved = checkpoint_of(plain)
    assert (saved["progress"]["num_stale"], saved["progress"]["samples"]) == (1, 40)
    assert saved["schedule"]["_last_lr"][0] < 1, "the rate has dropped before the interruption"
    run(*options, "TRAIN.RESUME_WITH=lr").ok()  # which changes nothing
    assert_same_bits(weights(plain), weights(whole))
    assert curve(plain) == curve(whole)
    varying = dict.fromkeys(("run", "training_s", "images_per_s"))
    ours, theirs = (
        json.loads((each / "result.json").read_text()) | varying for each in (plain, whole)
    )
    assert ours == theirs
    assert ours["stopped_early"]
    lines = lines_of(plain, "val")
    for metric, end in (("loss", min), ("top1/class", max)):
        assert ours["best"][metric] == end(line[metric] for line in lines)
    assert validations_of(plain) == [12, 24, 36]
    before = files_of(runs)
    assert (run(*options).code, files_of(runs)) == (0, before), "it was finished"
    run(*options, "TRAIN.EARLY_STOPPING.PATIENCE=3").ok()
    assert validations_of(plain) == [12, 24, 36, 48]


def test_renamed_classes_are_refused_on_resuming(run, tmp_path):
    names = [f"DATA.DATASET.LEVELS=[family,{name}]" for name in ("species", "kind")]
    run(*SMALL, names[0], "TRAIN.EPOCHS=1").ok()
    before = files_of(tmp_path / "runs")
    refused = run(*SMALL, names[1], "TRAIN.AUTO_RESUME=True")
    assert refused.code == 2
    assert "family, kind" in refused.err
    assert files_of(tmp_path / "runs") == before
    run(*SMALL, names[0], "TRAIN.AUTO_RESUME=True").ok()


PHOTOS = (
    *SMALL,
    "~DATA.DATASET",
    "DATA.DATASET.NAME=imagefolder",
    "DATA.DATASET.ROOT=photos",
    "DATA.BATCH_SIZE=8",
    "TRAIN.AUTO_RESUME=True",
)


def write_photos(folder, numbers):
    for name in ("finch", "heron"):
        for number in numbers:
            write_image(folder / name / f"{number}.png", number)


def said_of(outcome):
    """The numbers in the warning of resuming with other samples."""
    lines = [line for line in outcome.ok().out.splitlines() if f"another {DATASET}" in line]
    return [[*map(int, re.findall(r"\b\d+\b", line.split(DATASET)[1]))] for line in lines]


def test_added_and_removed_images_are_counted_on_resuming(run, tmp_path):
    for split in ("train", "val"):
        write_photos(tmp_path / "photos" / split, range(10))
    run(*PHOTOS, "TRAIN.EPOCHS=1").ok()
    assert said_of(run(*PHOTOS)) == []
    write_photos(tmp_path / "photos/train", range(10, 13))
    (tmp_path / "photos/train/finch/0.png").unlink()
    (tmp_path / "photos/val/heron/0.png").rename(tmp_path / "photos/val/heron/20.png")
    assert said_of(run(*PHOTOS, "TRAIN.EPOCHS=3")) == [[2, 7, 20, 25]]
    assert said_of(run(*PHOTOS, "TRAIN.EPOCHS=4")) == []


def test_images_keep_their_splits_on_resuming(run, tmp_path):
    """Also in another folder."""
    write_photos(tmp_path / "photos", range(20))
    run(*PHOTOS, "TRAIN.EPOCHS=1").ok()
    (tmp_path / "photos").rename(tmp_path / "moved")
    options = (*PHOTOS, f"{DATASET}.ROOT=moved")
    assert "split.csv" not in run(*options).ok().out, "no file is counted as gone or new"
    split = tmp_path / "runs/small/split.csv"
    before, files = split.read_bytes(), files_of(tmp_path / "runs")
    write_photos(tmp_path / "moved", range(20, 40))
    refused = run(*options, "TRAIN.EPOCHS=3")
    assert refused.code == 2, "the held-out part would be another one"
    assert files_of(tmp_path / "runs") == files
    kept = (f"{DATASET}.NAME=manifest", f"{DATASET}.TRAIN={split}")
    assert all(option in refused.err for option in kept)
    run(*options, *kept, "TRAIN.EPOCHS=3").ok()
    assert split.read_bytes() == before


@e2e
def test_ranks_stop_early_together(torchrun, tmp_path):
    options = (
        *RESUMABLE,
        *STOPPING,
        "SCHEDULE.NAME=plateau",
        "TRAIN.VALIDATE_EVERY=2",
        "TRAIN.EPOCHS=9",
    )
    torchrun(2, *options).ok()
    folder = tmp_path / "runs/plain"
    assert [line["epoch"] for line in lines_of(folder, "val")] == [2, 4, 6]
    assert json.loads((folder / "result.json").read_text())["stopped_early"]
    assert read_state(folder).status == "finished"


@e2e
def test_an_infinite_loss_is_found_before_the_next_checkpoint(run, tmp_path):
    options = (
        *RESUMABLE,
        "TRAIN.CHECKPOINT_EVERY_STEPS=1",
        "TRAIN.LOG_EVERY=100",
        "OPTIMIZER.NAME=sgd",
        "OPTIMIZER.LR=1e30",
        "TRAIN.CLIP_GRAD_NORM=None",
        "SCHEDULE.WARMUP_STEPS=0",
    )
    assert run(*options).code == 1
    step = checkpoint_of(tmp_path / "runs/plain")["progress"]["step"]
    assert step < 11, "long before the first line is logged"
