"""Predictions from two traces: that they are what a direct trace gives, and what is asked of them."""

import pytest
import torch
from torch import nn

from linnaeus.autobatch.predict.allocator import MIB
from linnaeus.autobatch.predict.gpus import ASSUMED_BASE_BYTES
from linnaeus.autobatch.predict.prediction import Prediction, predict, replay
from linnaeus.autobatch.predict.recorder import CONV_WORKSPACE, Event
from linnaeus.autobatch.predict.trace import Trace, trace


class Step:
    """Training of a small network on images of 64 by 64 pixels."""

    def __init__(self):
        with torch.device("meta"):
            self.model = nn.Sequential(
                nn.Conv2d(3, 64, 3, stride=2),
                nn.BatchNorm2d(64),
                nn.ReLU(),
                nn.Conv2d(64, 96, 3, padding=1),
                nn.AdaptiveAvgPool2d(7),
                nn.Flatten(),
                nn.Linear(96 * 49, 500),
                nn.ReLU(),
                nn.Linear(500, 10),
            )
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def __call__(self, batch):
        self.model(batch).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def traced(self, n):
        return trace(self, make_batch, n, state=(self.model, self.optimizer))


def make_batch(n):
    return torch.empty(n, 3, 64, 64, device="meta")


@pytest.fixture(scope="module")
def prediction():
    step = Step()
    return predict(step, make_batch, state=(step.model, step.optimizer), base_bytes=500 * MIB)


@pytest.mark.parametrize("n", [1, 13, 1000])
def test_a_replay_at_any_size_is_that_of_a_trace_at_this_size(prediction, n):
    direct = replay(Step().traced(n).events)
    assert prediction.peak_bytes(n) == 500 * MIB + direct.peak_reserved_bytes


@pytest.mark.parametrize("num_skipped", [0, 1])
def test_scores_of_all_pairs_grow_with_the_square(num_skipped):
    def step(x):
        y = x * 2
        (y @ y[num_skipped:].t()).softmax(1).sum()

    def rows(n):
        return torch.empty(n, 64, device="meta")

    direct = replay(trace(step, rows, 9000).events).peak_reserved_bytes
    assert predict(step, rows, base_bytes=0).reserved_bytes(9000) == pytest.approx(direct, rel=0.01)


def test_a_line_through_two_peaks_is_not(prediction):
    """The control of the test above: sizes are rounded up, blocks are cut and left over."""
    first, second = (prediction.reserved_bytes(n) for n in (8, 16))
    assert any(
        prediction.reserved_bytes(n) != first + (second - first) * (n - 8) // 8 for n in (64, 1000)
    )


def test_the_largest_size_is_within_its_bounds(prediction):
    enough = prediction.peak_bytes(100)
    assert prediction.largest(prediction.base_bytes) is None
    assert prediction.largest(enough, smallest=500) is None
    assert prediction.largest(enough, largest=40) == 40
    assert prediction.largest(enough, smallest=30) >= 30
    assert prediction.largest(prediction.peak_bytes(1), largest=1) == 1


ALLOCATED, NEXT = Event("allocate", 1, 30 * MIB), Event("allocate", 2, 40 * MIB)
FULL = {
    "the cache is given back": ([ALLOCATED, Event("release", 1), NEXT], 40),
    "a workspace is left out": ([ALLOCATED, Event("allocate", 2, 20 * MIB, CONV_WORKSPACE)], 30),
    "another is not": ([ALLOCATED, Event("allocate", 2, 20 * MIB, "cublas")], 50),
    "neither helps": ([ALLOCATED, NEXT], 70),
}
"""Events, and the least MiB that they run in."""


@pytest.mark.parametrize("case", FULL)
def test_a_full_device(case):
    events, least_bytes = tuple(FULL[case][0]), (7 + FULL[case][1]) * MIB
    prediction = Prediction.of(Trace(1, events), Trace(2, events), base_bytes=7 * MIB)
    assert prediction.peak_within(1, least_bytes) == least_bytes
    assert prediction.peak_within(1, least_bytes - 1) is None


def test_a_full_device_runs_more_samples_than_have_room(prediction):
    limit_bytes = prediction.peak_bytes(100)
    found = prediction.largest(limit_bytes)
    assert found > 1.1 * max(n for n in range(1, 200) if prediction.peak_bytes(n) <= limit_bytes)
    assert prediction.peak_within(found, limit_bytes) <= limit_bytes
    assert prediction.peak_within(found + 1, limit_bytes) is None
    assert prediction.peak_within(40, limit_bytes) == prediction.peak_bytes(40), "it is not full"


def test_the_base_is_measured_where_a_device_is(monkeypatch):
    traces = [Step().traced(n) for n in (8, 16)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assumed = Prediction.of(*traces)
    assert assumed.base_bytes == ASSUMED_BASE_BYTES
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (30 * MIB, 100 * MIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 20 * MIB)
    assert Prediction.of(*traces).base_bytes == 50 * MIB
