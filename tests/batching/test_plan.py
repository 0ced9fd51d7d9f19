"""The batch plan: what must always hold, and what each wish comes to."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from linnaeus.batching.facts import Facts
from linnaeus.batching.plan import BatchPlan, plan_batches
from linnaeus.batching.scaling import scale_factor
from linnaeus.batching.sizes import max_samples_per_rank
from linnaeus.batching.stages import Split, nearest, split_samples
from linnaeus.batching.summary import summary_lines
from linnaeus.config.schema import BatchScheduleConfig, OptimizerConfig, ScheduleConfig, TrainConfig
from linnaeus.errors import ConfigError, DataError

FACTS = Facts(
    max_micro_batch_size=64, world_size=1, num_samples=100_000, learning_rate=0.1, weight_decay=0.05
)


def plan_of(
    facts: Facts = FACTS,
    optimizer: OptimizerConfig | None = None,
    warmup: dict[str, Any] | None = None,
    schedule: dict[str, Any] | None = None,
    **train: Any,
) -> BatchPlan:
    node = TrainConfig(**train, BATCH_SCHEDULE=BatchScheduleConfig(**(schedule or {})))
    return plan_batches(node, optimizer or OptimizerConfig(), ScheduleConfig(**(warmup or {})), facts)


def effective_sizes(plan: BatchPlan) -> list[int]:
    """The effective batch size of every optimizer step."""
    return [stage.effective_batch_size for stage in chain(*plan.epochs) for _ in range(stage.num_steps)]


# What one effective size is made of.


@given(samples_per_rank=st.integers(1, 400), max_micro_batch_size=st.integers(1, 500))
def test_samples_are_split_exactly_with_the_fewest_steps(
    samples_per_rank: int, max_micro_batch_size: int
) -> None:
    split = split_samples(samples_per_rank, max_micro_batch_size)
    assert split.samples_per_rank == samples_per_rank
    possible = [steps for steps in range(1, samples_per_rank + 1) if samples_per_rank % steps == 0]
    fewest = min(steps for steps in possible if samples_per_rank // steps <= max_micro_batch_size)
    assert split == Split(samples_per_rank // fewest, fewest)


@given(
    world_size=st.integers(1, 4), samples_per_rank=st.integers(1, 60), fits=st.integers(1, 40),
    limit=st.integers(1, 40), num_samples=st.integers(240, 500),
)  # fmt: skip
def test_a_limit_splits_the_same_optimizer_steps_more_finely(
    world_size: int, samples_per_rank: int, fits: int, limit: int, num_samples: int
) -> None:
    facts = replace(FACTS, max_micro_batch_size=fits, world_size=world_size, num_samples=num_samples)
    plan = plan_of(facts, EFFECTIVE_BATCH_SIZE=samples_per_rank * world_size, EPOCHS=2)
    limited = plan.limited(limit)
    assert effective_sizes(limited) == effective_sizes(plan)
    assert (limited.learning_rate, limited.total_steps) == (plan.learning_rate, plan.total_steps)
    for before, stage in zip(plan.stages, limited.stages, strict=True):
        sizes = stage.micro_batches
        assert sum(sizes) == samples_per_rank == stage.samples_per_rank
        assert sizes[0] == stage.micro_batch_size == max(sizes) <= limit
        assert sizes[0] - sizes[-1] <= 1
        assert len(sizes) == stage.accumulation_steps
        if before.micro_batch_size <= limit:
            assert stage == before
    assert limited.limited(limit) == limited
    assert sum(limited.micro_batches(0)) == sum(plan.micro_batches(0))
    assert min(limited.micro_batches(1)) == limited.smallest_micro_batch


@given(
    world_size=st.integers(1, 8), samples_per_rank=st.integers(1, 300),
    max_micro_batch_size=st.integers(1, 128), num_samples=st.integers(1, 5000), epochs=st.integers(1, 5),
)  # fmt: skip
def test_every_step_takes_the_effective_size(
    world_size: int, samples_per_rank: int, max_micro_batch_size: int, num_samples: int, epochs: int
) -> None:
    effective = world_size * samples_per_rank
    assume(effective <= num_samples // world_size * world_size)
    facts = replace(
        FACTS, max_micro_batch_size=max_micro_batch_size, world_size=world_size, num_samples=num_samples
    )
    plan = plan_of(facts, EFFECTIVE_BATCH_SIZE=effective, EPOCHS=epochs)
    assert (
        plan.micro_batch_size * plan.accumulation_steps * world_size == plan.effective_batch_size == effective
    )
    assert plan.micro_batch_size <= max_micro_batch_size
    assert plan.steps_per_epoch == (num_samples // effective,) * epochs
    assert plan.total_steps == epochs * (num_samples // effective)
    assert set(effective_sizes(plan)) == {effective}


@given(num_samples=st.integers(64, 3000), effective=st.sampled_from([4, 8, 12, 64]), fits=st.integers(1, 64))
def test_processes_change_nothing_but_the_split(num_samples: int, effective: int, fits: int) -> None:
    optimizer = OptimizerConfig(LR_SCALING="linear", BASE_BATCH_SIZE=2)
    plans = [
        plan_of(
            replace(FACTS, world_size=world_size, num_samples=num_samples, max_micro_batch_size=fits),
            optimizer, EFFECTIVE_BATCH_SIZE=effective,
        )
        for world_size in (1, 2, 4)
    ]  # fmt: skip
    outcomes = {(p.total_steps, p.learning_rate, p.warmup_steps, p.samples_per_epoch) for p in plans}
    assert len(outcomes) == 1


@given(
    max_micro_batch_size=st.integers(1, 200), world_size=st.integers(1, 5), num_samples=st.integers(5, 2000),
    accumulation=st.integers(1, 9),
)  # fmt: skip
def test_without_a_wish_every_whole_micro_batch_is_used(
    max_micro_batch_size: int, world_size: int, num_samples: int, accumulation: int
) -> None:
    facts = replace(
        FACTS, max_micro_batch_size=max_micro_batch_size, world_size=world_size, num_samples=num_samples
    )
    plan = plan_of(facts, ACCUMULATION_STEPS=accumulation, EPOCHS=2)
    per_process = num_samples // world_size
    micro_batch_size = min(max_micro_batch_size, per_process)
    num_micro_batches = per_process // micro_batch_size
    assert list(plan.micro_batches(0)) == [micro_batch_size] * num_micro_batches
    assert plan.steps_per_epoch[0] == math.ceil(num_micro_batches / accumulation)
    assert plan.effective_batch_size == micro_batch_size * min(accumulation, num_micro_batches) * world_size
    assert plan.learning_rate == 0.1


# A size that changes.

schedules = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["linear", "exponential"]),
        "unit": st.sampled_from(["epochs", "steps"]),
        "first": st.integers(1, 200),
        "last": st.integers(1, 200),
        "length": st.integers(1, 30),
        "world_size": st.integers(1, 4),
        "max_micro_batch": st.integers(1, 70),
        "epochs": st.integers(2, 12),
        "num_samples": st.integers(800, 3000),
    }
)


def scheduled(run: dict[str, Any], optimizer: OptimizerConfig | None = None) -> BatchPlan:
    """The plan; runs that would end before the last size are left out."""
    world_size = run["world_size"]
    facts = replace(
        FACTS,
        world_size=world_size,
        max_micro_batch_size=run["max_micro_batch"],
        num_samples=run["num_samples"],
    )
    schedule = {
        "NAME": run["name"], "UNIT": run["unit"], "LENGTH": run["length"],
        "FIRST": run["first"] * world_size, "LAST": run["last"] * world_size,
    }  # fmt: skip
    try:
        return plan_of(facts, optimizer, schedule=schedule, EPOCHS=run["epochs"])
    except ConfigError as error:
        assume("LENGTH" not in str(error))
        raise


@given(run=schedules)
def test_a_schedule_goes_one_way_from_first_to_last_within_what_fits(run: dict[str, Any]) -> None:
    plan = scheduled(run)
    sizes, world_size = effective_sizes(plan), run["world_size"]
    assert sizes[0] == run["first"] * world_size
    assert sizes[-1] == run["last"] * world_size
    sign = 1 if run["last"] >= run["first"] else -1
    assert all(sign * a <= sign * b for a, b in pairwise(sizes))
    for stage in chain(*plan.epochs):
        assert stage.num_steps >= 1
        assert 1 <= stage.micro_batch_size <= run["max_micro_batch"]
        assert stage.effective_batch_size == stage.micro_batch_size * stage.accumulation_steps * world_size


@given(run=schedules)
def test_steps_and_samples_of_a_schedule_add_up(run: dict[str, Any]) -> None:
    plan = scheduled(run)
    per_process = run["num_samples"] // run["world_size"]
    assert plan.total_steps == sum(plan.steps_per_epoch) == len(effective_sizes(plan))
    assert sum(plan.samples_per_epoch) == sum(effective_sizes(plan))
    sizes, step = effective_sizes(plan), 0
    for epoch, stages in enumerate(plan.epochs):
        used = sum(plan.micro_batches(epoch))
        assert used * run["world_size"] == plan.samples_per_epoch[epoch]
        step += plan.steps_per_epoch[epoch]
        following = stages[-1].samples_per_rank
        if run["unit"] == "steps" and step < len(sizes):
            following = sizes[step] // run["world_size"]
        assert used <= per_process < used + following  # no further step would fit in


@given(run=schedules, data=st.data())
def test_the_rest_of_an_epoch_continues_where_it_stopped(run: dict[str, Any], data: st.DataObject) -> None:
    plan = scheduled(run)
    epoch = data.draw(st.integers(0, plan.num_epochs - 1))
    samples_per_rank_of = [
        stage.samples_per_rank for stage in plan.epochs[epoch] for _ in range(stage.num_steps)
    ]
    steps_done = data.draw(st.integers(0, len(samples_per_rank_of)))
    done = sum(samples_per_rank_of[:steps_done]) * plan.world_size
    rest = plan.rest_of_epoch(epoch, done)
    assert [stage.samples_per_rank for stage in rest for _ in range(stage.num_steps)] == samples_per_rank_of[
        steps_done:
    ]
    assert sum(plan.micro_batches(epoch, done)) == sum(samples_per_rank_of[steps_done:])


@given(run=schedules, rule=st.sampled_from(["none", "linear", "sqrt"]))
def test_the_rate_follows_the_rule_at_every_step(run: dict[str, Any], rule: str) -> None:
    plan = scheduled(run, OptimizerConfig(LR_SCALING=rule, BASE_BATCH_SIZE=32))
    for step, size in enumerate(effective_sizes(plan)):
        assert plan.learning_rate * plan.batch_size_lr_factor(step) == pytest.approx(
            0.1 * scale_factor(rule, size, 32)
        )


@given(first=st.integers(1, 64), times=st.integers(1, 16))
def test_a_growing_batch_accumulates_before_its_micro_batch_grows(first: int, times: int) -> None:
    schedule = {"NAME": "linear", "FIRST": first, "LAST": first * times}
    plan = plan_of(schedule=schedule, EPOCHS=9)
    assert {stage.micro_batch_size for stage in chain(*plan.epochs)} == {first}


def test_beyond_sixteen_accumulation_steps_the_micro_batch_grows() -> None:
    plan = plan_of(schedule={"NAME": "exponential", "FIRST": 8, "LAST": 2048}, EPOCHS=9)
    stages = [epoch[0] for epoch in plan.epochs]
    assert [stage.effective_batch_size for stage in stages] == [8 << epoch for epoch in range(9)]
    assert [stage.micro_batch_size for stage in stages] == [8, 8, 8, 8, 8, 16, 32, 64, 64]
    assert [stage.accumulation_steps for stage in stages] == [1, 2, 4, 8, 16, 16, 16, 16, 32]


def test_a_schedule_in_optimizer_steps_changes_within_an_epoch() -> None:
    facts = replace(FACTS, num_samples=100, world_size=2)
    schedule = {"NAME": "linear", "FIRST": 8, "LAST": 24, "UNIT": "steps", "LENGTH": 4}
    plan = plan_of(facts, schedule=schedule, EPOCHS=2)
    assert effective_sizes(plan) == [8, 8, 16, 16, 24, 24, 24, 24, 24, 24]
    assert plan.steps_per_epoch == (6, 4)
    assert list(plan.micro_batches(0)) == [4, 4, 4, 4, 4, 4] + [4] * 3 + [4] * 3


def test_milestones_hold_exactly_from_their_epoch_on() -> None:
    schedule = {"NAME": "milestones", "FIRST": 32, "MILESTONES": [[2, 131], [3, 64]]}
    plan = plan_of(replace(FACTS, max_micro_batch_size=131), schedule=schedule, EPOCHS=5)
    assert [stage.effective_batch_size for stage in chain(*plan.epochs)] == [32, 32, 131, 64, 64]
    assert [stage.micro_batch_size for stage in chain(*plan.epochs)] == [32, 32, 131, 32, 32]
    assert plan.effective_batch_size == 131


def test_a_growing_batch_ends_at_what_fits_where_no_end_is_set() -> None:
    facts = replace(FACTS, world_size=2)
    plan = plan_of(facts, schedule={"NAME": "linear", "FIRST": 16}, ACCUMULATION_STEPS=3, EPOCHS=4)
    assert effective_sizes(plan)[-1] == 64 * 2 * 3
    plan = plan_of(facts, schedule={"NAME": "linear", "FIRST": 16}, EFFECTIVE_BATCH_SIZE=512, EPOCHS=4)
    assert effective_sizes(plan)[-1] == 512


def test_warm_up_in_epochs_counts_the_steps_of_each_epoch() -> None:
    facts = replace(FACTS, num_samples=1600)
    schedule = {"NAME": "milestones", "FIRST": 16, "MILESTONES": [[1, 32], [2, 64]]}
    plan = plan_of(facts, schedule=schedule, warmup={"WARMUP_EPOCHS": 1.5}, EPOCHS=3)
    assert plan.steps_per_epoch == (100, 50, 25)
    assert plan.warmup_steps == 125


# Learning rate, weight decay, warm-up.


@pytest.mark.parametrize(("rule", "expected"), [("none", 0.1), ("linear", 0.8), ("sqrt", 0.1 * math.sqrt(8))])
def test_the_rate_follows_the_effective_batch(rule: str, expected: float) -> None:
    optimizer = OptimizerConfig(LR_SCALING=rule)
    plan = plan_of(optimizer=optimizer, EFFECTIVE_BATCH_SIZE=2048)
    assert plan.learning_rate == pytest.approx(expected)


@given(fits=st.sampled_from([1, 2, 4, 8, 16, 32, 64, 128, 256]), world_size=st.sampled_from([1, 2, 4, 8]))
def test_accumulation_alone_never_changes_the_rate(fits: int, world_size: int) -> None:
    optimizer = OptimizerConfig(LR_SCALING="linear", WEIGHT_DECAY_SCALING="sqrt")
    facts = replace(FACTS, max_micro_batch_size=fits, world_size=world_size)
    plan = plan_of(facts, optimizer, EFFECTIVE_BATCH_SIZE=512)
    assert (plan.learning_rate, plan.weight_decay) == (0.2, 0.05 * math.sqrt(2))


def test_without_scaling_every_bit_stays() -> None:
    facts = replace(FACTS, learning_rate=0.1 + 0.2, weight_decay=1 / 3)
    for plan in (plan_of(facts), plan_of(facts, EFFECTIVE_BATCH_SIZE=4096)):
        assert (plan.learning_rate, plan.weight_decay) == (0.1 + 0.2, 1 / 3)
        assert [plan.batch_size_lr_factor(step) for step in range(3)] == [1.0] * 3


def test_an_optimizer_of_the_users_own_keeps_its_rate() -> None:
    optimizer = {"_target_": "torch.optim.SGD"}
    plan = plan_batches(TrainConfig(EFFECTIVE_BATCH_SIZE=4096), optimizer, ScheduleConfig(), FACTS)
    assert (plan.learning_rate, plan.weight_decay, plan.notes) == (0.1, 0.05, ())


def test_weight_decay_scales_by_the_root() -> None:
    plan = plan_of(optimizer=OptimizerConfig(WEIGHT_DECAY_SCALING="sqrt"), EFFECTIVE_BATCH_SIZE=1024)
    assert plan.weight_decay == pytest.approx(0.05 * 2)
    assert plan.learning_rate == 0.1


@given(k=st.floats(0.01, 100))
def test_the_rules_agree_at_the_base_and_grow(k: float) -> None:
    base, size = 10_000, max(1, round(10_000 * k))
    for rule in ("linear", "sqrt"):
        assert scale_factor(rule, base, base) == 1
        assert (scale_factor(rule, size, base) > 1) == (size > base)
    assert scale_factor("sqrt", size, base) ** 2 == pytest.approx(scale_factor("linear", size, base))


@pytest.mark.parametrize(
    ("effective", "warmup", "steps", "words"),
    [
        (512, {}, 0, None),
        (768, {}, 0, None),
        (1024, {}, 0, "SCHEDULE.WARMUP_EPOCHS 1"),
        (2047, {}, 0, "SCHEDULE.WARMUP_EPOCHS 1"),
        (2048, {}, 144, "one of 144 steps is added"),  # 5 % of 60 epochs of 48 steps
        (2048, {"WARMUP_EPOCHS": 0}, 144, "one of 144 steps is added"),
        (2048, {"WARMUP_STEPS": 7}, 7, None),
        (2048, {"WARMUP_EPOCHS": 1}, 48, None),
        (2048, {"WARMUP_FRACTION": 0.1}, 288, None),
    ],
)
def test_a_much_raised_rate_gets_a_warm_up(
    effective: int, warmup: dict[str, Any], steps: int, words: str | None
) -> None:
    optimizer = OptimizerConfig(LR_SCALING="linear")
    plan = plan_of(optimizer=optimizer, warmup=warmup, EFFECTIVE_BATCH_SIZE=effective, EPOCHS=60)
    assert plan.warmup_steps == steps
    assert len(plan.notes) == (words is not None)
    assert words is None or words in plan.notes[0]


def test_an_added_warm_up_lasts_five_epochs_at_most() -> None:
    plan = plan_of(optimizer=OptimizerConfig(LR_SCALING="linear"), EFFECTIVE_BATCH_SIZE=2048, EPOCHS=300)
    assert plan.warmup_steps == 5 * 48


def test_an_added_warm_up_has_at_least_one_step() -> None:
    facts = replace(FACTS, num_samples=3 * 2048)
    plan = plan_of(facts, OptimizerConfig(LR_SCALING="linear"), EFFECTIVE_BATCH_SIZE=2048, EPOCHS=1)
    assert (plan.total_steps, plan.warmup_steps) == (3, 1)


# Warnings: each has a case where it comes, and one beside it where it does not.

SGD = OptimizerConfig(NAME="sgd")
PRETRAINED = replace(FACTS, pretrained=True)
WARNINGS = {
    "many steps": (
        (FACTS, {"EFFECTIVE_BATCH_SIZE": 64 * 17}),
        (FACTS, {"EFFECTIVE_BATCH_SIZE": 64 * 16}),
        ["17 accumulation steps", "TRAIN.EFFECTIVE_BATCH_SIZE", "TRAIN.GRADIENT_CHECKPOINTING"],
    ),
    "a prime number of samples": (
        (replace(FACTS, max_micro_batch_size=128), {"EFFECTIVE_BATCH_SIZE": 131}),
        (replace(FACTS, max_micro_batch_size=131), {"EFFECTIVE_BATCH_SIZE": 131}),
        ["131 accumulation steps", "TRAIN.EFFECTIVE_BATCH_SIZE 130 or 132"],
    ),
    "few for batchnorm": (
        (replace(FACTS, max_micro_batch_size=15, batchnorm="local"), {}),
        (replace(FACTS, max_micro_batch_size=16, batchnorm="local"), {}),
        ["BatchNorm sees only 15", "GroupNorm", "DATA.BATCH_SIZE"],
    ),
    "few for batchnorm on several processes": (
        (replace(FACTS, max_micro_batch_size=15, batchnorm="local", world_size=2), {}),
        (replace(FACTS, max_micro_batch_size=15, batchnorm="synchronised", world_size=2), {}),
        ["TRAIN.SYNC_BATCHNORM True"],
    ),
    "few for synchronised batchnorm": (
        (replace(FACTS, max_micro_batch_size=7, batchnorm="synchronised", world_size=2), {}),
        (replace(FACTS, max_micro_batch_size=8, batchnorm="synchronised", world_size=2), {}),
        ["BatchNorm sees only 14 samples of all processes"],
    ),
    "fine-tuning": (
        (PRETRAINED, {"EFFECTIVE_BATCH_SIZE": 512}),
        (FACTS, {"EFFECTIVE_BATCH_SIZE": 512}),
        ["pretrained", "OPTIMIZER.LR", "0.0005", "SCHEDULE.WARMUP_EPOCHS"],
    ),
    "fine-tuning, a smaller batch": (
        (PRETRAINED, {"EFFECTIVE_BATCH_SIZE": 512, "optimizer": SGD}),
        (PRETRAINED, {"EFFECTIVE_BATCH_SIZE": 256, "optimizer": SGD}),
        ["pretrained", "0.06"],
    ),
    "fine-tuning, a lower rate": (
        (PRETRAINED, {"EFFECTIVE_BATCH_SIZE": 512, "optimizer": SGD}),
        (replace(PRETRAINED, learning_rate=0.06), {"EFFECTIVE_BATCH_SIZE": 512, "optimizer": SGD}),
        ["pretrained"],
    ),
    "a tenth of the data": (
        (replace(FACTS, num_samples=639), {}),
        (replace(FACTS, num_samples=640), {}),
        ["10% of the 639", "DATA.BATCH_SIZE", "TRAIN.EPOCHS"],
    ),
    "a small last batch": (
        (replace(FACTS, num_samples=15, batchnorm="local"), {}),
        (replace(FACTS, num_samples=16, batchnorm="local"), {}),
        ["last batch", "15 of DATA.BATCH_SIZE 64", "DATA.DATASET"],
    ),
}


@pytest.mark.parametrize(("there", "not_there", "words"), WARNINGS.values(), ids=WARNINGS)
def test_warnings(there: Any, not_there: Any, words: list[str]) -> None:
    def matching(facts: Facts, train: dict[str, Any]) -> list[str]:
        return [text for text in plan_of(facts, **train).warnings if all(word in text for word in words)]

    assert len(matching(*there)) == 1
    assert matching(*not_there) == []


def test_a_quiet_plan_says_nothing() -> None:
    plan = plan_of(replace(FACTS, batchnorm="local"), warmup={"WARMUP_EPOCHS": 5}, EFFECTIVE_BATCH_SIZE=256)
    assert (plan.warnings, plan.notes) == ((), ())


def test_keys_that_another_overrules_are_noted() -> None:
    assert "TRAIN.ACCUMULATION_STEPS" in plan_of(EFFECTIVE_BATCH_SIZE=64, ACCUMULATION_STEPS=2).notes[0]
    (note,) = plan_of(schedule={"FIRST": 8}).notes
    assert "TRAIN.BATCH_SCHEDULE.FIRST is not used" in note


# Errors.


def grow(**schedule: Any) -> dict[str, Any]:
    return {"schedule": {"NAME": "linear", "FIRST": 16, "LAST": 64} | schedule}


FOUR = replace(FACTS, world_size=4)
NORM = replace(FACTS, max_micro_batch_size=128, batchnorm="local")
FEW = replace(FACTS, num_samples=1000)
ERRORS: list[tuple[Facts, dict[str, Any], list[str]]] = [
    (FOUR, {"EFFECTIVE_BATCH_SIZE": 3}, ["TRAIN.EFFECTIVE_BATCH_SIZE: 3 is below the 4 processes"]),
    (FOUR, {"EFFECTIVE_BATCH_SIZE": 130}, ["TRAIN.EFFECTIVE_BATCH_SIZE: 130", "4 processes", "128 or 132"]),
    (FOUR, {"EFFECTIVE_BATCH_SIZE": 5}, ["TRAIN.EFFECTIVE_BATCH_SIZE: 5", "4 or 8"]),
    (NORM, {"EFFECTIVE_BATCH_SIZE": 131}, ["TRAIN.EFFECTIVE_BATCH_SIZE: 131", "BatchNorm", "130 or 132"]),
    (replace(FOUR, batchnorm="local"), {"EFFECTIVE_BATCH_SIZE": 4}, ["BatchNorm", "8 would do"]),
    (
        replace(NORM, max_micro_batch_size=1),
        {"EFFECTIVE_BATCH_SIZE": 8},
        ["BatchNorm (or a model without it)"],
    ),
    (FEW, {"EFFECTIVE_BATCH_SIZE": 1001}, ["TRAIN.EFFECTIVE_BATCH_SIZE: 1001", "1000 training samples"]),
    (FEW, grow(LAST=2000), ["TRAIN.BATCH_SCHEDULE.LAST: 2000", "1000"]),
    (FEW, grow(FIRST=2000), ["TRAIN.BATCH_SCHEDULE.FIRST: 2000", "1000"]),
    (FOUR, grow(LAST=66), ["TRAIN.BATCH_SCHEDULE.LAST: 66", "64 or 68"]),
    (FOUR, grow(FIRST=2, LAST=3), ["BATCH_SCHEDULE.FIRST: 2 is below", "BATCH_SCHEDULE.LAST: 3 is below"]),
    (NORM, grow(LAST=131), ["TRAIN.BATCH_SCHEDULE.LAST: 131", "130 or 132"]),
    (FACTS, grow(FIRST=None), ["TRAIN.BATCH_SCHEDULE.FIRST: needs a value"]),
    (FACTS, grow(LAST=None, FIRST=65), ["TRAIN.BATCH_SCHEDULE.FIRST: 65 is above 64", "what fits"]),
    (FACTS, grow(LENGTH=12), ["TRAIN.BATCH_SCHEDULE.LENGTH: after 12", "11 is the most"]),
    (FACTS, grow() | {"EPOCHS": 1}, ["TRAIN.BATCH_SCHEDULE", "TRAIN.EPOCHS"]),
    (FACTS, grow(UNIT="steps"), ["TRAIN.BATCH_SCHEDULE.LENGTH: needs a value"]),
    (FEW, grow(UNIT="steps", LENGTH=9999), ["TRAIN.BATCH_SCHEDULE.LENGTH", "9999"]),
    (FACTS, grow() | {"EFFECTIVE_BATCH_SIZE": 32}, ["TRAIN.EFFECTIVE_BATCH_SIZE: 32", "LAST 64"]),
    (FACTS, grow(NAME="milestones", LAST=None), ["TRAIN.BATCH_SCHEDULE.MILESTONES: needs at least one"]),
    (FACTS, grow(NAME="milestones", MILESTONES=[[3, 32]]), ["TRAIN.BATCH_SCHEDULE.LAST: 64 is not"]),
    (FACTS, grow(NAME="milestones", LAST=None, MILESTONES=[[12, 32]]), ["MILESTONES: 12 comes after"]),
    (
        FEW,
        grow(NAME="milestones", LAST=None, UNIT="steps", MILESTONES=[[9999, 32]]),
        ["TRAIN.BATCH_SCHEDULE.MILESTONES", "9999"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("facts", "wishes", "words"), ERRORS, ids=[words[0] for *_, words in ERRORS])
def test_errors_name_the_key_and_what_would_do(facts: Facts, wishes: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        plan_of(facts, **wishes)
    for word in words:
        assert word in str(error.value)


@given(
    size=st.integers(1, 600), world_size=st.integers(1, 6), fits=st.integers(2, 100),
    batchnorm=st.sampled_from(["none", "local"]),
)  # fmt: skip
def test_the_sizes_that_an_error_names_would_do(
    size: int, world_size: int, fits: int, batchnorm: str
) -> None:
    facts = replace(FACTS, max_micro_batch_size=fits, world_size=world_size, batchnorm=batchnorm)
    try:
        assert plan_of(facts, EFFECTIVE_BATCH_SIZE=size).effective_batch_size == size
    except ConfigError as error:
        named = re.search(r"(\d+)(?: or (\d+))? would", str(error))
        for other in filter(None, named.groups() if named else ()):
            assert plan_of(facts, EFFECTIVE_BATCH_SIZE=int(other)).effective_batch_size == int(other)


def test_fewer_samples_than_processes() -> None:
    with pytest.raises(DataError, match="3 training samples are too few for 4 processes"):
        plan_of(replace(FOUR, num_samples=3))


@given(size=st.integers(1, 60), largest=st.integers(1, 60), step=st.integers(1, 9))
def test_the_nearest_sizes_are_the_nearest(size: int, largest: int, step: int) -> None:
    suitable = [other for other in range(1, largest + 1) if other % step == 0 and other != size]
    below = [other for other in suitable if other < size][-1:]
    above = [other for other in suitable if other > size][:1]
    assert nearest(size, largest, lambda other: other % step == 0) == below + above


# How far a search for what fits has to look.


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        (TrainConfig(), None),
        (TrainConfig(ACCUMULATION_STEPS=4), None),
        (TrainConfig(EFFECTIVE_BATCH_SIZE=256), 128),
        (TrainConfig(BATCH_SCHEDULE=BatchScheduleConfig(NAME="linear", FIRST=8)), None),
        (TrainConfig(BATCH_SCHEDULE=BatchScheduleConfig(NAME="linear", FIRST=8, LAST=64)), 32),
        (TrainConfig(BATCH_SCHEDULE=BatchScheduleConfig(NAME="linear", FIRST=80, LAST=64)), 40),
        (
            TrainConfig(BATCH_SCHEDULE=BatchScheduleConfig(NAME="milestones", FIRST=8, MILESTONES=[[1, 96]])),
            48,
        ),
        (
            TrainConfig(
                EFFECTIVE_BATCH_SIZE=32, BATCH_SCHEDULE=BatchScheduleConfig(NAME="exponential", FIRST=8)
            ),
            16,
        ),
    ],
)
def test_the_most_samples_per_rank_that_are_asked_for(train: TrainConfig, expected: int | None) -> None:
    assert max_samples_per_rank(train, replace(FACTS, world_size=2, num_samples=1000)) == expected


# What is shown and saved.


def test_summary() -> None:
    train, optimizer = TrainConfig(EFFECTIVE_BATCH_SIZE=512), OptimizerConfig(LR_SCALING="linear")
    facts = replace(FACTS, world_size=2, num_samples=1200, learning_rate=2e-3)
    plan = plan_batches(train, optimizer, ScheduleConfig(WARMUP_EPOCHS=1), facts)
    assert summary_lines(plan, train, optimizer) == [
        "batch         64 micro-batch x 4 accumulation x 2 processes = 512 samples per optimizer step",
        "steps         2 per epoch, 24 in all (TRAIN.EPOCHS 12); 1024 of 1200 samples per epoch",
        "rate          0.004 at the peak = OPTIMIZER.LR 0.002 x 512/256 (linear)",
        "weight decay  0.05 (not scaled)",
        "warm-up       2 steps",
    ]


def test_summary_of_one() -> None:
    train, schedule = TrainConfig(EFFECTIVE_BATCH_SIZE=1), ScheduleConfig(WARMUP_STEPS=1)
    lines = summary_lines(plan_batches(train, OptimizerConfig(), schedule, FACTS), train, OptimizerConfig())
    assert lines[0].endswith("x 1 accumulation x 1 process = 1 sample per optimizer step")
    assert lines[-1] == "warm-up       1 step"


def test_a_plan_in_plain_values() -> None:
    schedule = {"NAME": "milestones", "FIRST": 32, "MILESTONES": [[2, 128]]}
    plan = plan_of(replace(FACTS, num_samples=1280), schedule=schedule, EPOCHS=3)
    assert plan.as_dict() == {
        "MICRO_BATCH": 32,
        "ACCUMULATION_STEPS": 4,
        "WORLD_SIZE": 1,
        "EFFECTIVE_BATCH": 128,
        "LEARNING_RATE": 0.1,
        "WEIGHT_DECAY": 0.05,
        "WARMUP_STEPS": 0,
        "STEPS_PER_EPOCH": [40, 40, 10],
        "TOTAL_STEPS": 90,
        "STAGES": [
            ["FROM_STEP", "MICRO_BATCH", "ACCUMULATION_STEPS", "EFFECTIVE_BATCH"],
            [0, 32, 1, 32],
            [80, 32, 4, 128],
        ],
        "NOTES": [],
        "WARNINGS": [],
    }
