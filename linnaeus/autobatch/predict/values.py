"""Values of small tensors on `meta`, kept on the CPU: masks, lengths and counters steer a step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._pytree import tree_leaves, tree_map_only  # torch 2.11 has no public one

from linnaeus.autobatch.predict.swap import UntraceableError

MOST_ELEMENTS, MOST_FLOATS = 1 << 22, 1 << 12
"""Largest tensors of integers, and of floats, whose values are kept."""


def _is_kept(tensor: Tensor) -> bool:
    is_whole = not (tensor.is_floating_point() or tensor.is_complex())
    return tensor.numel() <= (MOST_ELEMENTS if is_whole else MOST_FLOATS)


class Values:
    """Values of small tensors on `meta` that do not depend on weights, by storage."""

    def __init__(self) -> None:
        self._of_storage: dict[int, UntypedStorage] = {}

    def know(self, tensor: Tensor, value: Tensor) -> None:
        """Keep a copy of the values of a tensor, if it is small."""
        if _is_kept(tensor) and tensor.layout == torch.strided:
            copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(
                value
            )
            self._of_storage[tensor.untyped_storage()._cdata] = copy.untyped_storage()

    def forget(self, address: int) -> None:
        """Drop the values of a storage."""
        self._of_storage.pop(address, None)

    def of(self, tensor: Tensor) -> Tensor | None:
        """Return the values of a tensor on `meta`, in memory that its views share; None if unknown."""
        storage = self._of_storage.get(tensor.untyped_storage()._cdata)
        if storage is None:
            return None
        empty = torch.empty(0, dtype=tensor.dtype)
        return empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())

    def are_known(self, tensors: Iterable[Tensor]) -> bool:
        """Return whether the values of all these tensors are known."""
        return all(
            not tensor.is_meta or tensor.untyped_storage()._cdata in self._of_storage
            for tensor in tensors
        )

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation on the known values of its arguments."""
        args, kwargs = tree_map_only(Tensor, self._on_host, (args, kwargs))
        return func(
            *args, **({**kwargs, "device": "cpu"} if kwargs.get("device") is not None else kwargs)
        )

    def follow(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], outputs: Any) -> None:
        """Keep or forget the values of tensors that an operation has returned or written."""
        found = [each for each in _tensors(outputs) if each.is_meta]
        is_mutable, fresh = (
            func._schema.is_mutable,
            [each for each in found if not self.are_known([each])],
        )
        if not (is_mutable and inputs) and not fresh:
            return  # views of known values
        is_set = not func.__name__.startswith(("empty", "new_empty"))
        if is_set and all(map(_is_kept, found)) and self.are_known(inputs):
            with contextlib.suppress(
                RuntimeError, IndexError
            ):  # uninitialised: an index may be out of range
                results = self.compute(func, args, kwargs)
                for tensor, value in zip(_tensors(outputs), _tensors(results), strict=True):
                    if tensor.is_meta and not self.are_known([tensor]):
                        self.know(tensor, value)
                return
        for tensor in written(func, args, kwargs):
            self.forget(tensor.untyped_storage()._cdata)

    def _on_host(self, tensor: Tensor) -> Tensor:
        value = self.of(tensor) if tensor.is_meta else None
        return tensor if value is None else value


def written(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """Yield the tensors that an operation writes to."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors(
                args[position] if position < len(args) else kwargs.get(argument.name)
            )


def _tensors(nest: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(nest) if isinstance(leaf, Tensor))


class StandIn(float):
    """Result of `.item()` where the value is unknown: 1, which may be logged but decides nothing.

    After the trace, it is a number like any other.
    """

    is_traced = False


def _guarded(name: str) -> Callable[..., Any]:
    plain = getattr(float, name)

    def compute(*numbers: float) -> Any:
        result = plain(*numbers)
        if isinstance(result, float):
            return StandIn(result)
        if StandIn.is_traced and isinstance(result, int) and name != "__round__":
            raise UntraceableError(
                "a decision on the result of `.item()` needs the value of a tensor"
            )
        return result

    return compute


_ARITHMETIC = "add sub mul truediv floordiv mod pow radd rsub rmul rtruediv rpow neg abs round"
for _name in f"{_ARITHMETIC} lt le gt ge eq ne bool int".split():
    setattr(StandIn, f"__{_name}__", _guarded(f"__{_name}__"))
StandIn.__hash__ = float.__hash__  # type: ignore[method-assign]
