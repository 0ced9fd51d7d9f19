"""The stand-in for `torch.cuda`: what steps on CPU tensors allocate in it, and who else is on the device."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from linnaeus.autobatch.memory.oom import is_out_of_memory
from linnaeus.autobatch.predict.allocator import MIB
from tests.helpers.fake_cuda import FakeCuda, mebibytes
from tests.helpers.forks import ROOT

GIB = 1024 * MIB


def test_torch_cuda_is_the_device_inside_the_context_alone() -> None:
    before = torch.cuda.mem_get_info
    cuda = FakeCuda(GIB, context_bytes=200 * MIB, tenants_bytes=100 * MIB)
    with cuda.installed():
        torch.cuda.init()
        assert torch.cuda.mem_get_info(0) == (724 * MIB, GIB)
        assert torch.cuda.get_device_properties(0).total_memory == GIB
        assert torch.cuda.current_device() == 0
    assert torch.cuda.mem_get_info is before


def test_tensors_of_the_cpu_are_allocated_on_the_device_and_freed_with_their_last_view() -> None:
    cuda = FakeCuda(GIB)
    with cuda.installed():
        held = mebibytes(20)
        view = held.view(2, -1)[1]
        assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == (20 * MIB, 20 * MIB)
        del held
        assert torch.cuda.memory_allocated() == 20 * MIB
        del view
        assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == (0, 20 * MIB)
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() == 0
        assert torch.cuda.max_memory_reserved() == torch.cuda.max_memory_allocated() == 20 * MIB
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.max_memory_reserved() == 0


def test_what_existed_before_is_adopted() -> None:
    model = nn.Linear(1024, 1024)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    cuda = FakeCuda(GIB)
    with cuda.installed(model, optimizer):
        weights, bias, steps = (
            4 * 4 * MIB,
            4 * 4096,
            2 * 512,
        )  # value, gradient and two moments; one step each
        assert torch.cuda.memory_allocated() == weights + bias + steps
        model.weight.grad = None
        assert torch.cuda.memory_allocated() == weights + bias + steps - 4 * MIB
        with torch.no_grad():
            model.weight.add_(1)
        assert torch.cuda.memory_allocated() == weights + bias + steps - 4 * MIB


def test_a_step_of_training_peaks_at_what_autograd_keeps() -> None:
    """Figures by hand: 16 MiB for an activation or its gradient."""
    model = nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.ReLU())
    cuda = FakeCuda(GIB)
    with cuda.installed(model):
        batch = torch.ones(4096, 1024)
        torch.cuda.reset_peak_memory_stats()
        model(batch).sum().backward()
        held = 4 * MIB + 16 * MIB  # weight and batch
        activations = (
            2 * 16 * MIB
        )  # forward: before and after ReLU; backward: after it, and the gradient before it
        scalars = 2 * 512  # the loss and its gradient
        assert torch.cuda.max_memory_allocated() == held + activations + scalars
        assert torch.cuda.memory_allocated() == held + 4 * MIB


def test_a_full_device_refuses_with_the_words_of_cuda_and_recovers() -> None:
    cuda = FakeCuda(100 * MIB, context_bytes=30 * MIB, tenants_bytes=10 * MIB)
    with cuda.installed():
        held = mebibytes(40)
        with pytest.raises(
            torch.OutOfMemoryError, match=r"CUDA out of memory. Tried to allocate 22.00 MiB"
        ) as caught:
            mebibytes(21)
        assert is_out_of_memory(caught.value)
        assert "100.00 MiB of which 20.00 MiB is free" in str(caught.value)
        stats = torch.cuda.memory_stats()
        assert (stats["num_ooms"], stats["num_alloc_retries"]) == (1, 1)
        del held
        assert mebibytes(60).nbytes == 60 * MIB
        assert torch.cuda.memory_stats()["num_alloc_retries"] == 2, "the cached 40 MiB had to go"
    assert cuda.allocator.allocated_bytes == 0


def test_the_cap_refuses_while_the_device_is_empty() -> None:
    cuda = FakeCuda(GIB)
    with cuda.installed():
        torch.cuda.set_per_process_memory_fraction(0.25, 0)
        with pytest.raises(torch.OutOfMemoryError, match=r"256\.00 MiB allowed"):
            mebibytes(257)
        assert mebibytes(256).nbytes == 256 * MIB


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_model_reserves_what_the_allocator_of_a_card_reserves() -> None:
    """The same requests on both: random sizes in random order, of which half are freed again."""
    program = "from tests.test_fake_cuda import reserved; print(reserved('cuda'))"
    out = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True
    )
    with FakeCuda(torch.cuda.get_device_properties(0).total_memory).installed():
        assert reserved("cpu") == json.loads(out.stdout)


def reserved(device: str) -> list[int]:
    """Bytes reserved after each of the requests; on a card, in a process that has allocated nothing else."""
    sizes = [int(2 ** (9 + 17 * x)) for x in torch.rand(400, generator=torch.Generator().manual_seed(0))]
    held: list[Tensor] = []
    figures = []
    for number, size in enumerate(sizes):
        held.append(torch.empty(size, dtype=torch.uint8, device=device))
        if number % 3 == 2:
            del held[number % len(held)]
        figures.append(torch.cuda.memory_reserved())
    return figures
