"""Put the modules, optimizers and tensors of a step on `meta`, and put everything back."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map_only  # torch 2.11 has no public one

from linnaeus.autobatch import nest
from linnaeus.autobatch.state.contents import Contents
from linnaeus.autobatch.state.sharded import modules_of, on_meta


class UntraceableError(RuntimeError):
    """Raised for a step that cannot be traced without its device; the message names the reason."""


@contextlib.contextmanager
def state_on_meta(state: Any) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Replace the tensors of the state by tensors without data on `meta`, inside the context.

    The objects stay the same, so that a step which holds them runs on `meta`. The tensors are not touched:
    substitutes take their places in modules and optimizers until the context ends. State that is on `meta`
    already is protected from the step too.

    Args:
        state: modules, optimizers, objects with these or with tensors as attributes (scalers, moving
            averages), and lists, tuples and dicts of them.

    Yields:
        Pairs of a tensor of the state and its substitute on `meta`, in the order in which `module.to(device)`
        copies them.

    Raises:
        UntraceableError: it holds TorchScript modules, or parameters without a shape or in host memory.
    """
    swap = _Swap()
    with swap.undo:
        parts = swap.undo.enter_context(on_meta(modules_of(nest.leaves(state))))
        if any(getattr(part, "offload_to_cpu", False) for part in parts):
            raise UntraceableError("a model sharded over host memory is not predicted")
        swap.visit(state)
        for part in (part for part in parts if hasattr(part, "_sharded_param_data")):
            part.reset_sharded_param()  # it takes the module's
            data, local = part._sharded_param_data, nest.local(part.sharded_param)
            part._sharded_param_data = local.as_strided(data.shape, data.stride(), 0)
        yield swap.tensors


class _Swap:
    """Replacements of tensors by ones on `meta`, and how to undo them."""

    def __init__(self) -> None:
        self.tensors: list[tuple[Tensor, Tensor]] = []
        self.undo = contextlib.ExitStack()  # one that fails keeps none of the others from running
        self._substitutes: dict[int, tuple[Tensor, Tensor]] = {}
        self._seen: dict[int, Any] = {}

    def visit(self, part: Any) -> None:
        if id(part) in self._seen or part is None:
            return
        self._seen[id(part)] = part
        if isinstance(part, DistributedDataParallel):
            self.visit(part.module)
        elif isinstance(part, nn.Module):
            self._module(part)
        elif isinstance(part, torch.optim.Optimizer):
            self._optimizer(part)
        elif isinstance(part, list | tuple | set | frozenset | dict):
            for item in part.values() if isinstance(part, dict) else part:
                self.visit(item)
        elif hasattr(part, "__dict__") and not isinstance(part, type):
            self._attributes(vars(part))

    def _keep(self, attributes: dict[str, Any]) -> None:
        """Put back attributes and the containers in them: a model caches tensors there."""
        self.undo.callback(Contents([attributes], without_tensors=True).restore)

    def _module(self, module: nn.Module) -> None:
        """Replace the tensors of a module, children first, as `module.to(device)` does."""
        if isinstance(module, torch.jit.ScriptModule):
            raise UntraceableError(
                "a TorchScript module holds its tensors where no trace reaches them"
            )
        for child in module.children():
            self.visit(child)
        self._attributes(vars(module))

    def _attributes(self, attributes: dict[str, Any]) -> None:
        """Replace the tensors among the attributes of an object, and look into modules and optimizers."""
        self._keep(attributes)
        for name, value in list(attributes.items()):
            parts = tree_leaves(value)
            if any(isinstance(part, Tensor) for part in parts):
                attributes[name] = tree_map_only(Tensor, self.substitute, value)
            for part in parts:
                if isinstance(part, nn.Module | torch.optim.Optimizer):
                    self.visit(part)

    def _optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self._keep(optimizer.__dict__)
        steps_on_device = any(g.get("fused") or g.get("capturable") for g in optimizer.param_groups)

        def of_parameter(name: str, value: Any) -> Any:
            if name == "step" and isinstance(value, Tensor) and not steps_on_device:
                return value.clone() if value.is_cpu else torch.zeros_like(value, device="cpu")
            return tree_map_only(Tensor, self.substitute, value)

        for group in optimizer.param_groups:
            group["params"][:] = [self.substitute(parameter) for parameter in group["params"]]
        state: defaultdict[Any, Any] = defaultdict(dict)
        for parameter, values in optimizer.state.items():
            key = self.substitute(parameter) if isinstance(parameter, Tensor) else parameter
            state[key] = {name: of_parameter(name, value) for name, value in values.items()}
        optimizer.state = state

    def substitute(self, tensor: Tensor) -> Tensor:
        """Return the substitute of a tensor on `meta`; the same one each time."""
        known = self._substitutes.get(id(tensor))
        if known is not None:
            return known[1]
        if tensor.is_meta:  # it has no values to lose
            self.undo.callback(setattr, tensor, "grad", tensor.grad)
            self._substitutes[id(tensor)] = tensor, tensor
            self.tensors.append((tensor, tensor))
            return tensor
        if torch.nn.parameter.is_lazy(tensor):
            raise UntraceableError("a lazy parameter has no shape before the model has run once")
        local: Tensor = nest.local(tensor)
        substitute = torch.empty_like(local, device="meta", requires_grad=False)
        if local is not tensor:  # a DTensor, in memory that may be padded
            padded = substitute.new_empty(local.untyped_storage().nbytes() // local.itemsize)
            part = padded.as_strided(local.shape, local.stride(), local.storage_offset())
            substitute = type(tensor)(part, tensor._spec, requires_grad=False)  # type: ignore[call-overload,attr-defined]
        if isinstance(tensor, nn.Parameter):
            substitute = nn.Parameter(substitute, tensor.requires_grad)
        elif tensor.requires_grad:
            substitute.requires_grad_(True)
        substitute.__dict__.update(tensor.__dict__)
        self._substitutes[id(tensor)] = tensor, substitute
        self._substitutes[id(substitute)] = substitute, substitute
        for hook in (tensor._backward_hooks or {}).values():
            substitute.register_hook(hook)
        for hook in (getattr(tensor, "_post_accumulate_grad_hooks", None) or {}).values():
            substitute.register_post_accumulate_grad_hook(hook)
        self.tensors.append((tensor, substitute))
        return substitute
