"""An epoch resumed with other sizes or on another number of processes: each sample once, none left out."""

from dataclasses import replace
from itertools import chain, islice, repeat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from linnaeus.data.sampler import EpochSampler, PlannedBatches
from tests.helpers import configs
from tests.helpers.configs import plan_of

FACTS = replace(configs.FACTS, max_micro_batch_size=8, num_samples=100)


def take(plan, epoch, done, num_steps=None):
    """The samples of the next optimizer steps on all ranks; of all that remain without a number."""
    stages = plan.rest_of_epoch(epoch, done)
    steps = list(islice(chain.from_iterable(repeat(s, s.num_steps) for s in stages), num_steps))
    num_micro_batches = sum(stage.accumulation_steps for stage in steps)
    taken = []
    for rank in range(plan.world_size):
        sampler = EpochSampler(plan.num_samples, seed=3, rank=rank, world_size=plan.world_size)
        sampler.set_epoch(epoch, done)
        batches = list(islice(PlannedBatches(sampler, plan.micro_batches), num_micro_batches))
        sizes = [stage.micro_batch_size for stage in steps for _ in range(stage.accumulation_steps)]
        assert [len(batch) for batch in batches] == sizes  # every micro-batch is whole
        taken += [index for batch in batches for _, index in batch]
    assert len(taken) == sum(stage.effective_batch_size for stage in steps)
    return taken


configurations = st.tuples(
    st.integers(1, 4), st.integers(1, 12), st.integers(1, 4), st.booleans(), st.integers(0, 6)
)
"""World size, largest micro-batch, accumulation, whether the effective size is set, steps until a change."""


@given(
    num_samples=st.integers(48, 220),
    parts=st.lists(configurations, min_size=1, max_size=5),
    epoch=st.integers(0, 1),
)
def test_changes_in_an_epoch_repeat_no_sample_and_omit_no_step(num_samples, parts, epoch):
    taken = []
    for number, (world_size, micro_batch, accumulation, is_set, num_steps) in enumerate(
        parts, start=1
    ):
        facts = replace(
            FACTS, world_size=world_size, max_micro_batch_size=micro_batch, num_samples=num_samples
        )
        options = {"ACCUMULATION_STEPS": accumulation}
        if is_set:
            options = {"EFFECTIVE_BATCH_SIZE": world_size * micro_batch * accumulation}
            if options["EFFECTIVE_BATCH_SIZE"] > num_samples // world_size * world_size:
                continue
        plan = plan_of(facts, EPOCHS=2, **options)
        taken += take(plan, epoch, len(taken), None if number == len(parts) else num_steps)
        if number == len(parts):
            assert num_samples - len(taken) < plan.effective_batch_size
            if not is_set:  # a smaller step takes the micro-batches that are left
                assert num_samples - len(taken) < world_size * plan.micro_batch_size
            assert take(plan, epoch, len(taken)) == []
    assert len(set(taken)) == len(taken)
    assert set(taken) <= set(range(num_samples))


@given(world_size=st.integers(1, 4), done=st.integers(0, 120), micro_batch=st.integers(1, 4))
def test_resuming_a_growing_batch_wastes_under_its_largest_step(world_size, done, micro_batch):
    facts = replace(FACTS, num_samples=120, world_size=world_size, max_micro_batch_size=micro_batch)
    schedule = {
        "NAME": "milestones",
        "UNIT": "steps",
        "FIRST": world_size,
        "MILESTONES": [[3, 4 * world_size]],
    }
    plan = plan_of(facts, schedule=schedule, EPOCHS=2)
    rest = plan.rest_of_epoch(0, done)
    used = sum(stage.num_steps * stage.effective_batch_size for stage in rest)
    assert 0 <= 120 - done - used < 4 * world_size


# The position in the schedule.


@pytest.mark.parametrize(
    "wishes",
    [
        {"ACCUMULATION_STEPS": 3},
        {
            "schedule": {"NAME": "linear", "UNIT": "steps", "FIRST": 4, "LENGTH": 12},
            "EFFECTIVE_BATCH_SIZE": 24,
        },
    ],
    ids=["constant", "growing"],
)
def test_an_undisturbed_run_is_at_its_number_of_steps(wishes):
    plan, step = plan_of(FACTS, EPOCHS=4, **wishes), 0
    for epoch, stages in enumerate(plan.epochs):
        samples = 0
        for stage in stages:
            for _ in range(stage.num_steps):
                assert plan.position(epoch, samples) == step
                samples += stage.effective_batch_size
                step += 1
        assert plan.position(epoch, samples) == plan.position(epoch + 1, 0) == step
    assert plan.position(plan.num_epochs + 3, 7) == plan.total_steps == step


def test_between_two_steps_the_position_is_a_fraction():
    plan = plan_of(FACTS, EFFECTIVE_BATCH_SIZE=32, EPOCHS=2)
    # Three steps an epoch; the last four samples are left out.
    assert [plan.position(1, samples) for samples in (0, 8, 40, 97)] == [3, 3.25, 4.25, 6]
    assert plan.rest_of_epoch(0, 120) == [], "of a dataset that has shrunk"
