"""The mean loss between two log lines."""

from __future__ import annotations

import torch

from linnaeus.dist import World
from linnaeus.training.loss_meter import LossMeter


def test_the_mean_is_over_the_steps_since_the_last_line() -> None:
    meter = LossMeter(World(torch.device("cpu")))
    for loss in (1.0, 2.0, 6.0):
        meter.add(torch.tensor(loss))
    assert meter.drain() == 3.0
    meter.add(torch.tensor(5.0))
    assert meter.mean() == 5.0
