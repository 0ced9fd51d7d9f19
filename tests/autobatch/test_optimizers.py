"""Every optimizer of timm trains after a search as without one."""

import functools
import importlib

import pytest
import timm.optim
import torch
from timm.optim import Lookahead
from torch import nn

from linnaeus.autobatch import AutoBatchError, auto_find_batch_size
from linnaeus.autobatch.state.optimizers import UnlistedOptimizerError
from linnaeus.config.schema import OptimizerConfig
from linnaeus.runtime.errors import ConfigError
from linnaeus.training.optim import build_optimizer
from tests.helpers.bits import bits
from tests.helpers.runs import freeze_what_is_there

pytestmark = pytest.mark.filterwarnings("ignore:It is highly recommended to have 'opt_einsum'")


@pytest.fixture(autouse=True, scope="module")
def _fast_searches():
    """Collections leave out what the first optimizer loads."""
    torch.optim.SGD([nn.Parameter(torch.ones(1))]).step()
    importlib.import_module("torch._dynamo")
    freeze_what_is_there()


@pytest.fixture(autouse=True)
def _uncompiled():
    with torch.compiler.set_stance("force_eager"):
        yield


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1),
        nn.BatchNorm2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32, 4),
        nn.LayerNorm(4),
        nn.Linear(4, 3),
    )


class Loop:
    """A model, an optimizer over it, and the step that trains it."""

    def __init__(self, make_optimizer):
        self.model = make_model()
        self.optimizer = make_optimizer(self.model)

    def step(self, batch):
        self.model(batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, num_steps):
        for _ in range(num_steps):
            self.step(make_batch(4))


def make_batch(size):
    return torch.randn(size, 1, 4, 4)


search = functools.partial(auto_find_batch_size, device="cpu", max_batch_size=4)


def trained(make_optimizer, *, searches, already=0, num_steps=3):
    """The bits of the parameters and of the optimizer after training, with a search before or without."""
    loop = Loop(make_optimizer)
    torch.manual_seed(1)
    loop.train(already)
    if searches:
        search(loop.step, make_batch, state=(loop.model, loop.optimizer), max_trials=2)
    loop.train(num_steps)
    return bits(loop.model.state_dict()), bits(loop.optimizer.state_dict()), torch.rand(1).item()


# --- all optimizers of timm ---


def timm_optimizer(name, model):
    return build_optimizer(OptimizerConfig(NAME=name, LR=1e-3, WEIGHT_DECAY=0.01), model)


QUICK = {
    "adafactor",
    "adahessian",
    "adopt",
    "kron",
    "lamb",
    "madgrad",
    "muon",
    "nadam",
    "novograd",
    "sgdp",
}
"""Optimizers that keep their state in ways of their own."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in timm.optim.list_optimizers()
    ],
)
def test_training_after_a_search_goes_as_without_one(name):
    try:
        timm.optim.create_optimizer_v2(make_model(), opt=name, lr=0.1)
    except Exception as error:
        pytest.skip(f"cannot be built: {error}")
    if name == "adahessian":
        with pytest.raises(ConfigError, match=r"OPTIMIZER\.NAME"):
            timm_optimizer(name, make_model())
        return
    make_optimizer = functools.partial(timm_optimizer, name)
    plain, searched = (trained(make_optimizer, searches=searches) for searches in (False, True))
    assert searched == plain


OWN = {
    "a tensor as rate": lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01)),
    "lookahead": lambda model: Lookahead(torch.optim.Adam(model.parameters(), lr=0.01)),
    "outside of timm's": lambda model: Outside(timm_optimizer("lamb", model)),
}


class Outside:
    """A wrapper that is no optimizer itself, with a number of its own that decides what a step does."""

    zero_grad = property(lambda self: self.optimizer.zero_grad)
    state_dict = property(lambda self: self.optimizer.state_dict)
    load_state_dict = property(lambda self: self.optimizer.load_state_dict)

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.num_steps = 0

    def step(self, closure=None):
        self.num_steps += 1
        if self.num_steps % 2:
            self.optimizer.step(closure)


@pytest.mark.parametrize("name", OWN)
def test_wrappers_and_attributes_are_put_back_too(name):
    plain, searched = (
        trained(OWN[name], searches=searches, already=3, num_steps=4) for searches in (False, True)
    )  # Lookahead moves its slow weights at the sixth of all steps
    assert searched == plain


# --- closures ---


def test_lbfgs_whose_history_fills_later_is_refused():
    model = nn.Linear(4, 4)
    state = (model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(AutoBatchError, match="LBFGS"):
        search(model, make_batch, state=state)


# --- state ---


def test_an_optimizer_left_out_of_state_is_named_before_it_steps():
    loop = Loop(lambda model: torch.optim.AdamW(model.parameters()))
    second = torch.optim.Adagrad(loop.model.parameters(), lr=1.0)

    def step(batch):
        loop.step(batch)
        second.step()

    everything = (loop.model, loop.optimizer, second)
    before = bits([part.state_dict() for part in everything])
    with pytest.raises(UnlistedOptimizerError, match="Adagrad"):
        search(step, make_batch, state=everything[:2])
    assert bits([part.state_dict() for part in everything]) == before
    second.step()  # outside of the search it may


@pytest.mark.parametrize("is_listed", [True, False])
def test_what_a_step_changes_outside_of_state_is_named(is_listed, caplog):
    model, norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler = torch.amp.GradScaler("cpu", growth_interval=1)

    def step(batch):
        scaler.scale(norm(model(batch)).square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scheduler.step()

    others = (norm, scheduler, scaler) if is_listed else ()
    state = (model, optimizer, *others)
    search(step, lambda n: torch.randn(n, 4), state=state, min_batch_size=2)
    assert ("BatchNorm1d and GradScaler and StepLR" in caplog.text) != is_listed


def test_an_optimizer_made_inside_a_step_needs_no_restoring():
    def step(batch):
        noise = torch.zeros(2, requires_grad=True)
        attack = torch.optim.SGD([noise], lr=0.1)
        (noise.sum() * batch.sum()).backward()
        attack.step()

    assert search(step, torch.ones).batch_size == 4
