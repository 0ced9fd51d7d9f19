"""What is said of memory, word by word."""

from __future__ import annotations

import re
import sys

import pytest
import torch
from torch import nn

from linnaeus.autobatch.memory.device import GIB, device_memory
from linnaeus.autobatch.memory.host import CpuMemory
from linnaeus.autobatch.predict.gpus import device_that_would_do, find_gpu
from linnaeus.autobatch.predict.prediction import Prediction
from linnaeus.autobatch.predict.trace import trace
from tests.helpers.messages import Golden, error_of
from tests.memory.conftest import CPU, on_linux


def above_the_cap() -> str:
    """The figures of the process are left out: they differ from machine to machine."""
    with CpuMemory(CPU).cap(1):
        return re.sub(r"\d+ MiB", "N MiB", error_of(torch.ones, 1))


def of_traces() -> dict[str, str]:
    model, found = nn.Linear(4, 4), []

    def step(batch: torch.Tensor) -> None:
        if "value" in found:
            model(batch).sum().item()

    traced = trace(step, lambda n: torch.empty(n, 4), 8, state=model)
    said = {"traces in the wrong order": error_of(Prediction.of, traced, traced)}
    found.append("value")
    value = error_of(trace, step, lambda n: torch.empty(n, 4), 8, state=model)
    said["a value in a step"] = re.sub(r"line \d+", "line N", value)
    lazy = nn.LazyLinear(10)
    said["a lazy layer"] = error_of(trace, step, lambda n: torch.empty(n, 4), 8, state=lazy)
    return said


@on_linux
def test_messages(golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"above the cap": above_the_cap(), **of_traces()}
    found["a GPU of two sizes"] = error_of(find_gpu, "a100")
    found["a device that would do"] = device_that_would_do(24 * GIB, ", with nothing to spare")
    monkeypatch.setattr(sys, "platform", "darwin")
    found["macOS"] = error_of(device_memory, CPU)
    golden("memory", found, TORCH=torch.__version__)
