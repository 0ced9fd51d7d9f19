"""Copies of everything that a trial may change, put back bit for bit after the search."""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from linnaeus.autobatch import nest
from linnaeus.autobatch.arguments import kind_of
from linnaeus.autobatch.attributes import (
    Attributes,
    is_optimizer,
    parameters_of,
    restore_of_generator,
    without,
)
from linnaeus.autobatch.contents import Contents
from linnaeus.autobatch.errors import AutoBatchError
from linnaeus.autobatch.rng import rng_state, set_rng_state


class Snapshot:
    """Host copies of everything that a step may change; `restore` puts them back.

    Tensors are restored in place, so that references to them (an optimizer's, a wrapper's) stay valid.

    Args:
        state: modules, optimizers, gradient scalers, averages: objects with `state_dict` and
            `load_state_dict`. Of modules, non-persistent buffers, gradients, modes, hooks, submodules and
            plain attributes (see `Contents`) are saved too; of optimizers, the exact dtype of their state,
            all attributes (see `Attributes`), the optimizers inside of them, and parameters that belong to
            no module in `state`. Random number generators that are objects may be among them.
        device: its global random number generator is saved, beside those of the CPU.

    Raises:
        AutoBatchError: a module in `state` has parameters without values (lazy layers).
        TypeError: something in `state` is neither a generator nor has `state_dict` and `load_state_dict`.
    """

    def __init__(self, state: Iterable[Any], device: torch.device) -> None:
        parts = [part for part in state if part is not None]
        modules = (part for part in parts if isinstance(part, nn.Module))
        in_modules = {id(tensor) for part in modules for tensor in (*part.parameters(), *part.buffers())}
        self._parts = [_snapshot_of(part, in_modules) for part in parts]
        self._device = device
        self._rng = rng_state(device)
        self._environment = dict(os.environ)
        self._switches = {name: read() for name, (read, _) in _SWITCHES.items()}

    @property
    def host_bytes(self) -> int:
        """Bytes of the copies."""
        return sum(_num_bytes(part.copies) for part in self._parts)

    def attributes(self) -> list[tuple[Any, Attributes]]:
        """The optimizers in `state` and inside of them, the outermost first, with their attributes."""
        found = _optimizers_among(self._parts)
        for part in found:
            found += _optimizers_among(part.attributes.parts)
        return [(part.optimizer, part.attributes) for part in found]

    def stepping_optimizers(self) -> list[Any]:
        """The optimizers of `state` that run torch's hooks when they step; of a wrapper, those inside it."""
        found = [stepping for part in _optimizers_among(self._parts) for stepping in part.stepping()]
        return list({id(optimizer): optimizer for optimizer in found}.values())

    def check_restored(self) -> None:
        """Check, after `restore_parts`, that objects other than optimizers and modules are as before.

        Raises:
            AutoBatchError: names the type of one whose `load_state_dict` has left it different.
        """
        for part in self._parts:
            if isinstance(part, _StatefulSnapshot):
                part.check_restored()

    def restore_parts(self, *, with_optimizers: bool = True, with_values: bool = True) -> None:
        """Restore `state`, or what of it the memory of a step depends on.

        Args:
            with_optimizers: whether what training keeps allocated goes: the optimizers' state, and what
                modules keep in their attributes.
            with_values: whether the parameters of modules get their values back.
        """
        for part in self._parts:
            if isinstance(part, _ModuleSnapshot):
                part.restore(with_attributes=with_optimizers, with_values=with_values)
            elif with_optimizers or not isinstance(part, _OptimizerSnapshot):
                part.restore()

    def restore(self) -> None:
        """Restore `state`, random number generators, switches of torch and environment variables."""
        for name, (read, write) in _SWITCHES.items():
            if read() != self._switches[name]:
                write(self._switches[name])
        self.restore_parts()
        set_rng_state(self._rng, self._device)
        if dict(os.environ) != self._environment:
            os.environ.clear()
            os.environ.update(self._environment)


_CUDNN = torch.backends.cudnn
_SWITCHES: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "deterministic": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    **{
        f"cudnn {name}": (partial(getattr, _CUDNN, name), partial(setattr, _CUDNN, name))
        for name in ("enabled", "benchmark", "deterministic")
    },
}
"""Global switches of torch: a function that reads each, and one that writes it."""


_HOOKS_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Attributes of a tensor: None, or a dictionary of the hooks registered on it."""


class _TensorSnapshot:
    """Value of a buffer or a gradient."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._device = tensor.device
        self._value = _host_copy(tensor)
        self.copies = [self._value]

    def restore(self, *, with_value: bool = True) -> None:
        if with_value or _differs(self._tensor, self._value, self._device):
            _put_back(self._tensor, self._value, self._device)


class _ParameterSnapshot(_TensorSnapshot):
    """Value, gradient, `requires_grad` and hooks of a parameter."""

    def __init__(self, parameter: Tensor) -> None:
        super().__init__(parameter)
        self._gradient = parameter.grad
        self._gradient_snapshot = None if parameter.grad is None else _TensorSnapshot(parameter.grad)
        self._requires_grad = parameter.requires_grad
        self._hooks = [dict(getattr(parameter, name) or {}) for name in _HOOKS_OF_TENSORS]
        if self._gradient_snapshot is not None:
            self.copies += self._gradient_snapshot.copies

    def restore(self, *, with_value: bool = True) -> None:
        self._tensor.grad = None  # torch checks it against the value that is put back
        super().restore(with_value=with_value)
        if self._gradient_snapshot is not None:
            self._gradient_snapshot.restore()
        self._tensor.grad = self._gradient
        self._tensor.requires_grad_(self._requires_grad)
        for name, hooks in zip(_HOOKS_OF_TENSORS, self._hooks, strict=True):
            present = getattr(self._tensor, name) or {}
            if present != hooks:  # the dictionary stays: autograd refers to it
                present.clear()
                present.update(hooks)


class _ModuleSnapshot:
    """Parameters, buffers, modes, extra state, hooks and attributes of a module and its submodules.

    Args:
        module: the module.
        held: ids of the tensors that another snapshot already holds.
    """

    def __init__(self, module: nn.Module, held: Collection[int]) -> None:
        _check_initialized(module)
        submodules = list(module.modules())
        self._modes = [(submodule, submodule.training) for submodule in submodules]
        self._tensors: list[_TensorSnapshot] = [_ParameterSnapshot(tensor) for tensor in module.parameters()]
        self._tensors += [_TensorSnapshot(buffer) for buffer in module.buffers()]
        held = {*held, *map(id, module.parameters()), *map(id, module.buffers())}
        registries = [part for each in submodules for part in (each._parameters, each._buffers)]
        self._registries = Contents(registries, held, _tensor_in_attribute)
        wrappers = {kind for kind in set(map(type, submodules)) if _mirrors_native_state(kind)}
        own = [submodule for submodule in submodules if type(submodule) not in wrappers]
        self._kinds = [(submodule, type(submodule)) for submodule in own]
        self._attributes = Contents(map(vars, own), held.union(map(id, registries)), _tensor_in_attribute)
        self._extra = [
            (submodule, copy.deepcopy(submodule.get_extra_state()))
            for submodule in submodules
            if type(submodule).get_extra_state is not nn.Module.get_extra_state
        ]
        self.copies = (
            [tensor.copies for tensor in [*self._tensors, *self._attributes.tensors]],
            [state for _, state in self._extra],
        )  # fmt: skip

    @torch.no_grad()
    def restore(self, *, with_attributes: bool = True, with_values: bool = True) -> None:
        for tensor in self._tensors:  # buffers are small, and may steer what a step does
            tensor.restore(with_value=with_values or type(tensor) is _TensorSnapshot)
        self._registries.restore()
        if with_attributes:
            for submodule, kind in self._kinds:  # parametrizations replace it
                if type(submodule) is not kind:
                    submodule.__class__ = kind
            self._attributes.restore()
        for submodule, state in self._extra:
            submodule.set_extra_state(copy.deepcopy(state))
        for submodule, training in self._modes:
            submodule.training = training


def _check_initialized(module: nn.Module) -> None:
    tensors = (*module.named_parameters(), *module.named_buffers())
    name = next((name for name, tensor in tensors if is_lazy(tensor)), None)
    if name is not None:
        raise AutoBatchError(
            f"AutoBatch: `{name}` of the {type(module).__name__} in state has no values yet, so it could not "
            "be restored: lazy layers make them from the first batch. Run one batch through the model before "
            "the search, such as model(make_batch(1))."
        )


def _mirrors_native_state(kind: type[nn.Module]) -> bool:
    """Whether attributes stand for state outside Python: a wrapper's reducer, shards or compiled code."""
    native = ("torch.distributed", "torch.nn.parallel", "torch._dynamo", "torch.jit")
    return any(base.__module__.startswith(native) for base in kind.__mro__)


def _tensor_in_attribute(tensor: Tensor) -> _TensorSnapshot:
    return _ParameterSnapshot(tensor) if tensor.is_leaf and tensor.requires_grad else _TensorSnapshot(tensor)


class _OptimizerSnapshot:
    """State, options and attributes of an optimizer or of a wrapper of one, read and written directly.

    `load_state_dict` is not used for the state because it casts it to the parameters' dtype. It is used for
    further keys of the `state_dict` that the attributes alone do not put back.

    Args:
        optimizer: the optimizer.
        held: ids of the parameters and optimizers that another snapshot already holds.
    """

    def __init__(self, optimizer: Any, held: Collection[int]) -> None:
        self.optimizer = optimizer
        self._owns_groups = "param_groups" in vars(optimizer)  # a wrapper may hand out those inside it
        groups = optimizer.param_groups if self._owns_groups else []
        parameters = parameters_of(optimizer) if self._owns_groups else []
        self._parameters = [
            _ParameterSnapshot(parameter) for parameter in parameters if id(parameter) not in held
        ]
        state = optimizer.state if "state" in vars(optimizer) else {}
        self._state = {parameter: _saved(entry) for parameter, entry in state.items()}
        self._groups = [_saved(without(group, "params")) for group in groups]
        held = {*held, id(optimizer), *map(id, parameters)}
        self.attributes = Attributes(optimizer, held, partial(_part_of, held))
        self._further = _saved(_further_keys(optimizer))
        self.copies = (
            [parameter.copies for parameter in self._parameters], self._state, self._groups,
            [part.copies for part in self.attributes.parts], self._further,
        )  # fmt: skip

    def stepping(self) -> list[Any]:
        """The optimizer, or those inside it if it is a wrapper that runs no hooks."""
        inner = [] if runs_hooks(self.optimizer) else _optimizers_among(self.attributes.parts)
        return [stepping for part in inner for stepping in part.stepping()] or [self.optimizer]

    @torch.no_grad()
    def restore(self) -> None:
        for parameter in self._parameters:
            parameter.restore()
        self.attributes.restore()
        self._restore_state()
        if self._further and not _is_same(self._further, _further_keys(self.optimizer)):
            self.optimizer.load_state_dict({**self.optimizer.state_dict(), **_loaded(self._further)})
            self._restore_state()

    def _restore_state(self) -> None:
        if "state" in vars(self.optimizer):
            state = self.optimizer.state
            for key in [key for key in state if key not in self._state]:
                del state[key]
            for key, saved in self._state.items():
                state[key] = _loaded(saved, state.get(key))
        if not self._owns_groups:
            return
        groups = self.optimizer.param_groups
        del groups[len(self._groups) :]
        for group, values in zip(groups, self._groups, strict=True):
            for name in [name for name in group if name != "params" and name not in values]:
                del group[name]
            group.update({name: _loaded(value, group.get(name)) for name, value in values.items()})


def _optimizers_among(parts: Iterable[Any]) -> list[_OptimizerSnapshot]:
    return [part for part in parts if isinstance(part, _OptimizerSnapshot)]


def runs_hooks(optimizer: Any) -> bool:
    """Whether a step is sure to run hooks: not where a wrapper has left out `Optimizer.__init__`."""
    return "_optimizer_load_state_dict_pre_hooks" in vars(optimizer)


def _part_of(held: Collection[int], value: Any) -> Any:
    """The snapshot of an attribute that is a tensor, a module or an optimizer."""
    return _TensorSnapshot(value) if isinstance(value, Tensor) else _snapshot_of(value, held)


def _further_keys(optimizer: Any) -> dict[str, Any]:
    """What the `state_dict` has beside `state` and `param_groups`."""
    if getattr(type(optimizer), "state_dict", None) in (None, torch.optim.Optimizer.state_dict):
        return {}
    return without(optimizer.state_dict(), "state", "param_groups")


class _ScalerSnapshot:
    """All attributes of a gradient scaler; its state dict lacks the progress of an interrupted step."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler = scaler
        self.copies = copy.deepcopy(vars(scaler))

    def restore(self) -> None:
        vars(self._scaler).clear()
        vars(self._scaler).update(copy.deepcopy(self.copies))


class _GeneratorSnapshot:
    """State of a random number generator of torch, NumPy or Python."""

    copies = ()

    def __init__(self, restore: Callable[[], object]) -> None:
        self.restore = restore


class _StatefulSnapshot:
    """Any other object with a state dict."""

    def __init__(self, part: Any) -> None:
        self._part = part
        self.copies = _saved(part.state_dict())

    def check_restored(self) -> None:
        if not _is_same(self.copies, self._part.state_dict()):
            raise AutoBatchError(
                f"AutoBatch cannot restore the {type(self._part).__name__} in state after its trials: its "
                "`load_state_dict` does not put back what its `state_dict` returned before."
            )

    def restore(self) -> None:
        self._part.load_state_dict(_loaded(self.copies))


_PartSnapshot = (
    _ModuleSnapshot | _OptimizerSnapshot | _ScalerSnapshot | _GeneratorSnapshot | _StatefulSnapshot
)


def _snapshot_of(part: Any, held: Collection[int]) -> _PartSnapshot:
    if isinstance(part, nn.Module):
        return _ModuleSnapshot(part, held)
    if is_optimizer(part):
        return _OptimizerSnapshot(part, held)
    if isinstance(part, torch.amp.GradScaler):
        return _ScalerSnapshot(part)
    if hasattr(part, "state_dict") and hasattr(part, "load_state_dict"):
        return _StatefulSnapshot(part)
    generator = restore_of_generator(part)
    if generator is not None:
        return _GeneratorSnapshot(generator)
    raise TypeError(
        f"state holds {kind_of(part)}, which has no state_dict and load_state_dict: "
        "give it both, or leave it out if no step changes it"
    )


@dataclass(frozen=True)
class _SavedTensor:
    """A tensor's host copy, its device, and a weak reference to the tensor itself."""

    value: Tensor
    device: torch.device
    original: weakref.ref[Tensor]


def _saved(state: Any) -> Any:
    """The nest with tensors as host copies and all else as deep copies."""

    def save(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return _SavedTensor(_host_copy(leaf), leaf.device, weakref.ref(leaf))
        return copy.deepcopy(leaf)

    return nest.map_leaves(save, state)


def _loaded(saved: Any, present: Any = None) -> Any:
    """The nest that `_saved` copied. Tensors still in place are restored in place; all else is made anew.

    Args:
        saved: the result of `_saved`.
        present: the nest that is in its place now.
    """
    if isinstance(saved, _SavedTensor):
        value = saved.value
        original = saved.original()
        if original is None or original is not present:
            return value.to(saved.device, copy=True)
        _put_back(original, value, saved.device)
        return original
    if type(saved) is dict:
        now = present if isinstance(present, dict) else {}
        return {name: _loaded(value, now.get(name)) for name, value in saved.items()}
    if isinstance(saved, Mapping | tuple | list):
        return nest.map_leaves(_loaded, saved)
    return copy.deepcopy(saved)


def _is_same(saved: Any, present: Any) -> bool:
    """Whether what `_saved` copied is there now, bit for bit. Objects other than plain values always are."""

    def same(before: Any, now: Any) -> bool:
        if isinstance(before, _SavedTensor):
            value = before.value.to_dense()
            return isinstance(now, Tensor) and nest.same(value, _host_copy(now).to_dense())
        return not isinstance(before, bool | int | float | str | bytes | None) or nest.same(before, now)

    if nest.map_leaves(lambda leaf: None, saved) != nest.map_leaves(lambda leaf: None, present):
        return False
    return all(map(same, nest.leaves(saved), nest.leaves(present)))


def _num_bytes(saved: Any) -> int:
    values = (leaf.value if isinstance(leaf, _SavedTensor) else leaf for leaf in nest.leaves(saved))
    tensors = [value for value in values if isinstance(value, Tensor)]
    return sum(part.nbytes for tensor in tensors for part in _parts(tensor))


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """The dense tensors that hold a tensor's values."""
    return (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,)


def _host_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _differs(tensor: Tensor, value: Tensor, device: torch.device) -> bool:
    return (tensor.shape, tensor.dtype, tensor.device) != (value.shape, value.dtype, device)


def _put_back(tensor: Tensor, value: Tensor, device: torch.device) -> None:
    """Write the value into the tensor; into new memory where shape, dtype or device have changed."""
    if tensor.is_sparse or _differs(tensor, value, device):
        tensor.data = value.to(device, copy=True)
        return
    if 0 in tensor.stride():  # expanded: several elements share memory
        once = tuple(slice(None if stride else 1) for stride in tensor.stride())
        tensor, value = tensor[once], value[once]
    if tensor.is_inference():
        with torch.inference_mode():
            tensor.copy_(value)
        return
    tensor.detach().copy_(value)
