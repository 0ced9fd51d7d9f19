"""Predictions of a user's own step, without a device."""

import numpy as np
import pytest
import torch
from torch import nn

from linnaeus.autobatch import predict_memory
from linnaeus.autobatch.predict.trace import UntraceableError
from tests.helpers.bits import bits

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Loop:
    """A training loop of somebody's own, with all that a step may change."""

    def __init__(self, look=lambda loss: None):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Dropout(0.1), nn.Linear(4096, 10)).to(DEVICE)
        self.model.calls, self.model.seen = 0, []
        self.model.register_forward_hook(lambda model, inputs, _: model.seen.append(inputs[0]))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=True)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.generator = torch.Generator()
        self.state = (self.model, self.optimizer, self.schedule, self.generator)
        self.look = look

    def make_batch(self, n):
        return torch.zeros(n, 4096, device=DEVICE)

    def step(self, batch):
        self.model.calls += 1
        np.random.random()
        torch.rand(1, generator=self.generator)
        loss = self.model(batch).logsumexp(1).mean()
        self.look(loss)
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()

    def content(self):
        parts = [part.state_dict() for part in self.state[:3]]
        generators = [torch.get_rng_state(), np.random.get_state()[1].tolist()]
        generators += [torch.cuda.get_rng_state()] if DEVICE.type == "cuda" else []
        generators.append(self.generator.get_state())
        attributes = [self.model.calls, len(self.model.seen), self.model.training]
        return bits([parts, generators, attributes])


def test_nothing_is_touched_and_untraceable_steps_are_refused():
    loop = Loop()
    before = loop.content()
    prediction = predict_memory(loop.step, loop.make_batch, state=loop.state)
    assert loop.content() == before
    size = prediction.largest(8 << 30)
    assert prediction.peak_within(size, 8 << 30) <= 8 << 30
    assert prediction.peak_within(size + 1, 8 << 30) is None
    stubborn = Loop(look=lambda loss: loss.item() > 0)
    before = stubborn.content()
    with pytest.raises(UntraceableError, match="item"):
        predict_memory(stubborn.step, stubborn.make_batch, state=stubborn.state)
    assert stubborn.content() == before


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


def test_torchscript_is_refused():
    model = torch.jit.script(nn.Linear(8, 8))
    with pytest.raises(UntraceableError, match="TorchScript"):
        predict_memory(model, lambda n: torch.randn(n, 8), state=[model])


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

        def step(batch):
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        state = (model, optimizer)
        found = predict_memory(step, lambda n: torch.empty(n, 2048), state=state)
        assert all(parameter.grad is None for parameter in model.parameters())
        return found.peak_bytes(8)

    assert predicted("meta") == predicted("cpu") > predicted("cpu", frees=True) + (32 << 20)
