"""The memory of each kind of device."""

from types import SimpleNamespace

import pytest
import torch

from linnaeus.autobatch.memory.device import AcceleratorMemory, device_memory


@pytest.mark.parametrize("kind", ["meta", "hpu", "mps", "xpu"])
def test_a_device_that_is_not_there_is_named(kind):
    present = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if present is not None and present.type == kind:
        pytest.skip(f"there is an {kind} device")
    with pytest.raises(NotImplementedError, match=kind):
        device_memory(torch.device(kind))


def test_what_others_hold_is_no_part_of_the_budget(monkeypatch):
    gpu = SimpleNamespace(
        memory_reserved=lambda device: 100, get_memory_info=lambda device: (600, 1000)
    )
    monkeypatch.setattr(AcceleratorMemory, "_api", gpu)
    memory = AcceleratorMemory(torch.device("xpu"))
    assert (memory.outside(), memory.budget(0.75, None), memory.budget(0.75, 400)) == (
        300,
        450,
        300,
    )
