"""The memory of each kind of device."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from linnaeus.autobatch.memory.device import GIB, AcceleratorMemory, CudaMemory, device_memory
from linnaeus.autobatch.memory.interface import DeviceMemory
from tests.memory.conftest import CPU, MIB


@pytest.mark.parametrize("kind", ["meta", "hpu", "mps", "xpu"])
def test_a_device_that_is_not_there_is_named(kind: str) -> None:
    present = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if present is not None and present.type == kind:
        pytest.skip(f"there is an {kind} device")
    with pytest.raises(NotImplementedError, match=kind):
        device_memory(torch.device(kind))


def test_the_cpu_of_another_system_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(NotImplementedError, match=r"cpu.*darwin"):
        device_memory(CPU)


def test_what_others_hold_is_no_part_of_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(
        max_memory_reserved=None, memory_reserved=lambda device: 100, mem_get_info=lambda device: (600, 1000)
    )  # fmt: skip
    monkeypatch.setattr(torch, "get_device_module", lambda device: card)
    memory = AcceleratorMemory(torch.device("xpu"))
    assert (memory.outside(), memory.budget(0.75, None), memory.budget(0.75, 400)) == (300, 450, 300)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", [CudaMemory, AcceleratorMemory])
def test_an_accelerator_counts_what_its_allocator_holds(kind: Callable[[torch.device], DeviceMemory]) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    memory = kind(device)
    memory.clean()
    memory.reset_peak()
    before = memory.in_use()
    block = torch.ones(64 * MIB, dtype=torch.uint8, device=device)
    assert memory.in_use() >= before + block.nbytes
    del block
    memory.clean()
    assert memory.in_use() == before
    assert memory.peak() >= before + 64 * MIB
    memory.reset_peak()
    assert memory.peak() == before
    assert memory.outside() == memory.total_bytes - memory.budget(1.0, None)
    assert memory.budget(0.5, GIB) == min(memory.budget(0.5, None), GIB // 2)
    assert memory.isolate(lambda: 5) == 5
    with memory.cap(before + 128 * MIB):
        held = torch.empty(64 * MIB, dtype=torch.uint8, device=device)
    assert held.nbytes == 64 * MIB


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_allocator_of_a_card_refuses_what_is_above_the_cap_and_recovers() -> None:
    memory = CudaMemory(torch.device("cuda"))
    memory.clean()
    before = torch.cuda.get_per_process_memory_fraction(memory.device)
    with memory.cap(memory.in_use() + 64 * MIB), pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(GIB, dtype=torch.uint8, device=memory.device)
    assert memory.refused(caught.value)
    assert torch.cuda.get_per_process_memory_fraction(memory.device) == before
    assert torch.ones(GIB, dtype=torch.uint8, device=memory.device)[-1] == 1
