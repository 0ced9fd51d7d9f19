"""Training that runs out of memory: the step is taken again in smaller parts, or the error says why not."""

import pytest
import torch

from linnaeus.runtime.errors import OutOfMemoryError
from linnaeus.training.checkpoint import load_checkpoint
from tests.helpers.bits import bits
from tests.helpers.greedy import SPLIT, allocate_too_much, greedy, trainer_of

MODEL = "MODEL._target_=tests.helpers.greedy"


EFFECTIVE = "TRAIN.EFFECTIVE_BATCH_SIZE=16"
HALF_PRECISION = (
    "TRAIN.EFFECTIVE_BATCH_SIZE=32",
    "TRAIN.AMP=fp16",
    "TRAIN.CLIP_GRAD_NORM=0.1",
)
PLACES = {"forward": (EFFECTIVE,), "backward": HALF_PRECISION}
"""Where memory runs out, and the options of the training."""


def trained(folder, *argv, size=16):
    """The last checkpoint of a whole training."""
    with trainer_of(folder, SPLIT, *argv, size=size) as trainer:
        trainer.fit()
    return load_checkpoint(folder / "checkpoints/last.pt")


def failure(folder, *argv, **sizes):
    """The error with which a training ends."""
    with trainer_of(folder, *argv, **sizes) as trainer, pytest.raises(OutOfMemoryError) as caught:
        trainer.fit()
    assert caught.value.exit_code == 3
    return str(caught.value)


def of_training(content):
    """All that depends on the steps, comparable bit by bit."""
    progress = {name: value for name, value in content["progress"].items() if name != "seconds"}
    return bits([progress, *(content[name] for name in ("state", "rng"))])


@pytest.fixture(scope="module")
def smaller(tmp_path_factory):
    """Checkpoints of trainings with micro-batches of 8 from the start."""
    return {
        where: trained(tmp_path_factory.mktemp(where), *options, size=8)
        for where, options in PLACES.items()
    }


@pytest.mark.parametrize("where", PLACES)
def test_a_repeated_step_equals_one_with_smaller_micro_batches(tmp_path, where, smaller):
    """Also buffers, generators and gradient scaler, which the failed step has changed."""
    found = trained(tmp_path, *PLACES[where], *greedy(8, where=where))
    assert of_training(found) == of_training(smaller[where])
    assert found["micro_batch_limit"] == found["plan"]["MICRO_BATCH"] == 8
    assert found["state"]["model"]["num_samples"] == 2 * 96  # without those of the step that failed


def test_so_does_a_step_that_fails_while_gradients_are_clipped(tmp_path, monkeypatch):
    clip, calls = torch.nn.utils.clip_grad_norm_, []

    def clip_or_fail(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            allocate_too_much()
        return clip(*arguments)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip_or_fail)
    found = trained(tmp_path, *HALF_PRECISION)
    assert (found["micro_batch_limit"], len(calls)) == (8, 7)
    assert found["progress"]["step"] == 6


def test_without_the_fault_nothing_is_split(tmp_path, smaller):
    plain = trained(tmp_path, EFFECTIVE)
    assert "micro_batch_limit" not in plain
    # So equal bits say that a step was split.
    assert of_training(plain) != of_training(smaller["forward"])


def test_odd_micro_batches_are_split_and_weighted_by_samples(tmp_path):
    odd = ("TRAIN.EFFECTIVE_BATCH_SIZE=7", "TRAIN.EPOCHS=1")
    split = trained(tmp_path / "a", *odd, *greedy(4), size=7)
    whole = trained(tmp_path / "b", *odd, size=7)["state"]["model"]
    assert split["micro_batch_limit"] == 4
    for name, tensor in split["state"]["model"].items():
        # Sums are rounded in another order, and Adam's division makes the difference larger.
        torch.testing.assert_close(tensor, whole[name], rtol=2e-3, atol=2e-4)


# Errors.


def test_a_step_that_is_not_taken_again_is_an_error(tmp_path):
    """`test_messages.py` has the other reasons."""
    assert "step 4" in failure(tmp_path, *greedy(8, from_step=3))
    assert load_checkpoint(tmp_path / "checkpoints/last.pt")["progress"]["step"] == 3


def test_validation_that_runs_out_of_memory_keeps_the_checkpoint(tmp_path):
    model = (SPLIT, f"{MODEL}.GreedyInValidation", "MODEL.largest=8", "MODEL.from_sample=32")
    assert "DATA.BATCH_SIZE_VAL below 16" in failure(tmp_path, *model)
    progress = load_checkpoint(tmp_path / "checkpoints/last.pt")["progress"]
    assert (progress["epoch"], progress["samples"]) == (1, 96)
    with trainer_of(tmp_path, *model, val_size=8) as trainer:  # the remedy
        assert trainer.fit().stop_signal == 0


@pytest.mark.parametrize("in_training", [True, False])
def test_another_error_is_raised_as_it_is(tmp_path, in_training):
    broken = (SPLIT, f"{MODEL}.Broken", f"MODEL.in_training={in_training}")
    with trainer_of(tmp_path, *broken) as trainer, pytest.raises(ZeroDivisionError):
        trainer.fit()
