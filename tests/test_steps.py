"""Runs that are measured in optimizer steps or limited to a part of the data, also stopped and resumed."""

import json

import pytest
import torch

from linnaeus.batch_plan.effective_batch import Facts
from linnaeus.batch_plan.plan import plan_batches
from linnaeus.config.schema import OptimizerConfig, ScheduleConfig, TrainConfig
from linnaeus.data.bundle import dataset_length
from linnaeus.data.datasets import build_data
from linnaeus.main import cli
from tests.helpers.configs import load
from tests.helpers.runs import assert_same_bits, checkpoint_of, weights
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
from tests.test_resume import RESUMABLE, crashed, interrupted

STEPS = (
    *RESUMABLE,
    "TRAIN.MAX_STEPS=17",
    "TRAIN.VALIDATE_EVERY_STEPS=5",
    "DATA.LIMIT_TRAIN_SAMPLES=90",
    "DATA.LIMIT_VAL_SAMPLES=30",
    "DATA.DATASET.length=120",
)
"""An epoch of 11 steps and 6 steps of the next one."""


class Noise(Clusters):
    """Labels that the points do not tell: only what was seen can be right."""

    def __init__(self, split):
        super().__init__(split)
        self.labels = self.labels[
            torch.randperm(len(self), generator=torch.Generator().manual_seed(1))
        ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    assert cli([*STEPS, f"EXPERIMENT.OUTPUT_DIR={folder}"]) == 0
    return folder / "plain"


def test_a_run_of_steps_ends_with_its_schedule_and_a_validation(whole):
    assert curve(whole)[0] == [*range(1, 18)]
    assert validations_of(whole) == [5, 10, 15, 17]
    epochs = [line["epoch"] for line in lines_of(whole, "val")]
    assert epochs == pytest.approx([40 / 90, 80 / 90, 1 + 32 / 90, 1 + 48 / 90], abs=1e-4)
    saved = checkpoint_of(whole)
    assert [group["lr"] for group in saved["state"]["optimizer"]["param_groups"]] == pytest.approx(
        [0.001] * 2
    ), "the floor of the schedule"
    plan = plan_of(whole)
    assert (plan["TOTAL_STEPS"], plan["STEPS_PER_EPOCH"]) == (17, 11)
    assert json.loads((whole / "result.json").read_text())["total_steps"] == 17


@pytest.mark.parametrize(
    ("stop", "code", "validated"),
    [
        ((interrupted(40),), 130, []),  # the validation is due
        ((interrupted(100),), 130, [5, 10]),  # in the second epoch
        (crashed("val", 100), 1, [5, 10, 15]),  # in the last one
    ],
)
def test_a_run_of_steps_stopped_anywhere_goes_on_exactly(
    run, tmp_path, whole, stop, code, validated
):
    folder = tmp_path / "runs/plain"
    assert run(*STEPS, *stop).code == code
    assert validations_of(folder) == validated
    run(*STEPS).ok()
    assert_same_run(folder, whole)
    progress = [checkpoint_of(each)["progress"] for each in (folder, whole)]
    assert progress[0] | {"seconds": 0} == progress[1] | {"seconds": 0}
    again = run(*STEPS)
    assert (again.code, "TRAIN.MAX_STEPS" in again.out) == (0, True), "it was finished"


def test_a_fraction_of_an_epoch_is_validated_exactly(run, tmp_path):
    """Of 11 steps the quarters end at 3, 6 and 8, also in an epoch that is cut, and after a resume."""
    options, folders = (*STEPS, "TRAIN.VALIDATE_EVERY_STEPS=0.25"), []
    for name, stops in {"whole": (), "stopped": (24, 24, 60)}.items():
        for stop in stops:
            assert run(*options, f"{NAME}{name}", interrupted(stop)).code == 130
        run(*options, f"{NAME}{name}").ok()
        folders.append(tmp_path / "runs" / name)
        assert validations_of(folders[-1]) == [3, 6, 8, 11, 14, 17]
    assert_same_run(*folders)
    run(*options, f"{NAME}stopped", "TRAIN.MAX_STEPS=22").ok()
    assert validations_of(folders[1]) == [3, 6, 8, 11, 14, 17, 19, 22]


def test_more_steps_go_on_within_the_epoch(run, tmp_path):
    constant = ("SCHEDULE.NAME=constant", "SCHEDULE.WARMUP_STEPS=0")
    run(*STEPS, *constant, f"{NAME}whole").ok()
    for steps in (9, 17):
        run(*STEPS, *constant, f"TRAIN.MAX_STEPS={steps}").ok()
    runs = [tmp_path / "runs" / name for name in ("whole", "plain")]
    assert validations_of(runs[1]) == [5, 9, 10, 15, 17]
    assert_same_bits(*map(weights, runs))
    assert curve(runs[0]) == curve(runs[1])


def test_overfitting_validates_on_the_samples_that_train(run, tmp_path):
    options = (
        *PLAIN,
        f"DATA.DATASET._target_={__name__}.Noise",
        "OPTIMIZER.LR=0.05",
        "DATA.BATCH_SIZE=8",
    )
    accuracy = {}
    for more in ("TRAIN.OVERFIT_BATCHES=2", "DATA.LIMIT_TRAIN_SAMPLES=16"):
        run(*options, more, "TRAIN.EPOCHS=80", "TRAIN.VALIDATE_EVERY=80").ok()
        assert plan_of(tmp_path / "runs/plain")["STEPS_PER_EPOCH"] == 2
        accuracy[more] = lines_of(tmp_path / "runs/plain", "val")[-1]["top1/class"]
    assert accuracy["TRAIN.OVERFIT_BATCHES=2"] == 1 > accuracy["DATA.LIMIT_TRAIN_SAMPLES=16"]


@pytest.mark.parametrize(
    "options",
    [
        "TRAIN.MAX_STEPS=9 TRAIN.BATCH_SCHEDULE.NAME=linear",
        "TRAIN.VALIDATE_EVERY_STEPS=5 TRAIN.VALIDATE_EVERY=2",
        "TRAIN.VALIDATE_EVERY_STEPS=2.5",
        "DATA.LIMIT_TRAIN_SAMPLES=9 TRAIN.OVERFIT_BATCHES=1",
        "DATA.AUTOBATCH.ENABLED=True TRAIN.OVERFIT_BATCHES=1",
    ],
)
def test_keys_that_contradict_each_other_are_one_error(run, options):
    outcome = run(*PLAIN, *options.split())
    assert outcome.code == 2
    assert options.partition("=")[0] in outcome.err


@pytest.mark.parametrize(("name", "split"), [("digits", "train"), ("synthetic", "val")])
def test_a_limit_takes_the_same_random_samples(name, split):
    config = load(f"DATA.DATASET.NAME={name}", f"DATA.LIMIT_{split.upper()}_SAMPLES=40").DATA
    first, again, other = (build_data(config, seed=seed).splits[split] for seed in (3, 3, 4))
    assert dataset_length(first) == 40 == len(first.targets)
    assert torch.equal(first.targets, again.targets) > torch.equal(first.targets, other.targets)
    assert len(first.targets[:, -1].unique()) >= 5, "a random part has most classes"
    assert torch.equal(first[7][1], first.targets[7])


@pytest.mark.parametrize("max_steps", [1, 12, 13, 40])
@pytest.mark.parametrize("effective", [None, 8, 24])
def test_the_plan_has_as_many_steps_as_wanted(max_steps, effective):
    train = TrainConfig(MAX_STEPS=max_steps, EFFECTIVE_BATCH_SIZE=effective, EPOCHS=2)
    facts = Facts(max_micro_batch_size=8, world_size=1, num_samples=100, learning_rate=0.1)
    plan = plan_batches(train, OptimizerConfig(), ScheduleConfig(), facts)
    assert plan.total_steps == max_steps
    last, samples = plan.num_epochs - 1, plan.samples_per_epoch[-1]
    assert plan.is_over(last, samples) > plan.is_over(last, 0)
    assert plan.position(last, samples) == max_steps
    taken = 8 if samples > 8 else 0  # resumed with other sizes: the rest has no sample more
    rest = plan.rest_of_epoch(last, taken)
    assert sum(each.effective_batch_size * each.num_steps for each in rest) <= samples - taken
