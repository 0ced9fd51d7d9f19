"""Copies of everything that a trial may change, put back bit for bit after the search."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from linnaeus.autobatch import nest
from linnaeus.autobatch.errors import AutoBatchError
from linnaeus.autobatch.settings import kind_of
from linnaeus.autobatch.state.contents import PLAIN, Contents, TensorValue
from linnaeus.autobatch.state.rng import restore_of_generator, rng_state, set_rng_state
from linnaeus.autobatch.state.sharded import modules_of, reset_of


class Snapshot:
    """Host copies of everything that a step may change; `restore` puts them back.

    Tensors are restored in place, so that references to them (an optimizer's, a wrapper's) stay valid.

    Args:
        state: modules, optimizers, gradient scalers, averages: objects with `state_dict` and
            `load_state_dict`. Of modules, non-persistent buffers, gradients, modes, hooks, submodules and
            plain attributes are saved too; of optimizers, the exact dtype of their state, all attributes, and
            the optimizers and parameters inside of them (see `Contents`). Random number generators that are
            objects may be among them.
        device: its global random number generator is saved, and the generators of the CPU.
        without_tensors: copy neither tensors nor state dicts.

    Attributes:
        optimizers: the optimizers in `state` and in attributes of its modules and optimizers.

    Raises:
        AutoBatchError: a module in `state` has parameters without values (lazy layers).
        TypeError: something in `state` is neither a generator nor has `state_dict` and `load_state_dict`.
    """

    def __init__(
        self, state: Sequence[Any], device: torch.device, *, without_tensors: bool = False
    ) -> None:
        # First, so that no gathered parameters are kept.
        self._reset_sharding = reset_of(modules_of(state))
        self.optimizers: list[Any] = []
        always: list[Any] = []
        kept: list[Any] = []  # memory that training keeps: a validation is measured beside it
        modules: list[nn.Module] = []
        self._others: list[tuple[Any, Any]] = []  # each with a copy of its state dict
        for part in state:
            if isinstance(part, nn.Module):
                _check_initialized(part)
                modules += part.modules()
                always += [*part.parameters(), *part.buffers()]
            elif is_optimizer(part):
                kept.append(part)
            elif isinstance(part, torch.amp.GradScaler):
                always.append(
                    vars(part)
                )  # its state dict lacks the progress of an interrupted step
            elif hasattr(part, "state_dict") and hasattr(part, "load_state_dict"):
                if not without_tensors:
                    self._others.append((part, nest.map_leaves(_saved, part.state_dict())))
            elif restore_of_generator(part) is not None:
                always.append(part)
            elif part is not None:
                raise TypeError(
                    f"state holds {kind_of(part)}, which has no state_dict and load_state_dict: "
                    "give it both, or leave it out if no step changes it"
                )
        self._modes = [(module, module.training) for module in modules]
        self._extra = [
            (module, copy.deepcopy(module.get_extra_state()))
            for module in modules
            if type(module).get_extra_state is not nn.Module.get_extra_state
        ]
        self._kinds = [
            (module, type(module)) for module in modules if not _mirrors_native_state(module)
        ]
        always += (part for module in modules for part in (module._parameters, module._buffers))
        kept += (vars(module) for module, _ in self._kinds)
        self._always = Contents(always, without_tensors=without_tensors)
        self._kept = Contents(
            kept, self._always.seen, self._inside, without_tensors=without_tensors
        )
        self._device = device
        self._rng = rng_state(device)
        self._environment = dict(os.environ)
        self._switches = [read() for read, _ in _SWITCHES]

    def _inside(self, value: Any) -> list[Any]:
        """Return the containers of a module, an optimizer or a scaler, wherever one is found."""
        if isinstance(value, nn.Module):
            content = value._modules if _mirrors_native_state(value) else vars(value)
            return [value._parameters, value._buffers, content]
        if is_optimizer(value):
            self.optimizers.append(value)
            return [vars(value)]
        return [vars(value)] if isinstance(value, torch.amp.GradScaler) else []

    @property
    def host_bytes(self) -> int:
        """Bytes of the copies on the host."""
        return nest.num_bytes([self._always.tensors, self._kept.tensors, self._others])

    def stepping_optimizers(self) -> list[Any]:
        """Return the optimizers that run torch's hooks when they step, such as the one inside a wrapper."""
        return [
            part for part in self.optimizers if "_optimizer_load_state_dict_pre_hooks" in vars(part)
        ]

    def check_restored(self) -> None:
        """Raise AutoBatchError if an object's `load_state_dict` does not put back its `state_dict`."""
        for part, saved in self._others:
            now = nest.map_leaves(_saved, part.state_dict())
            differs = nest.structure(saved) != nest.structure(now)
            if differs or not all(map(_is_same, nest.leaves(saved), nest.leaves(now))):
                raise AutoBatchError(
                    f"AutoBatch cannot restore the {type(part).__name__} in state after its trials: its "
                    "`load_state_dict` does not restore its own `state_dict`."
                )

    @torch.no_grad()
    def restore_parts(self, *, with_optimizers: bool = True) -> None:
        """Restore `state`; optimizer state and module attributes, which training keeps, only if asked to."""
        self._reset_sharding()
        self._always.restore()
        if with_optimizers:
            for module, kind in self._kinds:  # parametrizations replace it
                if type(module) is not kind:
                    module.__class__ = kind
            self._kept.restore()
        for part, saved in self._others:
            part.load_state_dict(nest.map_leaves(_loaded, saved))
        for module, extra in self._extra:
            module.set_extra_state(copy.deepcopy(extra))
        for module, training in self._modes:
            module.training = training

    def restore(self) -> None:
        """Restore `state`, random number generators, switches of torch and environment variables."""
        for (read, write), before in zip(_SWITCHES, self._switches, strict=True):
            if read() != before:
                write(before)
        self.restore_parts()
        set_rng_state(self._rng, self._device)
        if dict(os.environ) != self._environment:
            os.environ.clear()
            os.environ.update(self._environment)


_CUDNN = torch.backends.cudnn
_SWITCHES: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    *(
        (partial(getattr, _CUDNN, name), partial(setattr, _CUDNN, name))
        for name in ("enabled", "benchmark", "deterministic")
    ),
)
"""Global switches of torch, each as a pair of functions that read and write it."""


def is_optimizer(part: Any) -> bool:
    """Return whether it is an optimizer, or looks like one and has an optimizer inside."""
    if isinstance(part, torch.optim.Optimizer | nn.Module):
        return not isinstance(part, nn.Module)
    looks_like_one = hasattr(type(part), "step") and hasattr(
        type(part), "zero_grad"
    )  # no scheduler does
    return looks_like_one and isinstance(getattr(part, "optimizer", None), torch.optim.Optimizer)


def parameters_of(part: Any) -> list[Tensor]:
    """Return the parameters of a module or an optimizer; none of anything else."""
    if isinstance(part, nn.Module):
        return list(part.parameters())
    groups = getattr(part, "param_groups", ()) if is_optimizer(part) else ()
    return [parameter for group in groups for parameter in group["params"]]


def _check_initialized(module: nn.Module) -> None:
    tensors = (*module.named_parameters(), *module.named_buffers())
    name = next((name for name, tensor in tensors if is_lazy(tensor)), None)
    if name is not None:
        raise AutoBatchError(
            f"AutoBatch: `{name}` of the {type(module).__name__} in state has no values yet, so it could not "
            "be restored: lazy layers make them from the first batch. Run one batch through the model before "
            "the search, such as model(make_batch(1))."
        )


def _mirrors_native_state(module: nn.Module) -> bool:
    """Return whether attributes stand for state outside Python: a reducer, shards or compiled code."""
    native = ("torch.distributed", "torch.nn.parallel", "torch._dynamo", "torch.jit")
    return any(base.__module__.startswith(native) for base in type(module).__mro__)


def _saved(leaf: Any) -> Any:
    return (
        TensorValue(leaf) if isinstance(leaf, Tensor) and not leaf.is_meta else copy.deepcopy(leaf)
    )


def _loaded(leaf: Any) -> Any:
    return leaf.on_device() if isinstance(leaf, TensorValue) else copy.deepcopy(leaf)


def _is_same(before: Any, now: Any) -> bool:
    """Return whether two leaves are equal. Objects other than tensors, arrays and plain values always are."""
    if isinstance(before, TensorValue):
        return nest.same(before.on_host, now.on_host)
    is_compared = type(before) in PLAIN or nest.is_array(before)
    return not is_compared or nest.same(before, now)
