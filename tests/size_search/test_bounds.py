from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from linnaeus.autobatch.memory import loader
from linnaeus.autobatch.memory.loader import HOST_MEMORY_FRACTION
from linnaeus.config.schema import BatchScheduleConfig, TrainConfig
from linnaeus.data.datasets import build_data
from linnaeus.runtime.distributed import World
from linnaeus.size_search.bounds import max_batch_sizes, max_for_steps
from tests.helpers.configs import FACTS, load, plan_of

CONFIG = load(
    "DATA.DATASET.NAME=synthetic",
    "DATA.DATASET.NUM_SAMPLES=100",
    "DATA.DATASET.NUM_SAMPLES_VAL=33",
    "DATA.IMG_SIZE=8",
    "DATA.AUTOBATCH.MIN_BATCH_SIZE=1",
).DATA
DATA = build_data(CONFIG, seed=0)


def bounds_of(
    mode="train",
    workers=0,
    device="cpu",
    world_size=1,
    train=None,
    **autobatch,
):
    world = World(torch.device(device), world_size=world_size, local_world_size=world_size)
    node = replace(CONFIG.AUTOBATCH, **autobatch)
    config = replace(CONFIG, NUM_WORKERS=workers, AUTOBATCH=node)
    return max_batch_sizes(config, train or TrainConfig(), DATA, mode, world, tensor_bytes=[1000])


@pytest.mark.parametrize(
    ("mode", "world_size", "expected"), [("train", 3, 33), ("val", 2, 17), ("train", 200, 1)]
)
def test_no_batch_is_larger_than_what_a_process_has(mode, world_size, expected):
    assert bounds_of(mode, world_size=world_size)["dataset"] == expected


STEPS = [
    ({}, 10),
    ({"world_size": 10}, 2),  # one sample is too few for BatchNorm
    ({"MIN_STEPS_PER_EPOCH": 1}, None),
    ({"MIN_BATCH_SIZE": 32}, 32),
    ({"train": TrainConfig(ACCUMULATION_STEPS=3)}, 3),
    ({"train": TrainConfig(EFFECTIVE_BATCH_SIZE=50)}, None),
    ({"train": TrainConfig(BATCH_SCHEDULE=BatchScheduleConfig(NAME="linear", FIRST=4))}, None),
    ({"mode": "val"}, None),
]


@pytest.mark.parametrize(("asked", "expected"), STEPS)
def test_an_epoch_keeps_its_optimizer_steps(asked, expected):
    assert bounds_of(**asked).get("steps_per_epoch") == expected


@given(st.integers(1, 2000), st.integers(2, 40), st.integers(1, 5))
def test_the_bound_is_the_largest_size_with_so_many_steps(samples, least, accumulation_steps):
    def steps(size):
        facts = replace(FACTS, num_samples=samples, max_micro_batch_size=size)
        plan = plan_of(facts, ACCUMULATION_STEPS=accumulation_steps, EPOCHS=1)
        return plan.total_steps

    size = max_for_steps(samples, least, accumulation_steps)
    assert size == 0 or steps(size) >= least
    # One accumulates less where an epoch has no whole step, so that it has one step at least.
    assert size + 1 > samples or steps(size + 1) < least


def test_host_memory_is_divided_by_batches_and_processes(monkeypatch):
    monkeypatch.setattr(loader, "available_host_bytes", lambda: 10**6)
    for workers, device, held in [(0, "cpu", 3), (4, "cpu", 17), (4, "cuda", 3 * 17)]:
        for ranks in (1, 2):  # a copy that is pinned counts as up to twice its batch
            bound = bounds_of(workers=workers, device=device, world_size=ranks)["host_memory"]
            assert bound == max(1, int(HOST_MEMORY_FRACTION * 1000 / ranks / held))
