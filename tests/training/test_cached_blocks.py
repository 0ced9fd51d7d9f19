"""Blocks that the allocator keeps: none of training's in a validation, none of a validation's in training."""

import pytest
import torch

import linnaeus.training.trainer
from linnaeus.training.trainer import Trainer
from tests.helpers.greedy import trainer_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def released_by_emptying():
    """Bytes that another call of `empty_cache` would give back to the device."""
    before = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    return before - torch.cuda.memory_reserved()


@pytest.fixture
def left_bytes(monkeypatch):
    """Bytes cached when a validation begins, and when it has ended."""
    left = {"begin": [], "end": []}
    validate, measure = Trainer._validate, Trainer._validation_metrics

    def validate_and_look(trainer):
        result = validate(trainer)
        left["end"].append(released_by_emptying())
        return result

    def look_and_measure(trainer, batches):
        left["begin"].append(released_by_emptying())
        return measure(trainer, batches)

    monkeypatch.setattr(Trainer, "_validate", validate_and_look)
    monkeypatch.setattr(Trainer, "_validation_metrics", look_and_measure)
    return left


def train(folder, **instead):
    """One epoch and its validation, with functions of the trainer's module replaced."""
    with (
        trainer_of(
            folder, "TRAIN.EPOCHS=1", "EXPERIMENT.DEVICE=cuda", "DATA.IMG_SIZE=256"
        ) as trainer,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, function in instead.items():
            patch.setattr(linnaeus.training.trainer, name, function)
        trainer.fit()


def test_the_cache_is_empty_before_and_after_a_validation(tmp_path, left_bytes):
    train(tmp_path)
    assert left_bytes == {"begin": [0], "end": [0]}


def test_without_the_calls_blocks_would_stay(tmp_path, left_bytes):
    """Without this, the test above could not fail."""
    calls = []
    train(tmp_path, empty_cache=calls.append)
    assert len(calls) == 2
    assert min(left_bytes["begin"] + left_bytes["end"]) >= 2 * 1024**2
