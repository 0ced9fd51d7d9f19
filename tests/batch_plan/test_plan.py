"""The batch plan: what must always hold, and what each wish comes to."""

import math
import re
from dataclasses import replace
from itertools import chain, pairwise

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from linnaeus.batch_plan.scaling import scale_factor
from linnaeus.config.schema import OptimizerConfig
from linnaeus.runtime.errors import ConfigError
from tests.helpers.configs import FACTS, plan_of


def effective_sizes(plan):
    """The effective batch size of every optimizer step."""
    return [
        stage.effective_batch_size for stage in chain(*plan.epochs) for _ in range(stage.num_steps)
    ]


def facts_of(num_samples, **fields):
    """The facts of a run."""
    return st.builds(replace, st.just(FACTS), num_samples=num_samples, **fields)


@given(
    facts=facts_of(
        st.integers(240, 500),
        world_size=st.integers(1, 4),
        max_micro_batch_size=st.integers(1, 40),
    ),
    samples_per_rank=st.integers(1, 60),
    limit=st.integers(1, 40),
)
def test_a_limit_splits_the_same_optimizer_steps_more_finely(facts, samples_per_rank, limit):
    plan = plan_of(facts, EFFECTIVE_BATCH_SIZE=samples_per_rank * facts.world_size, EPOCHS=2)
    limited = plan.with_max_micro_batch(limit)
    assert effective_sizes(limited) == effective_sizes(plan)
    assert (limited.learning_rate, limited.total_steps) == (plan.learning_rate, plan.total_steps)
    for before, stage in zip(plan.stages, limited.stages, strict=True):
        sizes = stage.micro_batches
        assert sum(sizes) == samples_per_rank
        assert sizes[0] == stage.micro_batch_size == max(sizes) <= limit
        assert sizes[0] - sizes[-1] <= 1
        assert len(sizes) == stage.accumulation_steps
        if before.micro_batch_size <= limit:
            assert stage == before
    assert min(limited.micro_batches(1)) == limited.smallest_micro_batch


@given(
    facts=facts_of(
        st.integers(1, 5000),
        world_size=st.integers(1, 8),
        max_micro_batch_size=st.integers(1, 128),
    ),
    samples_per_rank=st.integers(1, 300),
    epochs=st.integers(1, 5),
)
def test_every_step_takes_the_effective_size(facts, samples_per_rank, epochs):
    assume(samples_per_rank <= facts.num_samples // facts.world_size)
    effective = facts.world_size * samples_per_rank
    plan = plan_of(facts, EFFECTIVE_BATCH_SIZE=effective, EPOCHS=epochs)
    assert plan.micro_batch_size * plan.accumulation_steps == samples_per_rank
    fewest = -(-samples_per_rank // facts.max_micro_batch_size)
    assert plan.accumulation_steps == next(
        n for n in range(fewest, 301) if samples_per_rank % n == 0
    )
    assert effective_sizes(plan) == [effective] * (facts.num_samples // effective) * epochs
    assert plan.steps_per_epoch == (facts.num_samples // effective,) * epochs


@given(
    facts=facts_of(
        st.integers(5, 2000),
        world_size=st.integers(1, 5),
        max_micro_batch_size=st.integers(1, 200),
    ),
    accumulation=st.integers(1, 9),
)
def test_without_a_wish_every_whole_micro_batch_is_used(facts, accumulation):
    plan = plan_of(facts, ACCUMULATION_STEPS=accumulation, EPOCHS=2)
    per_process = facts.num_samples // facts.world_size
    micro_batch_size = min(facts.max_micro_batch_size, per_process)
    num_micro_batches = per_process // micro_batch_size
    most = min(accumulation, num_micro_batches)
    assert list(plan.micro_batches(0)) == [micro_batch_size] * num_micro_batches
    assert plan.steps_per_epoch[0] == math.ceil(num_micro_batches / accumulation)
    assert plan.effective_batch_size == micro_batch_size * most * facts.world_size
    assert plan.learning_rate == 0.1


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


def scheduled(run, optimizer=None):
    """The plan; runs that would end before the last size are left out."""
    world_size = run["world_size"]
    facts = replace(
        FACTS,
        world_size=world_size,
        max_micro_batch_size=run["max_micro_batch"],
        num_samples=run["num_samples"],
    )
    schedule = {
        "NAME": run["name"],
        "UNIT": run["unit"],
        "LENGTH": run["length"],
        "FIRST": run["first"] * world_size,
    }
    last = run["last"] * world_size
    try:
        return plan_of(
            facts, optimizer, schedule=schedule, EPOCHS=run["epochs"], EFFECTIVE_BATCH_SIZE=last
        )
    except ConfigError as error:
        assume("LENGTH" not in str(error))
        raise


@given(run=schedules)
def test_a_schedule_goes_one_way_and_its_totals_add_up(run):
    plan = scheduled(run)
    sizes, world_size, step = effective_sizes(plan), run["world_size"], 0
    assert (sizes[0], sizes[-1]) == (run["first"] * world_size, run["last"] * world_size)
    sign = 1 if run["last"] >= run["first"] else -1
    assert all(sign * a <= sign * b for a, b in pairwise(sizes))
    assert plan.total_steps == sum(plan.steps_per_epoch) == len(sizes)
    assert sum(plan.samples_per_epoch) == sum(sizes)
    for epoch, stages in enumerate(plan.epochs):
        for stage in stages:
            assert stage.num_steps >= 1
            assert 1 <= stage.micro_batch_size <= run["max_micro_batch"]
            assert (
                stage.effective_batch_size
                == stage.micro_batch_size * stage.accumulation_steps * world_size
            )
        used = sum(plan.micro_batches(epoch))
        assert used * world_size == plan.samples_per_epoch[epoch]
        step += plan.steps_per_epoch[epoch]
        following = stages[-1].samples_per_rank
        if run["unit"] == "steps" and step < len(sizes):
            following = sizes[step] // world_size
        assert (
            used <= run["num_samples"] // world_size < used + following
        )  # no further step would fit in


@given(run=schedules, rule=st.sampled_from(["none", "linear", "sqrt"]))
def test_the_rate_follows_the_rule_at_every_step(run, rule):
    plan = scheduled(run, OptimizerConfig(LR_SCALING=rule, BASE_BATCH_SIZE=32))
    for step, size in enumerate(effective_sizes(plan)):
        assert plan.learning_rate * plan.batch_size_lr_factor(step) == pytest.approx(
            0.1 * scale_factor(rule, size, 32)
        )


def test_beyond_sixteen_accumulation_steps_the_micro_batch_grows():
    plan = plan_of(
        schedule={"NAME": "exponential", "FIRST": 8}, EPOCHS=9, EFFECTIVE_BATCH_SIZE=2048
    )
    stages = [epoch[0] for epoch in plan.epochs]
    assert [stage.effective_batch_size for stage in stages] == [8 << epoch for epoch in range(9)]
    assert [stage.micro_batch_size for stage in stages] == [8, 8, 8, 8, 8, 16, 32, 64, 64]
    assert [stage.accumulation_steps for stage in stages] == [1, 2, 4, 8, 16, 16, 16, 16, 32]


@pytest.mark.parametrize(
    ("effective", "warmup", "epochs", "steps", "has_note"),
    [
        (2047, {}, 60, 0, False),
        (2048, {}, 60, 144, True),  # 5 % of 60 epochs of 48 steps
        (2048, {"WARMUP_STEPS": 7}, 60, 7, False),
        (2048, {}, 300, 5 * 48, True),  # at most five epochs
    ],
)
def test_a_much_raised_rate_gets_a_warm_up(effective, warmup, epochs, steps, has_note):
    optimizer = OptimizerConfig(LR_SCALING="linear")
    plan = plan_of(
        optimizer=optimizer, warmup=warmup, EFFECTIVE_BATCH_SIZE=effective, EPOCHS=epochs
    )
    assert plan.warmup_steps == steps
    assert any("SCHEDULE.WARMUP" in note for note in plan.notes) == has_note


QUIET = (
    (FACTS, {"EFFECTIVE_BATCH_SIZE": 64 * 16}),
    (replace(FACTS, max_micro_batch_size=131), {"EFFECTIVE_BATCH_SIZE": 131}),
    (replace(FACTS, max_micro_batch_size=16, batchnorm="local"), {}),
    (replace(FACTS, max_micro_batch_size=8, batchnorm="synchronised", world_size=2), {}),
    (replace(FACTS, num_samples=640), {}),
)


@pytest.mark.parametrize(("facts", "wishes"), QUIET)
def test_a_plan_within_the_limits_of_each_warning_says_nothing(facts, wishes):
    """Plans just beyond the limits are in `test_messages.py`."""
    plan = plan_of(facts, **wishes)
    assert (plan.warnings, plan.notes) == ((), ())


@example(size=3, world_size=2, fits=2, batchnorm="local")
@given(
    size=st.integers(1, 600),
    world_size=st.integers(1, 6),
    fits=st.integers(2, 100),
    batchnorm=st.sampled_from(["none", "local"]),
)
def test_the_sizes_that_an_error_names_would_do(size, world_size, fits, batchnorm):
    facts = replace(FACTS, max_micro_batch_size=fits, world_size=world_size, batchnorm=batchnorm)
    try:
        assert plan_of(facts, EFFECTIVE_BATCH_SIZE=size).effective_batch_size == size
    except ConfigError as error:
        named = re.search(r"(\d+)(?: or (\d+))? would", str(error))
        for other in map(int, filter(None, named.groups() if named else ())):
            assert plan_of(facts, EFFECTIVE_BATCH_SIZE=other).effective_batch_size == other
