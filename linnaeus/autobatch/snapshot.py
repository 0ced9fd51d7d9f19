"""The state of a process before the search, and its return to it, bit for bit."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from linnaeus.data import nest
from linnaeus.rng import rng_state, set_rng_state


@runtime_checkable
class Stateful(Protocol):
    """Anything that can hand out its state and take it back."""

    def state_dict(self) -> dict[str, Any]:
        """The state."""
        ...

    def load_state_dict(self, state: dict[str, Any], /) -> Any:
        """Take the state back."""
        ...


class Snapshot:
    """Copies on the host of everything that a step may change, to be put back by `restore`.

    Tensors are restored in place, so that every reference to them (an optimizer's, a wrapper's) stays good.

    Args:
        state: modules, optimizers, gradient scalers, averages: anything with `state_dict` and
            `load_state_dict`. Modules are taken with their non-persistent buffers, gradients and modes;
            optimizers with the exact dtype of their state.
        device: whose random number generator counts beside the CPU's.
    """

    def __init__(self, state: Iterable[Any], device: torch.device) -> None:
        parts = [part for part in state if part is not None]
        self._parts = [_snapshot_of(part) for part in parts]
        self._device = device
        self._rng = rng_state(device)
        self._environment = dict(os.environ)

    @property
    def host_bytes(self) -> int:
        """What the copies hold."""
        return sum(_num_bytes(part.copies()) for part in self._parts)

    def restore_between_trials(self) -> None:
        """Put back all but the optimizers, whose state stays allocated, and the generators."""
        for part in self._parts:
            if not isinstance(part, _OptimizerSnapshot):
                part.restore()

    def restore(self) -> None:
        """Put everything back."""
        for part in self._parts:
            part.restore()
        set_rng_state(self._rng, self._device)
        if dict(os.environ) != self._environment:
            os.environ.clear()
            os.environ.update(self._environment)


class _ParameterSnapshot:
    """Value, gradient and flag of one parameter."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = parameter
        self._gradient = parameter.grad
        self._requires_grad = parameter.requires_grad
        self.value = _host_copy(parameter)
        self.gradient_value = None if parameter.grad is None else _host_copy(parameter.grad)

    def restore(self) -> None:
        _put_back(self._parameter, self.value)
        _put_back(self._gradient, self.gradient_value)
        self._parameter.grad = self._gradient
        self._parameter.requires_grad_(self._requires_grad)


class _ModuleSnapshot:
    """Values, gradients and modes of a module; extra state where a submodule has it."""

    def __init__(self, module: nn.Module) -> None:
        self._modes = [(submodule, submodule.training) for submodule in module.modules()]
        self._parameters = [_ParameterSnapshot(parameter) for parameter in module.parameters()]
        self._buffers = [
            (submodule, name, buffer, None if buffer is None else _host_copy(buffer))
            for submodule in module.modules()
            for name, buffer in submodule._buffers.items()
        ]
        self._extra = [
            (submodule, copy.deepcopy(submodule.get_extra_state()))
            for submodule in module.modules()
            if type(submodule).get_extra_state is not nn.Module.get_extra_state
        ]

    def copies(self) -> Iterator[Any]:
        for parameter in self._parameters:
            yield from (parameter.value, parameter.gradient_value)
        for _, _, _, value in self._buffers:
            yield value

    @torch.no_grad()
    def restore(self) -> None:
        for parameter in self._parameters:
            parameter.restore()
        for submodule, name, buffer, value in self._buffers:
            _put_back(buffer, value)
            submodule._buffers[name] = buffer
        for submodule, state in self._extra:
            submodule.set_extra_state(copy.deepcopy(state))
        for submodule, training in self._modes:
            submodule.training = training


class _OptimizerSnapshot:
    """Per-parameter state and options. `load_state_dict` would cast the state to the parameters' dtype."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._state = {parameter: _saved(state) for parameter, state in optimizer.state.items()}
        self._groups = [
            {name: _saved(value) for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]

    def copies(self) -> Iterator[Any]:
        yield from self._state.values()

    def restore(self) -> None:
        self._optimizer.state.clear()
        for parameter, state in self._state.items():
            self._optimizer.state[parameter] = _loaded(state)
        for group, values in zip(self._optimizer.param_groups, self._groups, strict=True):
            for name in [name for name in group if name != "params" and name not in values]:
                del group[name]
            group.update({name: _loaded(value) for name, value in values.items()})


class _ScalerSnapshot:
    """A gradient scaler. Its state dict leaves out how far an interrupted step had come."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler = scaler
        self._state = copy.deepcopy(scaler.__getstate__())

    def copies(self) -> Iterator[Any]:
        yield self._state

    def restore(self) -> None:
        self._scaler.__setstate__(copy.deepcopy(self._state))


class _StatefulSnapshot:
    """Anything else with a state dict."""

    def __init__(self, part: Stateful) -> None:
        self._part = part
        self._state = _saved(part.state_dict())

    def copies(self) -> Iterator[Any]:
        yield self._state

    def restore(self) -> None:
        self._part.load_state_dict(_loaded(self._state))


_PartSnapshot = _ModuleSnapshot | _OptimizerSnapshot | _ScalerSnapshot | _StatefulSnapshot


def _snapshot_of(part: Any) -> _PartSnapshot:
    if isinstance(part, nn.Module):
        return _ModuleSnapshot(part)
    if isinstance(part, torch.optim.Optimizer):
        return _OptimizerSnapshot(part)
    if isinstance(part, torch.amp.GradScaler):
        return _ScalerSnapshot(part)
    if isinstance(part, Stateful):
        return _StatefulSnapshot(part)
    raise TypeError(f"state holds a {type(part).__name__}, which has no state_dict and load_state_dict")


@dataclass(frozen=True)
class _SavedTensor:
    """A tensor's copy on the host, and where the original was."""

    value: Tensor
    device: torch.device


def _saved(state: Any) -> Any:
    """A nest with host copies for tensors and deep copies for the rest."""

    def save(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return _SavedTensor(_host_copy(leaf), leaf.device)
        return copy.deepcopy(leaf)

    return nest.map_leaves(save, state)


def _loaded(saved: Any) -> Any:
    """What `_saved` was given, as fresh objects."""

    def load(leaf: Any) -> Any:
        if isinstance(leaf, _SavedTensor):
            return leaf.value.to(leaf.device, copy=True)
        return copy.deepcopy(leaf)

    return nest.map_leaves(load, saved)


def _num_bytes(saved: Any) -> int:
    values = (leaf.value if isinstance(leaf, _SavedTensor) else leaf for leaf in nest.leaves(saved))
    return sum(value.nbytes for value in values if isinstance(value, Tensor))


def _host_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _put_back(tensor: Tensor | None, value: Tensor | None) -> None:
    if tensor is not None and value is not None:
        tensor.detach().copy_(value)
