"""Copies of everything that a trial may change, put back bit for bit after the search."""

from __future__ import annotations

import copy
import operator
import os
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from linnaeus.autobatch import nest
from linnaeus.autobatch.arguments import kind_of
from linnaeus.autobatch.errors import AutoBatchError
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
        device: its global random number generator is saved, beside those of the CPU.

    Attributes:
        optimizers: those in `state`, and those in attributes of these or of modules.

    Raises:
        AutoBatchError: a module in `state` has parameters without values (lazy layers).
        TypeError: something in `state` is neither a generator nor has `state_dict` and `load_state_dict`.
    """

    def __init__(self, state: Sequence[Any], device: torch.device) -> None:
        self._reset_sharding = reset_of(
            modules_of(state)
        )  # first, so that no gathered parameters are kept
        self.optimizers: list[Any] = []
        always: list[Any] = []
        kept: list[Any] = []  # what training keeps allocated: a validation is measured beside it
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
        self._always = Contents(always)
        self._kept = Contents(kept, self._always.seen, self._inside)
        self._device = device
        self._rng = rng_state(device)
        self._environment = dict(os.environ)
        self._switches = [read() for read, _ in _SWITCHES]

    def _inside(self, value: Any) -> list[Any]:
        """The containers of a module, an optimizer or a scaler, wherever one is found."""
        if isinstance(value, nn.Module):
            content = value._modules if _mirrors_native_state(value) else vars(value)
            return [value._parameters, value._buffers, content]
        if is_optimizer(value):
            self.optimizers.append(value)
            return [vars(value)]
        return [vars(value)] if isinstance(value, torch.amp.GradScaler) else []

    @property
    def host_bytes(self) -> int:
        """Bytes of the copies."""
        return nest.num_bytes([self._always.tensors, self._kept.tensors, self._others])

    def stepping_optimizers(self) -> list[Any]:
        """The optimizers that run torch's hooks when they step: a wrapper may not, but those inside it do."""
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
                    "`load_state_dict` does not put back what its `state_dict` returned before."
                )

    @torch.no_grad()
    def restore_parts(self, *, with_optimizers: bool = True, with_values: bool = True) -> None:
        """Restore `state`, or what of it the memory of a step depends on.

        Args:
            with_optimizers: whether what training keeps allocated goes: the optimizers' state, and what
                modules keep in their attributes.
            with_values: whether parameters get their values back.
        """
        self._reset_sharding()
        self._always.restore(with_values=with_values)
        if with_optimizers:
            for module, kind in self._kinds:  # parametrizations replace it
                if type(module) is not kind:
                    module.__class__ = kind
            self._kept.restore(with_values=with_values)
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
"""Global switches of torch: a function that reads each, and one that writes it."""


def is_optimizer(part: Any) -> bool:
    """Whether it is an optimizer, or looks like one and has an optimizer inside."""
    if isinstance(part, torch.optim.Optimizer | nn.Module):
        return not isinstance(part, nn.Module)
    looks_like_one = hasattr(type(part), "step") and hasattr(
        type(part), "zero_grad"
    )  # no scheduler does
    return looks_like_one and isinstance(getattr(part, "optimizer", None), torch.optim.Optimizer)


def parameters_of(part: Any) -> list[Tensor]:
    """The parameters of a module or an optimizer; nothing of anything else."""
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
    """Whether attributes stand for state outside Python: a wrapper's reducer, shards or compiled code."""
    native = ("torch.distributed", "torch.nn.parallel", "torch._dynamo", "torch.jit")
    return any(base.__module__.startswith(native) for base in type(module).__mro__)


_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})
_MAPPINGS = frozenset({dict, OrderedDict, defaultdict, Counter})
_CONTAINERS = _MAPPINGS | {list, set, deque}
"""Containers that can be emptied and filled. Subclasses of these may refuse that, and are left alone."""


class Contents:
    """Copies of containers, of those inside them, and of the tensors, arrays and generators in all of these.

    Anything else stays in its place and is not looked into: it may be the whole program.

    Args:
        roots: the containers, or what else is saved.
        held: ids of what is put back by others.
        inside: the containers that belong to an object of another kind.
        values: whether tensors and arrays are copied too, or left alone.

    Attributes:
        tensors: the copies of tensors.
        seen: ids of all that is put back, by this or by others.
    """

    def __init__(
        self,
        roots: Iterable[Any],
        held: Iterable[int] = (),
        inside: Callable[[Any], Iterable[Any]] = lambda value: (),
        *,
        values: bool = True,
    ) -> None:
        self.tensors: list[_TensorCopy] = []
        self.seen = set(held)
        self._containers: list[tuple[Any, Any]] = []
        self._writes: list[Callable[[], object]] = []
        waiting = deque(roots)
        while waiting:
            value = waiting.popleft()
            kind = type(value)
            if kind in _PLAIN or id(value) in self.seen:
                continue
            if not values and (isinstance(value, Tensor) or nest.is_array(value)):
                continue
            self.seen.add(id(value))
            if kind in _CONTAINERS:
                self._containers.append((value, value.copy()))
                waiting.extend(value.values() if kind in _MAPPINGS else value)
            elif isinstance(value, tuple):
                waiting.extend(value)
            elif isinstance(value, Tensor):
                if not value.is_meta:
                    learns = isinstance(value, nn.Parameter) or (
                        value.is_leaf and value.requires_grad
                    )
                    self.tensors.append(_ParameterCopy(value) if learns else _TensorCopy(value))
            elif nest.is_array(value) and value.flags.writeable and not nest.is_mapped(value):
                self._writes.append(partial(operator.setitem, value, ..., value.copy()))
            elif write := restore_of_generator(value):
                self._writes.append(write)
            else:
                waiting.extend(inside(value))

    def restore(self, *, with_values: bool = True) -> None:
        """Put back what differs, parameters' values only `with_values`; what was added goes."""
        for container, content in self._containers:
            if not _holds(container, content):
                container.clear()
                container.update(content) if hasattr(container, "update") else container.extend(
                    content
                )
        for tensor in self.tensors:
            tensor.restore(with_value=with_values or not isinstance(tensor, _ParameterCopy))
        for write in self._writes:
            write()


def _holds(container: Any, content: Any) -> bool:
    """Whether a container holds the very objects that its copy holds, in the same order."""
    if not content or len(container) != len(content):
        return not container and not content
    if isinstance(content, set):
        return bool(container == content)
    if isinstance(content, dict) and not all(
        map(operator.is_, container.values(), content.values())
    ):
        return False
    return all(map(operator.is_, container, content))


class _Value:
    """The value of a tensor on the host.

    Attributes:
        on_host: the copy.
        nbytes: bytes of the copy.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.on_host = tensor.detach().to("cpu", copy=True)
        self._device = tensor.device
        copied = nest.local(self.on_host)
        parts = (copied._indices(), copied._values()) if copied.is_sparse else (copied,)
        self.nbytes = sum(part.nbytes for part in parts)

    def on_device(self) -> Tensor:
        """A new tensor with the value, where the tensor was."""
        return self.on_host.to(self._device, copy=True)


_HOOKS_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Attributes of a tensor: None, or a dictionary of the hooks registered on it."""


class _TensorCopy(_Value):
    """A tensor and its value."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor)
        self.tensor = tensor

    def restore(self, *, with_value: bool = True) -> None:
        """Put the value back; into new memory where shape, dtype or device have changed."""
        tensor, value = self.tensor, self.on_host
        has_changed = (tensor.shape, tensor.dtype, tensor.device) != (
            value.shape,
            value.dtype,
            self._device,
        )
        if has_changed or (with_value and tensor.is_sparse):
            tensor.data = self.on_device()
        elif with_value:
            if 0 in tensor.stride():  # expanded: several elements share memory
                once = tuple(slice(None if stride else 1) for stride in tensor.stride())
                tensor, value = tensor[once], value[once]
            with torch.inference_mode(tensor.is_inference()):
                tensor.detach().copy_(value)


class _ParameterCopy(_TensorCopy):
    """A parameter and its value, its gradient, `requires_grad` and hooks."""

    def __init__(self, parameter: Tensor) -> None:
        super().__init__(parameter)
        self._gradient = None if parameter.grad is None else _TensorCopy(parameter.grad)
        self._requires_grad = parameter.requires_grad
        self._hooks = [dict(getattr(parameter, name) or {}) for name in _HOOKS_OF_TENSORS]
        if self._gradient is not None:
            self.nbytes += self._gradient.nbytes

    def restore(self, *, with_value: bool = True) -> None:
        self.tensor.grad = None  # torch checks it against the value that is put back
        super().restore(with_value=with_value)
        if self._gradient is not None:
            self._gradient.restore()
            self.tensor.grad = self._gradient.tensor
        self.tensor.requires_grad_(self._requires_grad)
        for name, hooks in zip(_HOOKS_OF_TENSORS, self._hooks, strict=True):
            present = getattr(self.tensor, name) or {}
            if present != hooks:  # the dictionary stays: autograd refers to it
                present.clear()
                present.update(hooks)


def _saved(leaf: Any) -> Any:
    return _Value(leaf) if isinstance(leaf, Tensor) and not leaf.is_meta else copy.deepcopy(leaf)


def _loaded(leaf: Any) -> Any:
    return leaf.on_device() if isinstance(leaf, _Value) else copy.deepcopy(leaf)


def _is_same(before: Any, now: Any) -> bool:
    """Whether two leaves are equal. Objects other than tensors and plain values always are."""
    if isinstance(before, _Value):
        return nest.same(before.on_host, now.on_host)
    return type(before) not in _PLAIN or nest.same(before, now)
