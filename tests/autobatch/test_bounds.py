from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from linnaeus.autobatch.bounds import HOST_MEMORY_FRACTION, max_batch_size_for, num_host_batches
from linnaeus.config.schema import DataConfig, DatasetConfig
from linnaeus.data.datasets import build_data

CONFIG = DataConfig(
    DATASET=DatasetConfig(NAME="synthetic", NUM_SAMPLES=100, NUM_SAMPLES_VAL=33), IMG_SIZE=8, NUM_WORKERS=0
)
BUNDLE = build_data(CONFIG, seed=0)


def bounds(train: bool = True, workers: int = 0, device: str = "cpu", **changes: Any) -> dict[str, int]:
    arguments: dict[str, Any] = {"bytes_per_sample": 1000, "available_bytes": 10**6} | changes
    return max_batch_size_for(
        BUNDLE,
        train=train,
        data_config=replace(CONFIG, NUM_WORKERS=workers),
        device=torch.device(device),
        **arguments,
    )


@pytest.mark.parametrize(
    ("train", "world", "expected"),
    [(True, 1, 100), (True, 3, 33), (False, 1, 33), (False, 2, 17), (True, 200, 1)],
)
def test_no_batch_is_larger_than_what_a_process_has(train: bool, world: int, expected: int) -> None:
    assert bounds(train, world_size=world)["dataset"] == expected


def test_host_memory_is_shared_by_batches_in_flight_and_by_processes() -> None:
    for workers, device, held in [(0, "cpu", 3), (4, "cpu", 17), (4, "cuda", 34)]:
        assert num_host_batches(workers, CONFIG.PREFETCH_FACTOR, pinned=device == "cuda") == held
        bound = bounds(workers=workers, device=device)["host_memory"]
        assert bound == int(HOST_MEMORY_FRACTION * 10**6 / (held * 1000))
        shared = bounds(workers=workers, device=device, local_world_size=2)["host_memory"]
        assert shared == max(1, int(HOST_MEMORY_FRACTION * 10**6 / 2 / (held * 1000)))


def test_bounds_are_one_at_least() -> None:
    assert bounds(bytes_per_sample=10**9)["host_memory"] == 1


def test_available_memory_is_measured_when_it_is_not_given() -> None:
    for workers in (0, 2):
        measured = bounds(workers=workers, available_bytes=None, bytes_per_sample=10**6)["host_memory"]
        assert 1 <= measured < 10**7
