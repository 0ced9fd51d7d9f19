"""After `restore` every bit is what it was, in the objects that everybody else refers to."""

import math
import random
from collections import deque
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from linnaeus.autobatch.state.snapshot import Snapshot
from tests.helpers.bits import bits

CPU = torch.device("cpu")


class Net(nn.Module):
    """Weights of two types, BatchNorm, tied weights, and buffers of every sort."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3))
        self.low = nn.Linear(8, 8, dtype=torch.bfloat16)
        self.embedding = nn.Linear(6, 8, bias=False)
        self.tied = nn.Linear(6, 8, bias=False)
        self.tied.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("scratch", torch.randn(5), persistent=False)
        self.register_buffer("mask", torch.arange(3.0).expand(4, 3), persistent=False)
        self.register_buffer("absent", None, persistent=False)

    def forward(self, x):
        hidden = self.inner(x) + self.embedding(x) + self.tied(x)
        return hidden + self.low(hidden.to(torch.bfloat16)).float()


def step(model, *optimizers):
    """A training step; gradients stay."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    model(torch.randn(4, 6)).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def bits_of_module(module):
    """All that a module has, whether in its state dict or not."""
    return {
        "parameters": {
            name: (id(value), bits(value), value.stride(), bits(value.grad), value.requires_grad)
            for name, value in module.named_parameters(remove_duplicate=False)
        },
        "buffers": {
            f"{path}.{name}": (id(buffer), bits(buffer))
            for path, submodule in module.named_modules()
            for name, buffer in submodule._buffers.items()
        },
        "modes": [submodule.training for submodule in module.modules()],
        "extra": bits([value for name, value in module.state_dict().items() if "extra" in name]),
    }


# -- modules


def spoil(module):
    """Change whatever a module has."""
    module.train(not module.training)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.requires_grad_(not parameter.requires_grad)
            parameter.grad = torch.full_like(parameter, 3.0)
            parameter.add_(1.0)
        for submodule in module.modules():
            for name, buffer in list(submodule._buffers.items()):
                submodule._buffers[name] = torch.ones(2) if buffer is None else buffer + 1


def sparse_step(model):
    model(torch.tensor([7])).sum().backward()


class Sparse(nn.Embedding):
    def __init__(self):
        super().__init__(10, 3, sparse=True)
        sparse_step(self)


class Trained(Net):
    def __init__(self):
        super().__init__()
        self.inner[1].eval()  # each submodule has a mode of its own
        step(self)


class WithExtraState(nn.Module):
    """Counts its calls in its extra state alone, as quantisers and metrics do."""

    def __init__(self):
        super().__init__()
        self.helper = SimpleNamespace(calls=[])

    def get_extra_state(self):
        return self.helper.calls

    def set_extra_state(self, state):
        self.helper.calls = state


class Overlapping(nn.ParameterList):
    """Two parameters over one storage, with special values."""

    def __init__(self):
        values = torch.tensor([math.nan, -0.0, 0.0, math.inf, 1e-45])
        super().__init__(map(nn.Parameter, values.repeat(2).as_strided((2, 6), (4, 1))))


MODULES = {
    "two parameters over one storage": (Overlapping, spoil),
    "with gradients": (Trained, spoil),
    "sparse gradient": (Sparse, sparse_step),
    "extra state": (WithExtraState, lambda model: model.helper.calls.append(1)),
    "data of another shape": (
        Net,
        lambda net: setattr(net.embedding.weight, "data", torch.zeros(48)),
    ),
}


class Restless(nn.Module):
    """Has a bit of everything that a module may keep beside parameters and buffers."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.name = "first"
        self.cache = {"inside": [torch.zeros(2), (torch.ones(1), {"deep": 1})]}
        with torch.inference_mode():
            self.inferred = torch.zeros(2)
        self.slope = torch.ones(2, requires_grad=True)  # no parameter, yet it learns
        self.recent = deque([1, 2], maxlen=2)
        self.array = np.zeros(3)
        self.generator = np.random.default_rng(0)
        self.hidden = [nn.Linear(1, 1)]  # its parameters are not this module's
        self.itself = [self]
        self.itself.append(self.itself)
        self.layer.register_forward_hook(print)

    def picture(self):
        """All of it, and which objects these are."""
        modules = {id(module): (type(module), module._forward_hooks) for module in self.modules()}
        plain = (self.recent, len(self.itself), vars(self).keys())
        numpy = (self.array.tolist(), self.generator.bit_generator.state)
        objects = (self.cache, self.cache["inside"][0], self.inferred)
        return [
            bits_of_module(self),
            str((modules, plain, numpy, self.layer.weight._backward_hooks or {})),
            bits((*objects, self.slope, self.slope.grad)),
            list(map(id, objects)),
            bits_of_module(self.hidden[0]),
        ]


@torch.inference_mode()
def change_an_inference_tensor(module):
    module.inferred.add_(1)


CHANGES = {
    "a tensor from inference": change_an_inference_tensor,
    "gradient of a tensor": lambda module: (module.slope * 3).sum().backward(),
    "tensor in a container": lambda module: module.cache["inside"][0].add_(1),
    "dict in a tuple": lambda module: module.cache["inside"][1][1].update(deep=2),
    "deque": lambda module: module.recent.append(9),
    "array": lambda module: module.array.__setitem__(0, 5.0),
    "NumPy's generator": lambda module: module.generator.random(),
    "module in a list": lambda module: spoil(module.hidden[0]),
    "what refers to itself": lambda module: module.itself.clear(),
    "attribute removed": lambda module: delattr(module, "name"),
    "hook removed": lambda module: module.layer._forward_hooks.clear(),
    "hook of a tensor": lambda module: module.layer.weight.register_hook(print),
    "submodule added": lambda module: module.add_module("new", nn.Linear(1, 1)),
    "parameter replaced": lambda module: setattr(
        module.layer, "weight", nn.Parameter(torch.ones(2))
    ),
}


def picture(module):
    return module.picture() if isinstance(module, Restless) else bits_of_module(module)


@pytest.mark.parametrize(
    ("make", "change"),
    [
        *(pytest.param(*case, id=name) for name, case in MODULES.items()),
        *(pytest.param(Restless, change, id=name) for name, change in CHANGES.items()),
    ],
)
def test_a_module_comes_back_bit_for_bit(make, change):
    module = make()
    before, gradients = picture(module), [parameter.grad for parameter in module.parameters()]
    snapshot = Snapshot([module], CPU)
    for _ in range(2):  # what was put back must not be the snapshot's own copy
        change(module)
        assert picture(module) != before
        snapshot.restore()
        assert picture(module) == before
        restored = [parameter.grad for parameter in module.parameters()]
        assert all(now is then for now, then in zip(restored, gradients, strict=True))


@pytest.mark.usefixtures("compiles_unseen")
@pytest.mark.parametrize(
    "wrap", [parametrizations.spectral_norm, partial(torch.compile, backend="eager")]
)
def test_modules_that_are_not_plain_come_back_and_train_on(wrap):
    model = wrap(nn.Linear(6, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    step(model, optimizer)

    def trained():
        torch.manual_seed(5)
        for _ in range(2):
            step(model, optimizer)
        return bits_of_module(model)

    before = bits_of_module(model)
    snapshot = Snapshot([model, optimizer], CPU)
    first = trained()
    snapshot.restore()
    assert bits_of_module(model) == before
    assert first != before
    assert trained() == first


# -- optimizers


def test_parameters_that_only_an_optimizer_holds_come_back():
    temperature = nn.Parameter(torch.tensor([1.5, 2.5]))
    temperature.grad = torch.ones(2)
    optimizer = torch.optim.AdamW([temperature])
    before = bits(temperature), bits(temperature.grad)
    snapshot = Snapshot([optimizer], CPU)
    assert snapshot.host_bytes == 2 * temperature.nbytes
    temperature.grad += 1
    optimizer.step()
    assert bits(temperature) != before[0]
    snapshot.restore()
    assert (bits(temperature), bits(temperature.grad)) == before


# -- anything, generators


def test_nan_counts_as_restored_where_it_was_before():
    content = {"best": math.nan, "lowest": torch.tensor(math.nan), "history": np.array([math.nan])}
    queue = SimpleNamespace(state_dict=content.copy, load_state_dict=content.update)
    snapshot = Snapshot([queue], CPU)
    content["best"] = 0.5
    snapshot.restore()
    snapshot.check_restored()


@pytest.mark.parametrize(
    ("generator", "draw_from"),
    [
        (torch.Generator(), lambda own: torch.rand(1, generator=own).item()),
        (np.random.default_rng(1), np.random.Generator.standard_normal),
        (np.random.RandomState(1), np.random.RandomState.standard_normal),
        (random.Random(1), lambda own: own.gauss(0, 1)),
    ],
    ids=["torch", "NumPy", "NumPy, old", "Python"],
)
def test_a_generator_draws_on_where_it_was(generator, draw_from):
    """One that is an object if it is in the state, those of the process always."""
    draw_from(generator)
    for state in ([], [generator]):
        snapshot = Snapshot(state, CPU)
        expected, of_process = draw_from(generator), draw()
        snapshot.restore()
        assert (draw_from(generator) == expected) is bool(state)
        assert draw() == of_process
        assert draw() != of_process


# -- the process


def draw():
    """From every generator; `gauss` and `standard_normal` keep a second number in store."""
    return (
        random.gauss(0, 1),
        random.random(),
        float(np.random.standard_normal()),
        torch.randn(1).item(),
    )


def switches():
    cudnn = torch.backends.cudnn
    return (
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.get_deterministic_debug_mode(),
        cudnn.enabled,
        cudnn.benchmark,
        cudnn.deterministic,
    )


def test_switches_of_the_process_come_back():
    before, cudnn = switches(), torch.backends.cudnn
    snapshot = Snapshot([nn.Linear(1, 1)], CPU)
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    torch.set_deterministic_debug_mode(1)
    cudnn.enabled, cudnn.benchmark, cudnn.deterministic = False, True, True
    changed = switches()
    snapshot.restore()
    assert switches() == before
    assert all(now != then for now, then in zip(changed, before, strict=True))
