"""Which storages the tracer reports, and when."""

import gc

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from tests.helpers.ledger import Ledger


def test_a_storage_is_reported_once_and_freed_with_its_last_view():
    with Ledger() as ledger:
        block = torch.ones(1000)
        view = block.view(10, 100).t()
        view.add_(1)
        assert ledger.live_bytes == 4000
    del block
    assert ledger.live_bytes == 4000
    del view
    assert ledger.live_bytes == 0  # the mode is off by now


def test_what_was_there_before_is_not_reported():
    before = torch.ones(1000)
    with Ledger() as ledger:
        view = before[:10]
        before.add_(1)
        # This shares memory, and its schema does not say so.
        torch.ops.aten._unsafe_view(before, [10, 100])
        assert not ledger.live
        after = view + 1
        assert ledger.live_bytes == after.nbytes


def test_a_storage_that_is_resized_counts_with_its_new_size():
    with Ledger() as ledger:
        block = torch.empty(10)
        block.resize_(1000)
        assert ledger.live_bytes == 4000
        del block
        assert ledger.live_bytes == 0


def test_sparse_tensors_and_literal_values_count():
    with Ledger() as ledger:
        sparse = torch.eye(100).to_sparse()
        sparse_bytes = sparse._indices().nbytes + sparse._values().nbytes
        literal = torch.tensor([1.0, 2.0])
        assert ledger.live_bytes == sparse_bytes + literal.nbytes


def test_an_error_of_the_callback_frees_the_allocation():
    with Ledger(limit_bytes=5000) as ledger:
        kept = torch.ones(1000)
        with pytest.raises(MemoryError):
            torch.ones(1000)
        assert ledger.live_bytes == kept.nbytes


def test_gradients_do_not_meet_in_one_that_a_hook_keeps():
    """As autograd does it without a dispatch mode."""
    kept = []
    x = torch.ones(1000, requires_grad=True)
    with Ledger():
        y = x * 1
        z = y * 5
        a = y + 1  # its gradient comes first to y, which adds that of z
        a.register_hook(kept.append)
        (z + a * 3).sum().backward()
    assert x.grad[0] == 8
    assert kept[0][0] == 3


def test_peak_and_rest_of_a_step_agree_with_the_profiler():
    """The profiler sees every call of the allocator, kernels' own scratch memory included."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(6)))
    optimizer = torch.optim.AdamW(layers.parameters())

    def step():
        layers(torch.randn(512, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def forget():
        optimizer.state.clear()
        gc.collect()

    step()
    forget()
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiler:
        step()
    live = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    forget()
    with Ledger() as ledger:
        step()
    assert ledger.peak_bytes == pytest.approx(peak, rel=0.02)
    states = [value for state in optimizer.state.values() for value in state.values()]
    assert ledger.live_bytes == sum(state.nbytes for state in states)
