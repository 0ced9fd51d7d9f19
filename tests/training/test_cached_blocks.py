"""Blocks that the allocator keeps: none of training's in a validation, none of a validation's in training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import linnaeus.training.trainer
from linnaeus.memory.allocator import MIB
from linnaeus.training.trainer import Trainer
from tests.helpers.fake_cuda import FakeCuda
from tests.helpers.runs import SMALL, Run


def released_by_emptying() -> int:
    """Bytes that another call of `empty_cache` would give back to the device."""
    before = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    return before - torch.cuda.memory_reserved()


@pytest.fixture
def left_bytes(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """Bytes cached when a validation begins, and when it has ended."""
    left: dict[str, list[int]] = {"begin": [], "end": []}
    validate, measure = Trainer._validate, Trainer._validation_metrics

    def validate_and_look(trainer: Trainer) -> Any:
        result = validate(trainer)
        left["end"].append(released_by_emptying())
        return result

    def look_and_measure(trainer: Trainer) -> Any:
        left["begin"].append(released_by_emptying())
        return measure(trainer)

    monkeypatch.setattr(Trainer, "_validate", validate_and_look)
    monkeypatch.setattr(Trainer, "_validation_metrics", look_and_measure)
    return left


def train(run: Run) -> None:
    assert run(*SMALL, "DATA.BATCH_SIZE_VAL=32").code == 0


def test_the_cache_is_empty_before_and_after_a_validation(run: Run, left_bytes: dict[str, list[int]]) -> None:
    with FakeCuda(1024 * MIB).installed():
        train(run)
    assert left_bytes == {"begin": [0, 0], "end": [0, 0]}


@pytest.mark.parametrize(("left_out", "place"), [(0, "begin"), (1, "end")])
def test_without_either_call_blocks_would_stay(
    left_out: int, place: str, run: Run, left_bytes: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without this, the test above could not fail."""
    num_calls = 0

    def every_other(empty: Callable[..., None], device: torch.device) -> None:
        nonlocal num_calls
        if num_calls % 2 != left_out:
            empty(device)
        num_calls += 1

    with FakeCuda(1024 * MIB).installed():
        empty = linnaeus.training.trainer.empty_cache
        monkeypatch.setattr(
            linnaeus.training.trainer, "empty_cache", lambda device: every_other(empty, device)
        )
        train(run)
    assert num_calls == 4
    assert min(left_bytes[place]) >= 2 * MIB
