"""What is said of memory, word by word."""

from __future__ import annotations

import logging
import re
import sys
import threading

import pytest
import torch
from torch import nn

from linnaeus.autobatch.memory.device import GIB, CudaMemory, device_memory
from linnaeus.autobatch.memory.host import CpuMemory
from linnaeus.autobatch.predict.gpus import device_that_would_do, find_gpu
from linnaeus.autobatch.predict.prediction import Prediction
from linnaeus.autobatch.predict.trace import trace
from tests.helpers.fake_cuda import DEVICE, FakeCuda
from tests.helpers.messages import Golden, error_of
from tests.memory.conftest import CPU, MIB, on_linux


def of_the_host(caplog: pytest.LogCaptureFixture) -> dict[str, str]:
    """The figures of the process are left out: they differ from machine to machine."""
    memory = CpuMemory(CPU)
    with memory.cap(1):
        above = error_of(torch.ones, 1)
    memory.settle()
    with memory.cap(memory.in_use() + GIB), caplog.at_level(logging.WARNING, "linnaeus.autobatch"):
        memory.reset_peak()
        thread = threading.Thread(target=torch.ones, args=(100 * MIB // 4,))
        thread.start()
        thread.join()
        memory.peak()
    said = {"above the cap": above, "a thread of the step": caplog.records[-1].message}
    return {title: re.sub(r"\d+ MiB", "N MiB", text) for title, text in said.items()}


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
def test_messages(golden: Golden, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    found = {**of_the_host(caplog), **of_traces()}
    found["a GPU of two sizes"] = error_of(find_gpu, "a100")
    found["a device that would do"] = device_that_would_do(24 * GIB, ", with nothing to spare")
    with FakeCuda(GIB, garbage_collection_threshold=0.6, max_split_bytes=64 * MIB).installed():
        found["settings of the allocator"] = "\n".join(CudaMemory(DEVICE).caveats())
    monkeypatch.setattr(sys, "platform", "darwin")
    found["macOS"] = error_of(device_memory, CPU)
    golden("memory", found, TORCH=torch.__version__)
