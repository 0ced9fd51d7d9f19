"""Predictions from two traces: that they are what a direct trace gives, and what is asked of them."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnaeus.autobatch.predict.prediction
from linnaeus.autobatch.predict.allocator import MIB, AllocatorSettings
from linnaeus.autobatch.predict.events import ConvFacts, Trace
from linnaeus.autobatch.predict.prediction import (
    ALLOCATE,
    ASSUMED_BASE_BYTES,
    FLUSH,
    RELEASE,
    Prediction,
    _program,
    predict,
    replay,
)
from linnaeus.autobatch.predict.trace import trace
from linnaeus.autobatch.predict.workspace import workspace_bytes

PLAIN = AllocatorSettings()


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Conv2d(3, 64, 3, stride=2), nn.BatchNorm2d(64), nn.ReLU(),
            nn.Conv2d(64, 96, 3, padding=1), nn.ReLU(),
            nn.AdaptiveAvgPool2d(7), nn.Flatten(), nn.Linear(96 * 49, 500), nn.ReLU(), nn.Linear(500, 10),
        )  # fmt: skip
    return model, torch.optim.AdamW(model.parameters())


class Step:
    """Training of a small network on images of 64 by 64 pixels."""

    def __init__(self) -> None:
        self.state = self.model, self.optimizer = parts()

    def __call__(self, batch: Tensor) -> None:
        self.model(batch).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def traced(self, n: int) -> Trace:
        return trace(self, make_batch, n, state=self.state)

    def predicted(self, **options: Any) -> Prediction:
        return predict(self, make_batch, state=self.state, **({"settings": PLAIN} | options))


def make_batch(n: int) -> Tensor:
    return torch.empty(n, 3, 64, 64, device="meta")


@pytest.fixture(scope="module")
def prediction() -> Prediction:
    return Step().predicted(base_bytes=500 * MIB)


@pytest.mark.parametrize("n", [1, 13, 1000])
def test_a_replay_at_any_size_is_that_of_a_trace_at_this_size(prediction: Prediction, n: int) -> None:
    direct = replay(_program(Step().traced(n)), PLAIN)
    assert prediction.is_paired
    assert prediction.reserved_bytes(n) == direct.peak_reserved_bytes
    assert prediction.peak_bytes(n) == 500 * MIB + direct.peak_reserved_bytes


def test_a_line_through_two_peaks_is_not(prediction: Prediction) -> None:
    """The control of the test above: sizes are rounded up, blocks are cut and left over."""
    first, second = (prediction.reserved_bytes(n) for n in (8, 16))
    assert any(prediction.reserved_bytes(n) != first + (second - first) * (n - 8) // 8 for n in (64, 1000))


def test_without_the_workspaces_of_convolutions_less_is_predicted(
    prediction: Prediction, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linnaeus.autobatch.predict.prediction, "workspace_bytes", lambda facts: 0)
    assert Step().predicted(base_bytes=500 * MIB).peak_bytes(64) < prediction.peak_bytes(64)


def test_steps_with_other_events_at_another_size_are_predicted_by_a_line() -> None:
    step = Step()

    def in_parts(batch: Tensor) -> None:
        for part in batch.split(4):
            step.model(part).sum().backward()
        step.optimizer.step()
        step.optimizer.zero_grad()

    traces = [trace(in_parts, make_batch, n, state=step.state) for n in (8, 16)]
    found = Prediction.of(*traces, base_bytes=0, settings=PLAIN)
    first, second = (replay(_program(each), PLAIN).peak_reserved_bytes for each in traces)
    assert not found.is_paired
    assert [found.peak_bytes(n) for n in (8, 16, 24)] == [first, second, 2 * second - first]


def test_the_largest_size_fits_and_the_next_one_does_not(prediction: Prediction) -> None:
    draw = random.Random(0)
    for _ in range(20):
        limit_bytes = draw.randrange(prediction.peak_bytes(1), prediction.peak_bytes(3000))
        n = prediction.largest(limit_bytes)
        assert n is not None
        assert prediction.peak_bytes(n) <= limit_bytes < prediction.peak_bytes(n + 1)


def test_the_largest_size_is_within_its_bounds(prediction: Prediction) -> None:
    enough = prediction.peak_bytes(100)
    assert prediction.largest(prediction.peak_bytes(1) - 1) is None
    assert prediction.largest(prediction.peak_bytes(50) - 1, smallest=50) is None
    assert prediction.largest(enough, largest=40) == 40
    assert (prediction.largest(enough, smallest=30) or 0) >= 30
    assert prediction.largest(prediction.peak_bytes(1), largest=1) == 1


def test_the_slope_is_bytes_per_sample(prediction: Prediction) -> None:
    """Images, both convolutions' outputs, what normalization and activations keep, in float32."""
    kept = 3 * 64**2 + 3 * 64 * 31**2 + 2 * 96 * 31**2
    assert 4 * kept < prediction.slope(256) < 12 * kept
    assert prediction.slope(256) == (prediction.peak_bytes(512) - prediction.peak_bytes(256)) / 256


def test_the_margin_multiplies_the_peak(prediction: Prediction) -> None:
    wide = Step().predicted(base_bytes=500 * MIB, margin=1.5)
    assert wide.safe_bytes(32) == int(1.5 * prediction.peak_bytes(32))


def test_the_base_is_assumed_without_a_device_and_measured_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    traces = [Step().traced(n) for n in (8, 16)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assumed = Prediction.of(*traces, settings=PLAIN)
    assert (assumed.base_bytes, assumed.is_base_measured) == (ASSUMED_BASE_BYTES, False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (30 * MIB, 100 * MIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 20 * MIB)
    measured = Prediction.of(*traces, settings=PLAIN)
    assert (measured.base_bytes, measured.is_base_measured) == (50 * MIB, True)


def test_the_settings_of_the_environment_count(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Step().predicted(base_bytes=0)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    grown = Step().predicted(base_bytes=0, settings=None)
    assert grown.settings.expandable_segments
    assert grown.reserved_bytes(301) < plain.reserved_bytes(301)


def conv(
    kind: str, channels: int, size: int, groups: int = 1, itemsize: int = 4, channels_last: bool = False
) -> ConvFacts:
    shape = (2, channels, 8, 8)
    weight = channels, channels // groups, size, size
    return ConvFacts(kind, shape, weight, shape, groups, (1, 1), itemsize, channels_last)


@pytest.mark.parametrize(
    ("facts", "times"),
    [
        (conv("input", 4, 3), 1.0),
        (conv("input", 4, 1), 0.0),
        (conv("input", 4, 1, channels_last=True), 1.0),
        (conv("weight", 8, 3, groups=2), 1.0),
    ],
)
def test_each_kind_of_convolution_has_its_workspace(facts: ConvFacts, times: float) -> None:
    """So many copies of input and output, and the weight once where it is larger than 1x1."""
    tensors = 2 * math.prod(facts.x)
    weight = math.prod(facts.w) if facts.w[2] > 1 else 0
    assert workspace_bytes(facts) == 4 * (times * tensors + weight)


def test_workspaces_depend_on_kind_and_format() -> None:
    assert workspace_bytes(conv("forward", 4, 3)) == 0
    assert workspace_bytes(conv("input", 4, 3, groups=4)) == 0
    assert workspace_bytes(conv("weight", 4, 3)) == 2 * workspace_bytes(conv("weight", 4, 3, itemsize=2)) > 0
    assert workspace_bytes(conv("weight", 8, 3)) > 2 * workspace_bytes(conv("weight", 4, 3))


def test_a_flush_gives_free_segments_back() -> None:
    held, freed, later = (ALLOCATE, 1, 12 * MIB), (ALLOCATE, 2, 30 * MIB), (ALLOCATE, 3, 40 * MIB)
    release, flush = (RELEASE, 2, 0), (FLUSH, 0, 0)
    assert replay([held, freed, release, later], PLAIN).peak_reserved_bytes == (12 + 30 + 40) * MIB
    assert replay([held, freed, release, flush, later], PLAIN).peak_reserved_bytes == (12 + 40) * MIB


def test_a_prediction_flushes_where_the_kernels_of_convolutions_are_timed(
    prediction: Prediction, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    timed = Step().predicted(base_bytes=500 * MIB)
    assert timed.is_paired
    assert any(timed.peak_bytes(n) != prediction.peak_bytes(n) for n in (64, 1000))


def test_each_convolution_of_cudnn_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1, groups=groups) for groups in (1, 1, 4)))

    def flushes(dtype: torch.dtype) -> int:
        model.to(dtype)
        batch = torch.empty(2, 4, 8, 8, device="meta", dtype=dtype, requires_grad=True)
        found = trace(lambda x: model(x).sum().backward(), lambda n: batch, 2, state=model)
        return sum(event.kind == "flush" for event in found.events)

    assert flushes(torch.float32) == 3  # output, both gradients; torch's own kernel for the depthwise one
    assert flushes(torch.bfloat16) == 6
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    assert flushes(torch.float32) == 0
