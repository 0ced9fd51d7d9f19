"""Predictions of a user's own step, without a device."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from linnaeus.autobatch import predict_memory
from linnaeus.autobatch.predict.trace import UntraceableError
from linnaeus.autobatch.state.snapshot import Snapshot
from tests.helpers.bits import bits

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Means(nn.Module):
    """Much memory and little to compute."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        """Maps (n, elements) to (n, 64)."""
        return (
            nn.functional.dropout(x * self.weight, 0.1, self.training).view(len(x), 64, -1).mean(2)
        )


class Loop:
    """A training loop of somebody's own, with all that a step may change.

    A sample has `kibibytes`; `width` makes the parameters many.
    """

    def __init__(
        self,
        kibibytes=1024,
        width=64,
        look=lambda loss: None,
    ):
        torch.manual_seed(0)
        self.model = nn.Sequential(Means(), nn.Linear(64, width), nn.Linear(width, 10)).to(DEVICE)
        self.model.calls = 0
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=True)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.state = (self.model, self.optimizer, self.schedule)
        self.look = look
        self.num_elements = 256 * kibibytes

    def make_batch(self, n):
        return torch.zeros(n, self.num_elements, device=DEVICE)

    def step(self, batch):
        self.model.calls += 1
        np.random.random()
        loss = self.model(batch).logsumexp(1).mean()
        self.look(loss)
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()

    def content(self):
        parts = [part.state_dict() for part in self.state]
        generators = [torch.get_rng_state(), np.random.get_state()[1].tolist()]
        generators += [torch.cuda.get_rng_state()] if DEVICE.type == "cuda" else []
        return bits([parts, generators, self.model.calls, self.model.training])


def decide(loss):
    return loss.item() > 0


def test_nothing_is_touched_and_untraceable_steps_are_refused():
    loop = Loop()
    before = loop.content()
    prediction = predict_memory(loop.step, loop.make_batch, state=loop.state)
    assert loop.content() == before
    size = prediction.largest(8 << 30)
    assert size is not None
    assert (prediction.peak_within(size, 8 << 30) or math.inf) <= 8 << 30
    assert prediction.peak_within(size + 1, 8 << 30) is None
    logged = []
    closing = Loop(look=lambda loss: logged.append(loss.item()) or parameters[0].data.mul_(2))
    parameters = [parameter.requires_grad_() for parameter in closing.model.parameters()]
    before = closing.content()
    predict_memory(closing.step, closing.make_batch, state=closing.state)
    assert closing.content() == before, "what the step holds by itself is put back"
    assert min(logged) == 1, "after a trace its numbers are like any other"
    stubborn = Loop(look=decide)
    before = stubborn.content()
    with pytest.raises(UntraceableError, match="item"):
        predict_memory(stubborn.step, stubborn.make_batch, state=stubborn.state)
    assert stubborn.content() == before


def step_of(model, optimizer):
    def step(batch):
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def rows(n):
    return torch.randn(n, 8)


def test_predict_memory_puts_containers_and_generators_back():
    layer, generator = nn.Linear(8, 8), torch.Generator().manual_seed(1)
    layer.seen = []
    layer.register_forward_hook(lambda module, inputs, _: module.seen.append(inputs[0]))
    optimizer = torch.optim.Adam(layer.parameters())
    before = generator.get_state(), bits(layer.state_dict())
    step = step_of(layer, optimizer)

    def noisy(batch):
        torch.rand(1, generator=generator)
        step(batch)

    predict_memory(noisy, rows, state=(layer, optimizer, generator))
    assert (layer.seen, dict(optimizer.state)) == ([], {})
    assert torch.equal(generator.get_state(), before[0])
    assert bits(layer.state_dict()) == before[1]
    step(rows(2))


class Copies(TorchDispatchMode):
    """Counts the bytes of copies on the host."""

    num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if func.__name__.startswith(("_to_copy", "clone")) and output.is_cpu:
            self.num_bytes += output.nbytes
        return output


def test_predict_memory_copies_no_weights():
    loop = Loop(width=4096)
    weight_bytes = sum(parameter.nbytes for parameter in loop.model.parameters())
    with Copies() as copies:
        predict_memory(loop.step, loop.make_batch, state=loop.state)
    assert copies.num_bytes < weight_bytes / 10
    with Copies() as copies:
        Snapshot(loop.state, DEVICE)
    assert copies.num_bytes >= weight_bytes, "a search copies them"


def test_a_step_writes_to_no_weights_that_it_holds_itself():
    loop = Loop()
    held = list(loop.model.parameters())

    def clip(loss):
        with torch.no_grad():
            torch._foreach_mul_(held, 2.0)
            assert torch.neg(torch.ones_like(held[0]), out=held[0]) is held[0]
            held[1].clamp_(0, 1e-9)

    loop.look = clip
    before = loop.content()
    predict_memory(loop.step, loop.make_batch, state=loop.state)
    assert loop.content() == before
    with torch.no_grad():
        clip(torch.ones(1))
    assert loop.content() != before, "the step would change them"


def test_what_no_trace_can_follow_is_refused_and_left_whole():
    model = nn.Sequential(nn.Linear(8, 8), torch.jit.script(nn.Linear(8, 8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = bits([parameter.detach() for parameter in model.parameters()])
    with pytest.raises(UntraceableError, match="TorchScript"):
        predict_memory(step_of(model, optimizer), rows, state=(model, optimizer))
    assert bits([parameter.detach() for parameter in model.parameters()]) == before
    step_of(model, optimizer)(rows(2))


def test_hooks_run_and_meta_is_predicted_as_a_real_model():
    def predicted(device, frees=False):
        with torch.device(device):
            model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(4)))
            optimizer = torch.optim.Adagrad(model.parameters())
        if frees:
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(
                    lambda each: setattr(each, "grad", None)
                )
        found = predict_memory(
            step_of(model, optimizer), lambda n: torch.empty(n, 2048), state=(model, optimizer)
        )
        assert all(parameter.grad is None for parameter in model.parameters())
        return found.peak_bytes(8)

    assert predicted("meta") == predicted("cpu") > predicted("cpu", frees=True) + (32 << 20)
