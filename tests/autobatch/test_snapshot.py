"""After `restore` every bit is what it was, in the objects that everybody else refers to."""

from __future__ import annotations

import copy
import os
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from linnaeus.autobatch.snapshot import Snapshot
from linnaeus.errors import AutoBatchError
from linnaeus.training.ema import Ema
from tests.helpers.bits import bits

CPU = torch.device("cpu")


class Net(nn.Module):
    """Weights of two types, BatchNorm, tied weights, and buffers of every sort."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3))
        self.low = nn.Linear(8, 8, dtype=torch.bfloat16)
        self.embedding = nn.Linear(6, 8, bias=False)
        self.output = nn.Linear(8, 6, bias=False)
        self.output.weight = nn.Parameter(self.embedding.weight.detach().T.contiguous())
        self.tied = nn.Linear(6, 8, bias=False)
        self.tied.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("scratch", torch.randn(5), persistent=False)
        self.register_buffer("mask", torch.arange(3.0).expand(4, 3), persistent=False)
        self.register_buffer("counts", torch.tensor([1, 2]))
        self.register_buffer("absent", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x) + self.embedding(x) + self.tied(x)
        hidden = hidden + self.low(hidden.to(torch.bfloat16)).float()
        return self.output(hidden)  # type: ignore[no-any-return]


def step(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    """A training step; gradients stay."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    model(torch.randn(4, 6)).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def bits_of_module(module: nn.Module) -> dict[str, Any]:
    """All that a module has, whether in its state dict or not."""
    return {
        "parameters": {
            name: (id(parameter), bits(parameter), bits(parameter.grad), parameter.requires_grad)
            for name, parameter in module.named_parameters(remove_duplicate=False)
        },
        "buffers": {
            f"{path}.{name}": (id(buffer), bits(buffer))
            for path, submodule in module.named_modules()
            for name, buffer in submodule._buffers.items()
        },
        "modes": [submodule.training for submodule in module.modules()],
    }


def bits_of_optimizer(optimizer: torch.optim.Optimizer) -> Any:
    groups = [{name: bits(value) for name, value in group.items() if name != "params"}
              for group in optimizer.param_groups]  # fmt: skip
    params = [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
    state = {id(parameter): bits(state) for parameter, state in optimizer.state.items()}
    return groups, params, state


# -- modules


def spoil(module: nn.Module) -> None:
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


@pytest.mark.parametrize("trained", [False, True], ids=["fresh", "with gradients"])
def test_a_module_comes_back_bit_for_bit(trained: bool) -> None:
    model = Net()
    if trained:
        step(model)
    before = bits_of_module(model)
    snapshot = Snapshot([model], CPU)
    for _ in range(2):
        spoil(model)
        assert bits_of_module(model) != before
        snapshot.restore()
        assert bits_of_module(model) == before


class Restless(nn.Module):
    """Has a bit of everything that a module may keep beside parameters and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.other = nn.Linear(2, 2)
        self.calls = 0
        self.name: str | None = "first"
        self.cache: dict[str, Any] = {"inside": [torch.zeros(2), (torch.ones(1), {"deep": 1})]}
        self.last = torch.zeros(3)
        with torch.inference_mode():
            self.inferred = torch.zeros(2)
        self.slope = torch.ones(2, requires_grad=True)  # no parameter, yet it learns
        self.seen = {1, 2}
        self.counter = Counter("ab")
        self.recent = deque([1, 2], maxlen=2)
        self.array = np.zeros(3)
        self.generator = np.random.default_rng(0)
        self.torch_generator = torch.Generator().manual_seed(3)
        self.itself: list[Any] = [self]
        self.itself.append(self.itself)
        self.layer.register_forward_hook(print)

    def picture(self) -> Any:
        """All of it, and which objects these are."""
        hooks = [
            {name: list(hooks) for name, hooks in vars(module).items() if name.endswith("_hooks")}
            for module in self.modules()
        ]
        return {
            "module": bits_of_module(self),
            "submodules": [(name, id(module), type(module)) for name, module in self.named_modules()],
            "hooks": hooks, "tensor hooks": len(self.layer.weight._backward_hooks or ()),
            "plain": (self.calls, self.name, set(self.seen), dict(self.counter), list(self.recent)),
            "cache": (id(self.cache), bits(self.cache), id(self.cache["inside"][0])),
            "inferred": (id(self.inferred), self.inferred.tolist()),
            "tensors": (id(self.last), bits(self.last), bits(self.slope), bits(self.slope.grad)),
            "array": (id(self.array), bits(self.array.tolist())),
            "generators": (str(self.generator.bit_generator.state), bits(self.torch_generator.get_state())),
            "names": set(vars(self)), "itself": len(self.itself),
        }  # fmt: skip


def replace_a_weight(module: Restless) -> None:
    module.layer.weight = nn.Parameter(torch.ones(2, 2))


def change_an_inference_tensor(module: Restless) -> None:
    with torch.inference_mode():
        module.inferred.add_(1)


CHANGES: dict[str, Callable[[Restless], object]] = {
    "number": lambda module: setattr(module, "calls", module.calls + 1),
    "text": lambda module: setattr(module, "name", None),
    "another tensor": lambda module: setattr(module, "last", torch.ones(3)),
    "the same tensor": lambda module: module.last.add_(1),
    "a tensor from inference": change_an_inference_tensor,
    "gradient of a tensor": lambda module: (module.slope * 3).sum().backward(),
    "container": lambda module: setattr(module, "cache", {**module.cache, "new": 1}),
    "item": lambda module: module.cache.update(new=torch.ones(1)),
    "tensor in a container": lambda module: module.cache["inside"][0].add_(1),
    "dict in a tuple": lambda module: module.cache["inside"][1][1].update(deep=2),
    "set": lambda module: module.seen.add(3),
    "counter": lambda module: module.counter.update("a"),
    "deque": lambda module: module.recent.append(9),
    "array": lambda module: module.array.__setitem__(0, 5.0),
    "NumPy's generator": lambda module: module.generator.random(),
    "torch's generator": lambda module: torch.rand(1, generator=module.torch_generator),
    "what refers to itself": lambda module: module.itself.clear(),
    "new attribute": lambda module: setattr(module, "left", torch.ones(4)),
    "attribute removed": lambda module: delattr(module, "name"),
    "hook": lambda module: module.layer.register_forward_hook(lambda *_: None),
    "backward hook": lambda module: module.register_full_backward_hook(lambda *_: None),
    "hook removed": lambda module: module.layer._forward_hooks.clear(),
    "hook of a tensor": lambda module: module.layer.weight.register_hook(lambda gradient: gradient),
    "submodule added": lambda module: module.add_module("new", nn.Linear(1, 1)),
    "submodule replaced": lambda module: setattr(module, "layer", nn.Identity()),
    "submodule removed": lambda module: delattr(module, "other"),
    "parameter replaced": replace_a_weight,
    "parameter added": lambda module: module.register_parameter("new", nn.Parameter(torch.ones(1))),
    "buffer added": lambda module: module.register_buffer("new", torch.ones(1)),
    "parametrization": lambda module: parametrizations.weight_norm(module.layer),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_step_changes_of_a_module_comes_back(name: str) -> None:
    module = Restless()
    before = module.picture()
    snapshot = Snapshot([module], CPU)
    for _ in range(2):
        try:
            CHANGES[name](module)
            changed = module.picture() != before
        except AttributeError:  # the picture looks for what was removed
            changed = True
        assert changed
        snapshot.restore()
        assert module.picture() == before


def test_hooks_run_as_before_after_a_step_has_registered_more() -> None:
    module, told = nn.Linear(2, 2), list[str]()
    handle = module.register_forward_hook(lambda *_: told.append("kept"))
    module.weight.register_hook(lambda gradient: told.append("tensor"))
    snapshot = Snapshot([module], CPU)
    module.register_forward_hook(lambda *_: told.append("left"))
    module.weight.register_hook(lambda gradient: told.append("left"))
    module.bias.register_hook(lambda gradient: told.append("left"))
    handle.remove()
    snapshot.restore()
    module(torch.ones(1, 2)).sum().backward()
    assert told == ["kept", "tensor"]
    handle.remove()
    module(torch.ones(1, 2))
    assert told == ["kept", "tensor"]


def test_what_training_leaves_in_attributes_stays_while_validation_is_measured() -> None:
    module = Restless()
    snapshot = Snapshot([module], CPU)
    module.calls = 1
    snapshot.restore_parts(with_optimizers=False)
    assert module.calls == 1
    snapshot.restore_parts()
    assert module.calls == 0


def test_a_tensor_that_another_part_holds_is_copied_once() -> None:
    model, criterion = nn.Linear(4, 4, bias=False), nn.Identity()
    criterion.weights = [model.weight]  # type: ignore[assignment]
    model.itself = (model, model.weight)  # type: ignore[assignment]
    assert Snapshot([criterion, model], CPU).host_bytes == model.weight.nbytes
    criterion.weights += [torch.ones(3)]  # type: ignore[operator]
    assert Snapshot([criterion, model], CPU).host_bytes == model.weight.nbytes + 12


@pytest.mark.usefixtures("compiles_unseen")
@pytest.mark.filterwarnings("ignore:.*is deprecated")
@pytest.mark.parametrize("name", ["weight norm", "old weight norm", "spectral norm", "script", "compile"])
def test_modules_that_are_not_plain_come_back_and_train_on(name: str) -> None:
    layer = nn.Linear(6, 6)
    kinds: dict[str, Callable[[nn.Module], nn.Module]] = {
        "weight norm": parametrizations.weight_norm,
        "old weight norm": nn.utils.weight_norm,
        "spectral norm": parametrizations.spectral_norm,
        "script": torch.jit.script,
        "compile": partial(torch.compile, backend="eager"),
    }
    model = kinds[name](layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    step(model, optimizer)

    def trained() -> Any:
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


def test_batchnorm_buffers_that_changed_in_place_come_back() -> None:
    model = Net()
    before = bits_of_module(model)
    snapshot = Snapshot([model], CPU)
    step(model)
    assert bits_of_module(model)["buffers"] != before["buffers"]
    snapshot.restore()
    assert bits_of_module(model) == before


def test_a_gradient_comes_back_in_the_tensor_that_others_hold() -> None:
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    gradient = model.weight.grad
    assert gradient is not None
    expected = gradient.clone()
    snapshot = Snapshot([model], CPU)
    gradient.mul_(5)
    model.weight.grad = None
    snapshot.restore()
    assert model.weight.grad is gradient
    assert torch.equal(gradient, expected)


def test_a_gradient_that_was_not_there_goes() -> None:
    model = Net()
    snapshot = Snapshot([model], CPU)
    step(model)
    assert model.low.weight.grad is not None
    snapshot.restore()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_sparse_gradient_comes_back() -> None:
    model = nn.Embedding(10, 3, sparse=True)
    model(torch.tensor([1, 4])).sum().backward()
    before = bits_of_module(model)
    snapshot = Snapshot([model], CPU)
    assert snapshot.host_bytes >= model.weight.nbytes
    model(torch.tensor([7])).sum().backward()
    snapshot.restore()
    assert bits_of_module(model) == before


def test_each_submodule_keeps_its_own_mode() -> None:
    model = Net()
    model.inner[1].eval()
    model.low.eval()
    modes = [module.training for module in model.modules()]
    assert set(modes) == {True, False}
    snapshot = Snapshot([model], CPU)
    for training in (True, False):
        model.train(training)
        snapshot.restore()
        assert [module.training for module in model.modules()] == modes


def test_special_values_come_back() -> None:
    values = torch.tensor([float("nan"), -0.0, 0.0, float("inf"), -float("inf"), 1e-45])
    model = nn.ParameterList([nn.Parameter(values.to(dtype)) for dtype in (torch.float32, torch.float64)])
    before = bits_of_module(model)
    snapshot = Snapshot([model], CPU)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    snapshot.restore()
    assert bits_of_module(model) == before


def test_tied_parameters_stay_tied() -> None:
    model = Net()
    snapshot = Snapshot([model], CPU)
    spoil(model)
    snapshot.restore()
    assert model.tied.weight is model.embedding.weight
    with torch.no_grad():
        model.tied.weight.fill_(7)
    assert (model.embedding.weight == 7).all()


def test_two_parameters_over_one_storage_stay_so() -> None:
    flat = torch.randn(10)
    model = nn.ParameterList([nn.Parameter(flat[:4]), nn.Parameter(flat[2:])])
    expected = flat.clone()
    snapshot = Snapshot([model], CPU)
    flat.zero_()
    snapshot.restore()
    assert torch.equal(flat, expected)


@pytest.mark.parametrize(
    "data",
    [torch.zeros(8, 6), torch.zeros(48), torch.zeros(2, 6), torch.zeros(8, 6, dtype=torch.bfloat16)],
    ids=["same kind", "other shape", "smaller", "other type"],
)
def test_a_parameter_whose_data_was_replaced_comes_back(data: Tensor) -> None:
    model = Net()
    before = bits_of_module(model)
    snapshot = Snapshot([model], CPU)
    model.embedding.weight.data = data.clone()
    snapshot.restore()
    assert bits_of_module(model) == before
    model(torch.randn(4, 6)).sum().backward()


@pytest.mark.parametrize(
    "data",
    [torch.zeros(5), torch.zeros(9), torch.zeros(3, 5), torch.zeros(5, dtype=torch.float64)],
    ids=["same kind", "larger", "more dimensions", "other type"],
)
def test_a_buffer_whose_data_was_replaced_comes_back(data: Tensor) -> None:
    model = Net()
    before = bits_of_module(model)
    snapshot = Snapshot([model], CPU)
    model.scratch.data = data.clone()
    snapshot.restore()
    assert bits_of_module(model) == before


def test_what_a_step_registers_goes() -> None:
    """Such as a table for the longest batch yet."""
    model = Net()
    before = bits_of_module(model)
    snapshot = Snapshot([model], CPU)
    model.inner.register_buffer("table", torch.randn(1000), persistent=False)
    model.register_parameter("late", nn.Parameter(torch.randn(3)))
    snapshot.restore()
    assert bits_of_module(model) == before


def test_a_parameter_that_was_exchanged_or_deleted_comes_back() -> None:
    model = Net()
    before = bits_of_module(model)
    snapshot = Snapshot([model], CPU)
    model.low.weight = nn.Parameter(torch.zeros(8, 8))
    del model.output.weight
    del model.scratch
    snapshot.restore()
    assert bits_of_module(model) == before


def test_strides_come_back_with_replaced_data() -> None:
    model = nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    stride = model.weight.stride()
    snapshot = Snapshot([model], CPU)
    model.weight.data = torch.zeros(1)
    snapshot.restore()
    assert model.weight.stride() == stride


class WithExtraState(nn.Module):
    """Counts its calls in its extra state, as quantisers and metrics do."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Any] = {"calls": 0, "history": []}

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state

    def forward(self, x: Tensor) -> Tensor:
        self.seen["calls"] += 1
        self.seen["history"].append(x.sum().item())
        return x


def test_extra_state_of_submodules_comes_back() -> None:
    extra = WithExtraState()
    model = nn.Sequential(nn.Linear(2, 2), extra)
    model(torch.ones(1, 2))
    before = copy.deepcopy(extra.seen)
    snapshot = Snapshot([model], CPU)
    for _ in range(2):  # what was put back must not be the snapshot's own copy
        model(torch.ones(1, 2))
        assert extra.seen != before
        snapshot.restore()
        assert extra.seen == before


# -- optimizers

OPTIMIZERS: dict[str, Callable[[list[Any]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "fused adamw": lambda p: torch.optim.AdamW(p, fused=True),
    "foreach adamw": lambda p: torch.optim.AdamW(p, foreach=True),
    "tensor rate": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "radam": lambda p: torch.optim.RAdam(p, weight_decay=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("num_steps", [0, 2])
def test_an_optimizer_comes_back_bit_for_bit(name: str, num_steps: int) -> None:
    model = Net()
    optimizer = OPTIMIZERS[name]([p for p in model.parameters() if p.requires_grad])
    for _ in range(num_steps):
        step(model, optimizer)
    before = bits_of_module(model), bits_of_optimizer(optimizer)
    tensors = {
        (id(parameter), name): value
        for parameter, state in optimizer.state.items()
        for name, value in state.items()
    }
    groups = [id(group) for group in optimizer.param_groups]
    snapshot = Snapshot([model, optimizer], CPU)
    for _ in range(2):
        step(model, optimizer)
        optimizer.param_groups[0]["lr"] = 77.0
        optimizer.param_groups[0]["added"] = True
        snapshot.restore()
        assert (bits_of_module(model), bits_of_optimizer(optimizer)) == before
    assert [id(group) for group in optimizer.param_groups] == groups
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor):
                assert value is tensors[id(parameter), name]


def test_going_on_after_a_restore_is_as_if_nothing_had_been() -> None:
    def run(interrupted: bool) -> Any:
        torch.manual_seed(3)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters())
        step(model, optimizer)
        if interrupted:
            snapshot = Snapshot([model, optimizer], CPU)
            for _ in range(3):
                step(model.eval(), optimizer)
            snapshot.restore()
        step(model, optimizer)
        return bits(model.state_dict()), bits(optimizer.state_dict())

    assert run(interrupted=True) == run(interrupted=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_state_keeps_a_type_that_is_not_the_parameters_own(dtype: torch.dtype) -> None:
    """`load_state_dict` would cast it."""
    parameter = nn.Parameter(torch.randn(4))
    optimizer = torch.optim.Adam([parameter])
    optimizer.state[parameter] = {"step": torch.tensor(3.0), "exp_avg": torch.randn(4).to(dtype)}
    before = bits_of_optimizer(optimizer)
    snapshot = Snapshot([optimizer], CPU)
    optimizer.state[parameter] = {"step": torch.tensor(0.0), "exp_avg": torch.zeros(4)}
    snapshot.restore()
    assert bits_of_optimizer(optimizer) == before
    assert optimizer.state[parameter]["exp_avg"].dtype == dtype


def test_state_that_was_thrown_away_comes_back() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    before = bits_of_optimizer(optimizer)
    snapshot = Snapshot([model, optimizer], CPU)
    optimizer.state.clear()
    snapshot.restore()
    assert bits_of_optimizer(optimizer) == before
    assert isinstance(optimizer.state, defaultdict)


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")  # LBFGS of torch 2.8 does so
def test_nested_state_comes_back() -> None:
    """LBFGS keeps lists of directions; a state may hold tuples and dicts too."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = (model(torch.arange(12.0).view(4, 3)) - 3).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    optimizer.state[model.bias] = {"nest": {"a": (torch.ones(1), [torch.zeros(2)])}, "empty": []}
    before = bits_of_module(model), bits_of_optimizer(optimizer)
    snapshot = Snapshot([model, optimizer], CPU)
    for _ in range(2):
        optimizer.step(closure)
        optimizer.state[model.bias]["nest"]["a"][1][0].add_(1)
        optimizer.state[model.bias]["empty"].append(1)
        snapshot.restore()
        assert (bits_of_module(model), bits_of_optimizer(optimizer)) == before


def test_a_group_that_a_step_adds_goes() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.inner.parameters(), lr=0.1)
    before = bits_of_optimizer(optimizer)
    snapshot = Snapshot([model, optimizer], CPU)
    optimizer.add_param_group({"params": list(model.low.parameters())})
    snapshot.restore()
    assert bits_of_optimizer(optimizer) == before


def test_parameters_that_only_an_optimizer_holds_come_back() -> None:
    temperature = nn.Parameter(torch.tensor([1.5, 2.5]))
    temperature.grad = torch.ones(2)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW([{"params": model.parameters()}, {"params": [temperature]}])
    before = bits(temperature), bits(temperature.grad)
    snapshot = Snapshot([model, optimizer], CPU)
    assert snapshot.host_bytes == sum(p.nbytes for p in model.parameters()) + 2 * temperature.nbytes
    (model(torch.ones(1, 2)) * temperature).sum().backward()
    optimizer.step()
    temperature.requires_grad_(False)
    assert bits(temperature) != before[0]
    snapshot.restore()
    assert (bits(temperature), bits(temperature.grad)) == before
    assert temperature.requires_grad


def test_without_the_optimizers_what_they_allocated_stays() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    before = bits_of_module(model)
    snapshot = Snapshot([model, optimizer], CPU)
    step(model, optimizer)
    trained = bits_of_optimizer(optimizer)
    snapshot.restore_parts(with_optimizers=False)
    assert bits_of_module(model) == before
    assert bits_of_optimizer(optimizer) == trained
    snapshot.restore_parts()
    assert not optimizer.state


# -- scalers, averages, schedules, anything


def scale_step(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, factor: float) -> None:
    parameter = optimizer.param_groups[0]["params"][0]
    optimizer.zero_grad()
    scaler.scale(parameter.sum() * factor).backward()
    scaler.step(optimizer)
    scaler.update()


def bits_of_scaler(scaler: torch.amp.GradScaler) -> Any:
    return bits(dict(vars(scaler), _per_optimizer_states=dict(scaler._per_optimizer_states)))


@pytest.mark.parametrize("num_steps", [0, 3])
def test_a_scaler_comes_back(num_steps: int) -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    for _ in range(num_steps):
        scale_step(scaler, optimizer, 1.0)
    before = bits_of_scaler(scaler)
    snapshot = Snapshot([optimizer, scaler], CPU)
    for _ in range(2):
        scale_step(scaler, optimizer, float("inf"))
        scaler.set_growth_interval(100)
        assert bits_of_scaler(scaler) != before
        snapshot.restore()
        assert bits_of_scaler(scaler) == before
        assert scaler.get_scale() == (64.0 if num_steps == 0 else 128.0)


def test_a_scaler_in_the_middle_of_a_step_comes_back_there() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(parameter.sum()).backward()
    scaler.unscale_(optimizer)
    snapshot = Snapshot([optimizer, scaler], CPU)
    scaler.step(optimizer)
    scaler.update()
    snapshot.restore()
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert torch.equal(parameter, torch.full((3,), 0.9))  # unscaled once: the gradient is one
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.step(optimizer)


def test_a_disabled_scaler_is_no_trouble() -> None:
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    Snapshot([scaler], CPU).restore()
    assert not scaler.is_enabled()


def test_an_average_comes_back() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    ema = Ema(model, 0.5)
    step(model, optimizer)
    ema.update()
    before = bits_of_module(ema.module), ema.num_updates
    snapshot = Snapshot([model, optimizer, ema], CPU)
    for _ in range(3):
        step(model, optimizer)
        ema.update()
    assert bits_of_module(ema.module) != before[0]
    snapshot.restore()
    assert (bits_of_module(ema.module), ema.num_updates) == before


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.5, total_steps=30),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "milestones": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, milestones=[2, 4, 4]),
    "chain": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
}


@pytest.mark.filterwarnings("ignore:The epoch parameter")  # SequentialLR of torch 2.8 passes it itself
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_goes_on_where_it_was(name: str) -> None:
    def rates(interrupted: bool) -> list[float]:
        model = nn.Linear(6, 6)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedule = SCHEDULES[name](optimizer)
        rates: list[float] = []

        def go_on(num_steps: int) -> None:
            for _ in range(num_steps):
                step(model, optimizer)
                schedule.step(*([1.0] if name == "plateau" else []))
                rates.append(optimizer.param_groups[0]["lr"])

        go_on(2)
        if interrupted:
            snapshot = Snapshot([model, optimizer, schedule], CPU)
            go_on(3)
            del rates[2:]
            snapshot.restore()
        go_on(5)
        return rates

    undisturbed = rates(interrupted=False)
    assert rates(interrupted=True) == undisturbed
    assert len(set(undisturbed)) > 1


class Queue:
    """Anything that can hand out its state and take it back."""

    def __init__(self) -> None:
        self.content: dict[str, Any] = {
            "keys": torch.randn(4),
            "nest": [torch.zeros(2), {"deep": (torch.ones(1), "text")}],
            "counts": defaultdict(int, a=1),
            "pointer": 0,
            "none": None,
        }

    def state_dict(self) -> dict[str, Any]:
        return self.content

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.content = state

    def use(self) -> None:
        self.content["keys"].add_(1)
        self.content["nest"][0].add_(1)
        self.content["nest"].append(3)
        self.content["counts"]["new"] += 1
        self.content["pointer"] += 1


def test_any_object_with_a_state_dict_comes_back() -> None:
    queue = Queue()
    before = bits(queue.content)
    snapshot = Snapshot([None, queue], CPU)
    for _ in range(3):
        queue.use()
        assert bits(queue.content) != before
        snapshot.restore()
        assert bits(queue.content) == before


@pytest.mark.parametrize("part", [object(), 3, "model", [nn.Linear(1, 1)], torch.ones(1)])
def test_an_object_without_a_state_dict_is_refused(part: Any) -> None:
    with pytest.raises(
        TypeError, match=f"holds an? {type(part).__name__}, which has no state_dict and load_st"
    ):
        Snapshot([nn.Linear(1, 1), part], CPU)


def test_the_article_fits_the_type() -> None:
    for part, named in ((object(), "an object"), (3, "an int"), ("model", "a str")):
        with pytest.raises(TypeError, match=f"state holds {named}, which"):
            Snapshot([part], CPU)


GENERATORS: dict[str, Callable[[], tuple[Any, Callable[[Any], Any]]]] = {
    "torch": lambda: (torch.Generator().manual_seed(1), lambda own: torch.rand(3, generator=own).tolist()),
    "NumPy": lambda: (np.random.default_rng(1), lambda own: own.standard_normal(3).tolist()),
    "NumPy, old": lambda: (np.random.RandomState(1), lambda own: own.standard_normal(3).tolist()),
    "Python": lambda: (random.Random(1), lambda own: [own.gauss(0, 1) for _ in range(3)]),
}


@pytest.mark.parametrize("name", GENERATORS)
def test_a_generator_that_is_an_object_draws_on_where_it_was(name: str) -> None:
    generator, draw_from = GENERATORS[name]()
    draw_from(generator)
    for state, is_restored in (([], False), ([generator], True)):
        snapshot = Snapshot(state, CPU)
        expected = draw_from(generator)
        snapshot.restore()
        assert (draw_from(generator) == expected) is is_restored
        snapshot.restore()
    assert snapshot.host_bytes == 0


def test_lazy_layers_are_named_with_the_remedy() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3))
    with pytest.raises(AutoBatchError, match=r"`1.weight` of the Sequential in state.*Run one batch through"):
        Snapshot([model], CPU)
    model(torch.ones(1, 2))
    Snapshot([model], CPU).restore()


def test_half_a_contract_is_not_enough() -> None:
    class Reader:
        def state_dict(self) -> dict[str, Any]:
            return {}

    with pytest.raises(TypeError, match="Reader"):
        Snapshot([Reader()], CPU)


def test_the_copies_are_counted() -> None:
    model = nn.Linear(100, 10, bias=False)
    model.register_buffer("scratch", torch.zeros(50), persistent=False)
    optimizer = torch.optim.Adam(model.parameters())
    assert Snapshot([model, optimizer], CPU).host_bytes == 4 * 1050
    model(torch.ones(1, 100)).sum().backward()
    optimizer.step()
    assert Snapshot([model, optimizer], CPU).host_bytes == 4 * (1050 + 3 * 1000 + 1)
    assert Snapshot([], CPU).host_bytes == 0


def test_the_copies_share_nothing_with_the_state() -> None:
    """They lie on the host, and on the host too they are copies."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.5))
    queue = Queue()
    snapshot = Snapshot([model, optimizer, queue], CPU)
    expected = bits(model.weight), bits(queue.content)
    snapshot.restore()
    with torch.no_grad():
        model.weight.fill_(9)
        optimizer.param_groups[0]["lr"].fill_(9)
    queue.use()
    snapshot.restore()
    assert (bits(model.weight), bits(queue.content)) == expected
    assert optimizer.param_groups[0]["lr"] == 0.5


# -- the process


def draw() -> tuple[float, float, float, float]:
    """From every generator; `gauss` and `standard_normal` keep a second number in store."""
    return random.gauss(0, 1), random.random(), float(np.random.standard_normal()), torch.randn(1).item()


@given(seed=st.integers(0, 2**32 - 1), before=st.integers(0, 5), inside=st.integers(0, 700))
def test_every_generator_draws_on_where_it_was(seed: int, before: int, inside: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    for _ in range(before):
        draw()
    snapshot = Snapshot([], CPU)
    expected = [draw() for _ in range(3)]
    for _ in range(inside):
        draw()
    np.random.seed(1)
    snapshot.restore()
    assert [draw() for _ in range(3)] == expected


def test_the_environment_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINNAEUS_KEPT", "a")
    monkeypatch.setenv("LINNAEUS_REMOVED", "b")
    before = dict(os.environ)
    snapshot = Snapshot([], CPU)
    os.environ["LINNAEUS_KEPT"] = "changed"
    os.environ["LINNAEUS_NEW"] = "c"
    del os.environ["LINNAEUS_REMOVED"]
    snapshot.restore()
    assert dict(os.environ) == before
    assert os.getenv("LINNAEUS_NEW") is None


SWITCHES: dict[str, tuple[Callable[[], Any], Callable[[Any], object], tuple[Any, ...]]] = {
    "gradients": (torch.is_grad_enabled, torch.set_grad_enabled, (True, False)),
    "default type": (
        torch.get_default_dtype, torch.set_default_dtype, (torch.float32, torch.float64, torch.bfloat16)
    ),
    "deterministic": (
        torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, (0, 1, 2)
    ),
    "cudnn": (
        lambda: torch.backends.cudnn.enabled, lambda on: setattr(torch.backends.cudnn, "enabled", on),
        (True, False),
    ),
    "cudnn benchmark": (
        lambda: torch.backends.cudnn.benchmark, lambda on: setattr(torch.backends.cudnn, "benchmark", on),
        (True, False),
    ),
    "cudnn deterministic": (
        lambda: torch.backends.cudnn.deterministic,
        lambda on: setattr(torch.backends.cudnn, "deterministic", on), (True, False),
    ),
}  # fmt: skip


@pytest.fixture
def _switches_as_before() -> Iterator[None]:
    values = {name: read() for name, (read, _, _) in SWITCHES.items()}
    yield
    for name, (_, write, _) in SWITCHES.items():
        write(values[name])


@pytest.mark.usefixtures("_switches_as_before")
@pytest.mark.parametrize("name", SWITCHES)
def test_switches_of_the_process_come_back(name: str) -> None:
    read, write, values = SWITCHES[name]
    for value in values:
        for other in values:
            write(value)
            snapshot = Snapshot([nn.Linear(1, 1)], CPU)
            write(other)
            snapshot.restore()
            assert read() == value


def test_parts_are_put_back_under_any_switch() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    before = bits_of_module(model), bits_of_optimizer(optimizer)
    snapshot = Snapshot([model, optimizer], CPU)
    step(model, optimizer)
    with torch.inference_mode():
        model(torch.ones(2, 6))
    with torch.no_grad():
        snapshot.restore_parts()
    assert (bits_of_module(model), bits_of_optimizer(optimizer)) == before
    step(model, optimizer)


# -- all together

ACTIONS: dict[str, Callable[[Net, torch.optim.Optimizer, Ema], object]] = {
    "step": lambda model, optimizer, ema: step(model.requires_grad_(True), optimizer),
    "average": lambda model, optimizer, ema: ema.update(),
    "forward": lambda model, optimizer, ema: model(torch.randn(3, 6)),
    "eval": lambda model, optimizer, ema: model.eval(),
    "train": lambda model, optimizer, ema: model.train(),
    "spoil": lambda model, optimizer, ema: spoil(model),
    "no gradients": lambda model, optimizer, ema: model.zero_grad(),
    "zero gradients": lambda model, optimizer, ema: model.zero_grad(set_to_none=False),
    "forget": lambda model, optimizer, ema: optimizer.state.clear(),
    "rate": lambda model, optimizer, ema: optimizer.param_groups[0].update(lr=0.3),
    "draw": lambda model, optimizer, ema: draw(),
}


@given(
    before=st.lists(st.sampled_from(list(ACTIONS)), max_size=4),
    inside=st.lists(st.sampled_from(list(ACTIONS)), max_size=6),
    again=st.lists(st.sampled_from(list(ACTIONS)), max_size=3),
)
def test_whatever_happens_in_between_is_undone(
    before: list[str], inside: list[str], again: list[str]
) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    ema = Ema(model, 0.9)

    def act(names: list[str]) -> None:
        for name in names:
            ACTIONS[name](model, optimizer, ema)

    def everything() -> Any:
        generators = torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())
        return (bits_of_module(model), bits_of_optimizer(optimizer), bits_of_module(ema.module),
                ema.num_updates, generators)  # fmt: skip

    act(before)
    expected = everything()
    snapshot = Snapshot([model, optimizer, ema], CPU)
    for names in (inside, again):
        act(names)
        model.frozen.data = torch.zeros(len(names))  # of the same length or another
        snapshot.restore()
        assert everything() == expected
