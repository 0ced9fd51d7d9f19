"""The searches of a run: its own data, bounds and switches, and what it says about them."""

import dataclasses
from functools import partial

import pytest
import torch

from linnaeus.batch_plan.effective_batch import Facts
from linnaeus.batch_plan.plan import plan_batches
from linnaeus.config.schema import OptimizerConfig, ScheduleConfig
from linnaeus.runtime.distributed import World
from linnaeus.runtime.errors import AutoBatchError
from linnaeus.size_search.planned_sizes import find_planned_sizes
from linnaeus.size_search.searches import LIMITS_VARIABLE, find_sizes
from tests.autobatch.faulty import LARGEST, TINY
from tests.helpers.runs import SMALL
from tests.helpers.searches import CPU, OWN_DATA, OWN_MODEL, SEEN, prepared, result


def plan_for(search, size):
    facts = Facts(max_micro_batch_size=size, world_size=1, num_samples=12, learning_rate=0.1)
    return plan_batches(search.train, OptimizerConfig(), ScheduleConfig(), facts)


def entry(size):
    """What a search has found, as in a checkpoint."""
    return result(size).as_dict()


# --- planned sizes ---


def planned_sizes(search, **checkpoint):
    return find_planned_sizes(search, partial(plan_for, search), checkpoint)


def sizes_tried(result):
    return [trial.size for trial in result.trials]


SAVED = {"train": entry(7), "val": entry(9)}


@pytest.mark.parametrize(("most", "sizes"), [(512, (7, 9)), (4, (4, 8))])
def test_a_resumed_run_tries_the_sizes_of_its_checkpoint_once(most, sizes):
    """Without the checkpoint it takes all 12 samples; a bound that is lower now counts."""
    search, _ = prepared(OWN_MODEL, OWN_DATA, f"DATA.AUTOBATCH.MAX_BATCH_SIZE={most}")
    planned = planned_sizes(search, autobatch=SAVED)
    for (mode, found), size in zip(planned.found.items(), sizes, strict=True):
        assert sizes_tried(found) == [size]
        is_kept = size == SAVED[mode]["batch_size"]
        assert found.limited_by == ("checkpoint" if is_kept else "max_batch_size")
    if most == 512:
        assert planned_sizes(search).batch_sizes == {"train": 12, "val": 12}


def test_only_searched_modes_take_a_size_from_the_checkpoint():
    only_val = ("DATA.AUTOBATCH.ENABLED=False", "DATA.AUTOBATCH.ENABLED_VAL=True")
    search, _ = prepared(OWN_MODEL, OWN_DATA, *only_val)
    assert planned_sizes(search, autobatch=SAVED).batch_sizes == {"val": 9}
    assert planned_sizes(search, autobatch={"train": entry(7)}).batch_sizes == {"val": 12}
    search, _ = prepared(OWN_MODEL, OWN_DATA, "DATA.AUTOBATCH.ENABLED_VAL=False")
    assert planned_sizes(search, autobatch=SAVED).batch_sizes == {"train": 7}


@pytest.mark.parametrize(("most", "limit", "val"), [(512, 6, 7), (3, 3, 6)])
def test_under_a_limit_only_the_saved_validation_size_is_tried(most, limit, val):
    """Training's size only says how many samples a step takes: smaller micro-batches are trained."""
    search, _ = prepared(
        OWN_MODEL,
        OWN_DATA,
        "TRAIN.EFFECTIVE_BATCH_SIZE=12",
        f"DATA.AUTOBATCH.MAX_BATCH_SIZE={most}",
    )
    planned = planned_sizes(
        search, autobatch={"train": entry(12), "val": entry(7)}, micro_batch_limit=6
    )
    assert (planned.plan.micro_batch_size, planned.micro_batch_limit) == (limit, limit)
    assert planned.plan.effective_batch_size == 12
    assert planned.batch_sizes == {"train": 12, "val": val}
    assert sizes_tried(planned.found["val"]) == [val]
    assert limit in {shape[0] for shape in SEEN["shapes"]}, "the training step before validation"


def test_a_size_of_the_checkpoint_that_does_not_fit_is_lowered(monkeypatch):
    """As after a move to a smaller device."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("FAULT", "oom:0:forward")
    found = find_sizes(prepared(*TINY)[0], {"train": 16})["train"]
    assert (sizes_tried(found)[0], found.batch_size, found.limited_by) == (16, LARGEST, "memory")


# --- settings of a mode or of a rank ---


@pytest.mark.parametrize(
    ("option", "tried"), [("START=5", (5, 12)), ("START_VAL=3", (12, 3)), ("START=9999", (12, 12))]
)
def test_each_mode_starts_at_its_own_size_and_finds_the_same(option, tried):
    found = find_sizes(prepared(OWN_MODEL, OWN_DATA, f"DATA.AUTOBATCH.{option}")[0])
    assert tuple(sizes_tried(result)[0] for result in found.values()) == tried
    assert [result.batch_size for result in found.values()] == [12, 12]


def test_each_rank_has_its_own_limit(monkeypatch):
    search, _ = prepared(OWN_MODEL, OWN_DATA)
    monkeypatch.setenv(LIMITS_VARIABLE, "0.01,1000")
    with pytest.raises(AutoBatchError):
        find_sizes(search)
    other = dataclasses.replace(search, world=World(CPU, rank=1))
    assert find_sizes(other)["train"].batch_size == 12


# --- what a trial sees ---


def test_samples_of_many_shapes_are_measured_at_the_largest_read():
    search, _ = prepared(OWN_MODEL, OWN_DATA, "DATA.AUTOBATCH.ENABLED_VAL=False")
    find_sizes(search)
    assert {shape[2:] for shape in SEEN["shapes"]} == {(19, 19)}


@pytest.mark.parametrize(("steps", "num_micro_batches"), [(1, 1), (5, 2)])
def test_trial_steps_have_two_micro_batches_with_accumulation(steps, num_micro_batches):
    search, _ = prepared(
        OWN_MODEL, OWN_DATA, f"TRAIN.ACCUMULATION_STEPS={steps}", "DATA.AUTOBATCH.ENABLED_VAL=False"
    )
    assert sizes_tried(find_sizes(search)["train"]).count(12) == 1
    sizes = [shape[0] for shape in SEEN["shapes"]]
    assert sizes.count(12) == 2 * num_micro_batches, "two steps a trial"


def test_trials_train_on_mixed_batches_and_validate_on_labels():
    bare = [option for option in SMALL if not option.startswith("MODEL.")]
    search, assembly = prepared(
        *bare,
        OWN_MODEL,
        "DATA.AUGMENT.MIXUP=0.4",
        "DATA.AUGMENT.CUTMIX=1.0",
        "LOSS.LABEL_SMOOTHING=0.1",
        "TRAIN.AMP=bf16",
        "DATA.AUTOBATCH.MAX_BATCH_SIZE=8",
    )
    seen = {True: set(), False: set()}
    assembly.criterion.register_forward_hook(
        lambda module, arguments, _: seen[torch.is_grad_enabled()].add(
            (arguments[1].dtype, arguments[1].shape[1])
        )
    )
    find_sizes(search)
    assert set(SEEN["dtypes"]) == {torch.bfloat16}
    assert seen == {True: {(torch.float32, 2 + 6)}, False: {(torch.int64, 2)}}
    # On devices, and where nothing is run, batches are made and not collated.
    for mode, form in (("train", (torch.float32, 8)), ("val", (torch.int64, 2))):
        batch = search.spec(mode).make(5, "meta")
        _, targets = search.data.on_device(batch)
        assert (targets.dtype, targets.shape[1]) == form
    prediction = search.predict("train")
    assert prediction.reserved_bytes(2048) > prediction.reserved_bytes(8)


def test_an_error_of_the_users_model_ends_the_search_unchanged():
    with pytest.raises(ZeroDivisionError):
        find_sizes(prepared(OWN_MODEL, OWN_DATA, "MODEL.fails_at=5")[0])
