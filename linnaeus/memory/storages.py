"""Follow the storages that torch operations allocate and free."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class StorageTracer(TorchDispatchMode):
    """Reports each storage that an operation allocates while the mode is on, and when it is freed.

    An operation runs first and is looked at afterwards: an output whose storage belongs to no input is new.
    Forward and backward are both seen, and what C++ code allocates between operations (gradient buckets).
    Not seen: memory that a kernel takes and returns within one operation, and what `torch.compile` generates.
    A storage that was allocated before is not reported when it is freed; one that was allocated while the
    mode was on is reported when it is freed, whether or not the mode is still on.

    Args:
        on_allocate: called with a number that names the storage and its bytes. It may raise, which ends the
            operation that allocated.
        on_free: called with the same number and bytes, in whichever thread frees the storage.
    """

    supports_higher_order_operators = True

    def __init__(self, on_allocate: Callable[[int, int], None], on_free: Callable[[int, int], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._on_allocate, self._on_free = on_allocate, on_free
        self._known: dict[int, tuple[weakref.ref[UntypedStorage], int, int]] = {}
        self._num_allocated = 0

    @classmethod
    def is_infra_mode(cls) -> bool:
        """True: `torch.compile` ignores this mode."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for storage in _storages(outputs):
            known = self._known.get(storage._cdata)
            if known is None:
                inputs = {given._cdata for given in _storages((args, kwargs))}
                is_literal = func is torch.ops.aten.lift_fresh.default  # the end of `torch.tensor(values)`
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


def num_compiled_graphs() -> int:
    """Graphs that `torch.compile` has compiled in this process; a `StorageTracer` sees nothing of them."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])


def _storages(nest: Any) -> list[UntypedStorage]:
    """The storages of all tensors in a nest, two for a sparse one; opaque and `meta` tensors have none."""
    storages: list[UntypedStorage] = []
    for leaf in tree_iter(nest):
        if isinstance(leaf, Tensor) and not leaf.is_meta:
            parts = (leaf._indices(), leaf._values()) if leaf.layout == torch.sparse_coo else (leaf,)
            with contextlib.suppress(NotImplementedError):
                storages += [part.untyped_storage() for part in parts]
    return storages
