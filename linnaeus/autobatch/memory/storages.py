"""Follow the storages that torch operations allocate and free."""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, UntypedStorage

# Nothing public sees each operation.
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only  # torch 2.11 has no public one

aten = torch.ops.aten
_FEW_BYTES = 1 << 20
"""Smaller operations are not checked before they run."""


class WatchingMode(TorchDispatchMode):
    """A dispatch mode that only watches: `torch.compile` ignores it, and higher-order operators run in it."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def is_infra_mode(cls) -> bool:
        """True: `torch.compile` ignores this mode."""
        return True


class StorageTracer(WatchingMode):
    """Reports each storage that an operation allocates while the mode is on, and when it is freed.

    An operation runs first and is checked afterwards: an output whose storage belongs to no input is new.
    It sees forward, backward, and allocations of C++ code between operations (gradient buckets). It does not
    see memory that a kernel takes and returns within one operation, or memory of code of `torch.compile`.
    A storage that was allocated before is not reported when it is freed; one that was allocated while the
    mode was on is reported when it is freed, whether or not the mode is still on.

    Args:
        on_allocate: called with a number that names the storage and its bytes. It may raise, which ends the
            operation that allocated.
        on_free: called with the same number and bytes, in whichever thread frees the storage.
        on_request: called before an operation with the bytes that it is going to allocate, as far as
            `requested_bytes` tells. It may raise, and the operation does not run.
    """

    def __init__(
        self,
        on_allocate: Callable[[int, int], None],
        on_free: Callable[[int, int], None],
        on_request: Callable[[int], None] = lambda num_bytes: None,
    ) -> None:
        super().__init__()
        self._on_allocate, self._on_free, self._on_request = on_allocate, on_free, on_request
        self._known: dict[int, tuple[weakref.ref[UntypedStorage], int, int]] = {}
        self._num_allocated = 0
        references_of_a_gradient()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if accumulates_in_place(func, args, kwargs):
            return args[0].add_(args[1])
        self._on_request(requested_bytes(func, args, kwargs or {}))
        outputs = func(*args, **(kwargs or {}))
        for storage in _storages(outputs):
            known = self._known.get(storage._cdata)
            if known is None:
                inputs = {given._cdata for given in _storages(args, *(kwargs or {}).values())}
                is_literal = func is aten.lift_fresh.default  # the end of `torch.tensor(values)`
                self._add(storage, is_new=is_literal or storage._cdata not in inputs)
            elif known[2] != storage.nbytes():  # it was resized
                self._forget(storage._cdata)
                self._add(storage, is_new=True)
        return outputs

    def _add(self, storage: UntypedStorage, *, is_new: bool) -> None:
        """Start to follow a storage; one that is not new gets the number 0 and is never reported."""
        address, num_bytes, number = storage._cdata, storage.nbytes(), 0
        if is_new:
            self._num_allocated += 1
            number = self._num_allocated
        reference = weakref.ref(storage, lambda _: self._forget(address))
        self._known[address] = (reference, number, num_bytes)
        if number:
            self._on_allocate(number, num_bytes)

    def _forget(self, address: int) -> None:
        _, number, num_bytes = self._known.pop(address, (None, 0, 0))
        if number:
            self._on_free(number, num_bytes)


def requested_bytes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Bytes that an operation of torch will allocate for its outputs, as its `meta` kernel infers them.

    0 without such a kernel, and for operations on small tensors.
    """
    num_bytes = sum(
        tensor.numel() * tensor.itemsize for tensor in _tensors((*args, *kwargs.values()))
    )
    if 0 < num_bytes < _FEW_BYTES or func.namespace != "aten":
        return 0
    try:
        with _disable_current_modes():
            args, kwargs = tree_map_only(Tensor, lambda each: each.to("meta"), (args, kwargs))
            known = {storage._cdata for storage in _storages(args, *kwargs.values(), on_meta=True)}
            if "device" in kwargs:
                kwargs = {**kwargs, "device": "meta"}
            outputs = _storages(func(*args, **kwargs), on_meta=True)
    except Exception:  # kernels on `meta` may raise anything
        return 0
    return sum(
        {each._cdata: each.nbytes() for each in outputs if each._cdata not in known}.values()
    )


def accumulates_in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
    """Whether an operation adds two gradients of one tensor, which autograd does in place without a mode.

    Under any dispatch mode autograd adds them out of place. Without one it adds to the first of them, if
    nothing else refers to it (torch/csrc/autograd/input_buffer.cpp).
    """
    if func is not aten.add.Tensor or kwargs or torch.is_grad_enabled():
        return False
    if torch._C._current_graph_task_id() == -1 or not all(isinstance(arg, Tensor) for arg in args):
        return False
    is_dense = aten.is_non_overlapping_and_dense.default(args[0])
    return is_dense and _references(args[0]) == references_of_a_gradient()


def _references(tensor: Any) -> tuple[int, int, int]:
    # Autograd decides by these numbers, for which there are no public names.
    uses = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return (
        tensor._use_count(),
        uses,
        sys.getrefcount(tensor),
    )  # a hook that keeps it holds it in Python


@functools.cache
def references_of_a_gradient() -> tuple[int, int, int]:
    """References of this torch to a gradient and its storage, where only autograd and a mode have any."""
    found = []

    class Probe(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is aten.add.Tensor and not torch.is_grad_enabled():
                found.append(_references(args[0]))
            return func(*args, **(kwargs or {}))

    with _disable_current_modes(), torch.enable_grad():
        x = torch.ones(2, requires_grad=True)
        with Probe():  # type: ignore[no-untyped-call]
            y = x * 1
            (y.exp() + y.sin()).sum().backward()
    return found[0]


def num_compiled_graphs() -> int:
    """Graphs that `torch.compile` has compiled in this process; a `StorageTracer` sees nothing of them."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])


def _tensors(values: Any) -> Iterator[Tensor]:
    """Yield the tensors among arguments or outputs of an operation, and in lists of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _storages(*values: Any, on_meta: bool = False) -> list[UntypedStorage]:
    """The storages of all tensors among values that are on `meta`, or are not; two for a sparse one."""
    storages: list[UntypedStorage] = []
    for leaf in _tensors(values):
        if leaf.is_meta is on_meta:
            parts = (
                (leaf._indices(), leaf._values()) if leaf.layout == torch.sparse_coo else (leaf,)
            )
            with contextlib.suppress(NotImplementedError):  # opaque tensors have none
                storages += [part.untyped_storage() for part in parts]
    return storages
