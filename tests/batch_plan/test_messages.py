from dataclasses import replace

import yaml

from linnaeus.batch_plan.summary import summary_lines
from linnaeus.config.schema import BatchScheduleConfig, OptimizerConfig, TrainConfig
from tests.helpers.configs import FACTS, plan_of
from tests.helpers.messages import error_of

FOUR = replace(FACTS, world_size=4)
NORM = replace(FACTS, max_micro_batch_size=128, batchnorm="local")
FEW = replace(FACTS, num_samples=1000)
PRETRAINED = replace(FACTS, pretrained=True)
SGD, LINEAR = OptimizerConfig(NAME="sgd"), OptimizerConfig(LR_SCALING="linear")


def grow(last=64, **schedule):
    return {"schedule": {"NAME": "linear", "FIRST": 16} | schedule, "EFFECTIVE_BATCH_SIZE": last}


def milestones(**schedule):
    return grow(None, NAME="milestones", **schedule)


ERRORS = {
    "fewer samples than processes": (replace(FOUR, num_samples=3), {}),
    "effective batch below the processes": (FOUR, {"EFFECTIVE_BATCH_SIZE": 3}),
    "effective batch, not divisible": (FOUR, {"EFFECTIVE_BATCH_SIZE": 130}),
    "effective batch with BatchNorm": (NORM, {"EFFECTIVE_BATCH_SIZE": 131}),
    "micro-batch of one with BatchNorm": (
        replace(NORM, max_micro_batch_size=1),
        {"EFFECTIVE_BATCH_SIZE": 8},
    ),
    "effective batch above the samples": (FEW, {"EFFECTIVE_BATCH_SIZE": 1001}),
    "first size above the samples": (FEW, grow(FIRST=2000)),
    "last size, not divisible": (FOUR, grow(66)),
    "no first size": (FACTS, grow(FIRST=None)),
    "first size above what fits": (FACTS, grow(None, FIRST=65)),
    "a schedule longer than the run": (FACTS, grow(LENGTH=12)),
    "a schedule in a run of one epoch": (FACTS, grow() | {"EPOCHS": 1}),
    "no length in steps": (FACTS, grow(UNIT="steps")),
    "more steps than the run has": (FEW, grow(UNIT="steps", LENGTH=9999)),
    "no milestone": (FACTS, milestones()),
    "last size beside milestones": (FACTS, grow(NAME="milestones", MILESTONES=[[3, 32]])),
    "milestone after the run": (FACTS, milestones(MILESTONES=[[12, 32]])),
    "milestone after the last step": (FEW, milestones(UNIT="steps", MILESTONES=[[9999, 32]])),
}
WARNINGS = {
    "many steps": (FACTS, {"EFFECTIVE_BATCH_SIZE": 64 * 17}),
    "a prime number of samples": (
        replace(FACTS, max_micro_batch_size=128),
        {"EFFECTIVE_BATCH_SIZE": 131},
    ),
    "few for BatchNorm": (replace(NORM, max_micro_batch_size=15), {}),
    "few for synchronised BatchNorm": (
        replace(FACTS, max_micro_batch_size=7, batchnorm="synchronised", world_size=2),
        {},
    ),
    "fine-tuning": (PRETRAINED, {"EFFECTIVE_BATCH_SIZE": 512}),
    "fine-tuning, a lower rate": (PRETRAINED, {"EFFECTIVE_BATCH_SIZE": 512, "optimizer": SGD}),
    "a tenth of the data": (replace(FACTS, num_samples=639), {}),
    "keys that are not used": (FACTS, {"EFFECTIVE_BATCH_SIZE": 64, "ACCUMULATION_STEPS": 2}),
    "keys of a schedule that is not used": (FACTS, {"schedule": {"FIRST": 8}}),
    "a much raised rate": (FACTS, {"optimizer": LINEAR, "EFFECTIVE_BATCH_SIZE": 2048}),
}


def summary(facts, **wishes):
    train = TrainConfig(BATCH_SCHEDULE=BatchScheduleConfig(**wishes.get("schedule", {})))
    optimizer = wishes.get("optimizer", OptimizerConfig())
    return "\n".join(summary_lines(plan_of(facts, **wishes), train, optimizer))


def test_messages(golden):
    messages = {
        f"error: {title}": error_of(plan_of, facts, **wishes)
        for title, (facts, wishes) in ERRORS.items()
    }
    for title, (facts, wishes) in WARNINGS.items():
        found = plan_of(facts, **wishes)
        messages[f"warning: {title}"] = "\n".join([*found.warnings, *found.notes])
    two = replace(FACTS, world_size=2, num_samples=1200, learning_rate=2e-3)
    messages["summary"] = summary(two, optimizer=LINEAR, EFFECTIVE_BATCH_SIZE=512)
    messages["summary of a schedule"] = summary(replace(FEW, batchnorm="none"), **grow())
    changing = {"NAME": "milestones", "FIRST": 32, "MILESTONES": [[2, 128]]}
    saved = plan_of(replace(FACTS, num_samples=1280), schedule=changing, EPOCHS=3).as_dict()
    messages["in config.yaml"] = yaml.safe_dump(saved, sort_keys=False)
    before = plan_of(FEW, optimizer=LINEAR, EFFECTIVE_BATCH_SIZE=32).as_dict()
    messages["differences"] = "\n".join(
        plan_of(FEW, optimizer=LINEAR, EFFECTIVE_BATCH_SIZE=64).differences(before)
    )
    golden("batch_plan", messages)
