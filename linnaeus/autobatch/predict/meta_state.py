"""Put modules, optimizers and what else a step uses on `meta`, and everything back as it was."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map_only


class UntraceableError(RuntimeError):
    """A step cannot be traced without its device, for the reason that the message names."""


@contextlib.contextmanager
def state_on_meta(state: Any) -> Iterator[list[Tensor]]:
    """Inside the context, the tensors of the state are others, without data, on `meta`.

    The objects stay the same, so that a step which holds them runs on `meta`. The tensors themselves are not
    touched: other ones take their places in modules and optimizers, and after the context the places hold
    what they held before. Where the state is on `meta` already, it is kept from what a step does to it.

    Args:
        state: modules, optimizers, objects with these or with tensors as attributes (scalers, moving
            averages), and lists, tuples and dicts of them.

    Yields:
        The tensors on `meta` that stand for the state, in the order in which `module.to(device)` copies them.

    Raises:
        UntraceableError: it holds TorchScript modules, hooks on tensors, or parameters without a shape.
    """
    swap = _Swap()
    try:
        swap.visit(state)
        yield swap.tensors
    finally:
        swap.undo()


class _Swap:
    """Replacements of tensors by ones on `meta`, and how to undo them."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._substitutes: dict[int, tuple[Tensor, Tensor]] = {}
        self._seen: dict[int, Any] = {}
        self._kept: set[int] = set()
        self._undo = contextlib.ExitStack()

    def visit(self, part: Any) -> None:
        if id(part) in self._seen or part is None:
            return
        self._seen[id(part)] = part
        if isinstance(part, nn.Module):
            self._module(part)
        elif isinstance(part, torch.optim.Optimizer):
            self._optimizer(part)
        elif isinstance(part, list | tuple | set | frozenset):
            for item in part:
                self.visit(item)
        elif isinstance(part, dict):
            for item in part.values():
                self.visit(item)
        elif hasattr(part, "__dict__") and not isinstance(part, type):
            self._keep(vars(part))
            self._attributes(vars(part))

    def undo(self) -> None:
        self._undo.close()  # one that fails keeps none of the others from running

    def _keep(self, contents: dict[Any, Any]) -> None:
        """Put the present entries of a dict back in the end."""
        before = dict(contents)

        def restore() -> None:
            contents.clear()
            contents.update(before)

        self._undo.callback(restore)

    def _keep_containers(self, value: Any) -> None:
        """Put the contents of lists and dicts, and of those in them, back in the end.

        A model caches tensors in them, and a scaler notes there what it has done in a step.
        """
        if not isinstance(value, dict | list) or id(value) in self._kept:
            return
        self._kept.add(id(value))
        if isinstance(value, dict):
            self._keep(value)
        else:
            before = list(value)
            self._undo.callback(lambda: value.__setitem__(slice(None), before))
        for part in list(value.values() if isinstance(value, dict) else value):
            self._keep_containers(part)

    def _module(self, module: nn.Module) -> None:
        """Children first, as `module.to(device)` does."""
        if isinstance(module, torch.jit.ScriptModule):
            raise UntraceableError("a TorchScript module holds its tensors where no trace reaches them")
        if isinstance(module, DistributedDataParallel):
            self.visit(module.module)
            return
        for part in (module.__dict__, module._parameters, module._buffers, module._modules):
            self._keep(part)
        for child in module.children():
            self.visit(child)
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = self.substitute(tensor)  # type: ignore[assignment]
        self._attributes(vars(module), but=("_parameters", "_buffers", "_modules"))

    def _attributes(self, attributes: dict[str, Any], but: tuple[str, ...] = ()) -> None:
        """Replace the tensors among the attributes of an object, and look into modules and optimizers."""
        for name, value in list(attributes.items()):
            if name in but:
                continue
            self._keep_containers(value)
            if isinstance(value, Tensor):
                attributes[name] = self.substitute(value)
            elif isinstance(value, nn.Module | torch.optim.Optimizer):
                self.visit(value)
            elif isinstance(value, list | tuple | dict) and value:
                parts = tree_leaves(value)
                if any(isinstance(part, Tensor) for part in parts):
                    attributes[name] = tree_map_only(Tensor, self.substitute, value)
                for part in parts:
                    if isinstance(part, nn.Module | torch.optim.Optimizer):
                        self.visit(part)

    def _optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self._keep(optimizer.__dict__)
        steps_on_device = any(g.get("fused") or g.get("capturable") for g in optimizer.param_groups)
        for group in optimizer.param_groups:
            self._keep(group)
            group["params"] = [self.substitute(parameter) for parameter in group["params"]]
        state: defaultdict[Any, Any] = defaultdict(dict)
        for parameter, values in optimizer.state.items():
            key = self.substitute(parameter) if isinstance(parameter, Tensor) else parameter
            state[key] = {
                name: value.clone() if name == "step" and _is_on_host(value) and not steps_on_device
                else tree_map_only(Tensor, self.substitute, value)
                for name, value in values.items()
            }  # fmt: skip
        optimizer.state = state

    def substitute(self, tensor: Tensor) -> Tensor:
        """The tensor on `meta` that stands for this one; the same each time."""
        known = self._substitutes.get(id(tensor))
        if known is not None:
            return known[1]
        if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
            raise UntraceableError("a hook on a tensor of the state would not be called")
        if torch.nn.parameter.is_lazy(tensor):
            raise UntraceableError("a lazy parameter has no shape before the model has run once")
        substitute = torch.empty_like(tensor, device="meta", requires_grad=False)
        if isinstance(tensor, nn.Parameter):
            substitute = nn.Parameter(substitute, tensor.requires_grad)
        elif tensor.requires_grad:
            substitute.requires_grad_(True)
        substitute.__dict__.update(tensor.__dict__)
        self._substitutes[id(tensor)] = tensor, substitute
        self._substitutes[id(substitute)] = substitute, substitute
        self.tensors.append(substitute)
        return substitute


def _is_on_host(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cpu"
