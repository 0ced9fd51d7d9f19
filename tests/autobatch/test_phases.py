"""Sizes for steps whose memory changes during a run, or from step to step."""

from collections import Counter

import pytest
import torch
from torch import nn

from linnaeus.autobatch import auto_find_batch_size
from tests.helpers.bits import bits
from tests.helpers.ledger import room

WIDTH = 2**18  # float32 values in one MiB


def make_batch(size):
    return torch.empty(size, WIDTH)


class Growing(nn.Linear):
    """Its steps allocate `factor` times the batch."""

    factor = 1

    def step(self, batch):
        torch.empty(self.factor * len(batch), WIDTH)


def setter(model, factor):
    def prepare():
        model.factor = factor
        model.requires_grad_(factor > 1)
        model.added = nn.Linear(2, 2)

    return prepare


def find(model, *factors):
    phases = [setter(model, factor) for factor in factors]
    return auto_find_batch_size(
        model.step, make_batch, state=[model], device="cpu", phases=phases, **room(100)
    )


@pytest.mark.parametrize("factors", [(3, 1), (1, 2, 3)])
def test_the_size_holds_in_all_phases_and_leaves_no_trace(factors):
    model = Growing(2, 2).requires_grad_(False)
    before = bits(model.state_dict())
    found, alone = find(model, *factors), find(model, 3)
    assert abs(found.batch_size - alone.batch_size) <= 1
    assert find(model, 1).batch_size > 1.5 * found.batch_size
    assert (found.limited_by, found.certified) == ("memory", True)
    if factors[0] == 3:
        assert found.trials[-1].size == found.batch_size, "a smaller phase costs one trial"
    assert model.factor == 1
    assert not hasattr(model, "added")
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert bits(model.state_dict()) == before


def test_repeats_find_a_rare_peak():
    def found_with(repeats):
        calls = Counter()

        def step(batch):
            calls[len(batch)] += 1
            torch.empty(
                (2 if len(batch) > 30 and calls[len(batch)] == 4 else 1) * len(batch), WIDTH
            )

        options = room(100, repeats=repeats, steps_per_trial=1, min_batch_size=30)
        return auto_find_batch_size(step, make_batch, device="cpu", max_batch_size=60, **options)

    assert found_with(0).batch_size > 35 >= found_with(4).batch_size
